"""Two jobs that save into one folder over and over, with random delays, and are killed at random.

Run with ``delays.c`` loaded. Prints the outcome as JSON: how often the folder held a whole checkpoint of either job
when no process was running, and everything that was wrong.
"""

from __future__ import annotations

import collections
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tensorferry.dcp import FileReader, FileWriter

warnings.simplefilter("ignore")
PATIENCE_S = 100


def state(job, number):
    # The jobs have states of different sizes, so every file has another length.
    value = 1_000_000 * job + number
    return {f"{job}-{i}": torch.full((40 * job + i % 7,), value) for i in range(200 * job)}


def save_for_ever(folder, job, log):
    torch.set_num_threads(1)
    os.environ["DELAY_US"] = "8000"
    number = 0
    while True:
        number += 1
        try:
            dcp.save(state(job, number), storage_writer=FileWriter(folder), no_dist=True)
        except dcp.CheckpointException as e:
            with log.open("a") as file:
                cause = e.failures[0][0]
                file.write(f"{type(cause).__name__}: {cause}\n")


def whole(folder):
    """Loads the folder and returns the number that all tensors hold; raises if they do not hold one number."""
    metadata = FileReader(folder).read_metadata()
    found = {name: torch.zeros(about.size, dtype=torch.int64) for name, about in metadata.state_dict_metadata.items()}
    dcp.load(found, storage_reader=FileReader(folder), no_dist=True)
    (number,) = {value for tensor in found.values() for value in tensor.unique().tolist()}
    if state(number // 1_000_000, number).keys() != found.keys():
        raise ValueError(f"{number} with keys of another save")
    return number


def standstill(processes):
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    for process in processes:
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.0005)


def main(folder, log, seconds):
    forking = multiprocessing.get_context("fork")
    generator = random.Random(7)
    running = {}

    def start(job):
        running[job] = forking.Process(target=save_for_ever, args=(folder, job, log), daemon=True)
        running[job].start()

    for job in (1, 2):
        start(job)
    found, wrong = collections.Counter(), collections.Counter()
    end = time.monotonic() + seconds
    # On a busy machine it goes on until both jobs have saved.
    while time.monotonic() < end or (len(found) < 2 and time.monotonic() < end + PATIENCE_S):
        time.sleep(generator.random() * 0.05)
        standstill(running.values())
        if (folder / "index.safetensors").exists():
            try:
                found[whole(folder) // 1_000_000] += 1
            except BaseException as e:
                cause = e.failures[0][0] if isinstance(e, dcp.CheckpointException) else e
                wrong[f"{type(cause).__name__}: {cause}"[:300]] += 1
        for job, process in list(running.items()):
            if generator.random() < 0.1:
                process.kill()
                process.join()
                start(job)
            else:
                os.kill(process.pid, signal.SIGCONT)
                if generator.random() < 0.3:
                    os.kill(process.pid, signal.SIGSTOP)
                    time.sleep(generator.random() * 0.02)
                    os.kill(process.pid, signal.SIGCONT)
    for process in running.values():
        process.kill()
        process.join()
    print(json.dumps({"found": found, "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
