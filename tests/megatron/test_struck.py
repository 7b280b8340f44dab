"""Whatever befalls one rank, wherever it is: the others raise Megatron's exception, and the checkpoint before stays."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
from placed import Job
from test_errors import outcome, tensor

#: By hand, they repeat it for minutes.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

#: How long ranks wait for those that never come, and collectives for those that are stopped.
SHORT, GROUP_S = timedelta(seconds=2), 5
PHASES = ("save", "load", "load two-stage")
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


#: Of each tensor, whatever the number of ranks.
ROWS = 16384


def states(count):
    """The state of this rank in the save number ``count``, whose tensors hold that number."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    made = {name: tensor(name, rank, world, ROWS // world) for name in ("w", "v")}
    for shard in made.values():
        shard.data.fill_(count)
    made["o"] = ShardedObject("o", count, (1,), (0,), replica_id=rank)
    return made | {"count": count}


def save(kept, folder):
    import tensorferry.megatron as ours

    del kept
    ours.save(states(1), folder)


def go_on(kept, phase, folder):
    """Does one thing again and again, until something befalls a rank."""
    import tensorferry.megatron as ours

    del kept

    def run():
        everyone = torch.distributed.group.WORLD
        replicas = {name: tensor(name, 0, 1, ROWS, replica_id=torch.distributed.get_rank()) for name in ("w", "v")}
        count = 1
        while True:
            count += 1
            if phase == "save":
                ours.save(states(count), folder, ours.save_strategy(timeout=SHORT))
            elif phase == "load":
                ours.load(states(0), folder, ours.load_strategy(timeout=SHORT))
            else:
                strategy = ours.TwoStageDataParallelLoadShardedStrategy(everyone, interface="127.0.0.1", timeout=SHORT)
                ours.load(dict(replicas), folder, strategy)

    return outcome(run)


def check(kept, folder):
    """Mends what may be mended; the state is that of one save, whichever."""
    import tensorferry.megatron as ours

    del kept
    if torch.distributed.get_rank() == 0:
        ours.restore_common(folder)
    torch.distributed.barrier()
    found = ours.load(states(0), folder)
    return {float(number) for name in ("w", "v") for number in found[name].unique()} | {found["o"], found["count"]}


def strike(host, folder, job, phase, victim, way, at_once=False):
    """Has ranks do something until one of them is struck; returns what each says, once the checkpoint was looked at."""

    def answer(rank):
        assert job._pipes[rank].poll(120), f"rank {rank} waits, {victim} was {way}"
        fine, told[rank] = job._pipes[rank].recv()
        assert fine, told[rank]

    folder.mkdir()
    told = {}
    try:
        job.run(save, str(folder))
        if at_once:
            os.kill(job.pids[victim], SIGNALS[way])
        job.start(go_on, phase, str(folder))
        time.sleep(0.1 + random.random() * 0.4)
        os.kill(job.pids[victim], SIGNALS[way])
        for rank in set(range(len(job.pids))) - {victim}:
            answer(rank)
        if way == "stopped":
            # It finds out when it goes on.
            os.kill(job.pids[victim], signal.SIGCONT)
            answer(victim)
    finally:
        job.kill()
    for rank, text in told.items():
        assert re.search("^cannot (save|load|write|spread)", text), (phase, way, victim, rank, text)
    (numbers,) = {frozenset(one) for one in host.job(2).run(check, str(folder))}
    assert len(numbers) == 1, (phase, way, numbers)
    return told


def test_all_others_raise_and_the_checkpoint_before_stays(host, tmp_path, pytestconfig):
    random.seed(pytestconfig.getoption("--fuzz-seed"))
    # Each phase and each way come up before any of them does again.
    for number in range(max(1, pytestconfig.getoption("--kills") * 6 // 10)):
        phase, way = PHASES[number % len(PHASES)], list(SIGNALS)[number % len(SIGNALS)]
        world = random.choice((2, 4))
        job = Job(host, world, GROUP_S, over_tcp=True)
        strike(host, tmp_path / str(number), job, phase, random.randrange(world), way)


def hurry(kept):
    from tensorferry.state import together

    del kept
    together._GRACE = 0.5


def test_a_stopped_rank_that_hosts_the_store_makes_nobody_wait_for_ever(host, tmp_path, pytestconfig):
    """As without torchrun: the store does not answer either, whatever its time-out."""
    random.seed(pytestconfig.getoption("--fuzz-seed"))
    for number in range(max(2, pytestconfig.getoption("--kills") // 5)):
        job = Job(host, 2, GROUP_S, hosts=0)
        job.run(hurry)
        # Before it comes, the others cannot even ask the store whether it has.
        told = strike(host, tmp_path / str(number), job, PHASES[number % 3], 0, "stopped", number % 2 == 1)
        assert number % 2 == 0 or "the store of the process group has not answered within 7 s" in told[1]
