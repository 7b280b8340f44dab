"""Checkpointers: ours beside torch's, dcp.async_save, torch_checkpointing and torch.save.

A training loop saves a state several times, with each contender in a process of its own, and steps on while the
checkpoint is being written. Contenders take turns within a round, forwards in even rounds and backwards in odd ones.
Each has the options with which it is fastest (`checkpointers.py`); `dcp.async_save` runs with its defaults as well.

    stand still   until the loop may change the state: save() and, where there is one, the future of the staging
    step rate     steps a second from then until the checkpoint is written, over those just before the save
    durable       from the call of save() until the bytes are on the disk; contenders that leave synchronising to the
                  system are synchronised afterwards, within the time
    load          into tensors that exist, by a fresh process, from files that the page cache still holds; where there
                  are several ways, the quickest, which is named
    memory        what the trainer and its helpers take at most beyond what they held before; shared pages count once.
                  It is sampled during the saves that do not count as later ones, since that takes part of a core

The first save of a process makes buffers and processes, so it has a column of its own. Those after it can make buffers,
too, as long as a keeper takes all that there are: the fifth is the first that counts as a later one. The floor of the
stand-still, and of a load, is a plain copy of the state by several threads into memory that was touched before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointers import FLOOR, KEEPER, KEEPER_NAME, MAKERS, OURS
from checkpointing_trainer import Trainer
from machine import facts, others_busy
from report import end, spread_text

sys.path.append(str(Path(__file__).parents[1] / "examples" / "reshard"))
from ranks import Job, RankFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTENDERS = tuple(MAKERS)
_PATIENCE_S = 300
MIB = 1 << 20
#: Seconds that a keeper may take to begin, or to end.
_KEEPER_S = 30


@contextlib.contextmanager
def keeper() -> Iterator[str]:
    """Runs a keeper within the block, whose clients find it through the folder that this gives."""
    with tempfile.TemporaryDirectory() as folder, _running_keeper(folder):
        yield folder


@contextlib.contextmanager
def _running_keeper(folder: str) -> Iterator[None]:
    environment = {**os.environ, "TENSORFERRY_KEEPER_DIR": folder}
    command = [sys.executable, "-m", "tensorferry.checkpointing.keeper", "--name", KEEPER_NAME]
    options = ["--memory", "8G", "--interface", "127.0.0.1", "--generations", "2"]
    with subprocess.Popen([*command, *options], env=environment) as running:
        try:
            deadline = time.monotonic() + _KEEPER_S
            ask = [*command, "--status"]
            while subprocess.run(ask, env=environment, capture_output=True, check=False).returncode:
                if running.poll() is not None or time.monotonic() > deadline:
                    raise RankFailed("the keeper does not begin")
                time.sleep(0.05)
            yield
        finally:
            running.terminate()
            try:
                running.wait(_KEEPER_S)
            except subprocess.TimeoutExpired:
                running.kill()


def measure(contender: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Saves a few times in one process, loads in another one; returns the costs."""
    with keeper() if contender == KEEPER else contextlib.nullcontext() as sockets:
        folder.mkdir()
        return _measure(contender, options, folder, sockets)


def _measure(contender: str, options: argparse.Namespace, folder: Path, sockets: str | None) -> dict[str, Any]:
    mib, kib_each = options.mib, options.kib_each
    paths = [folder / f"step-{number}" for number in range(options.saves)]
    try:
        with Job("the trainer", 1, Trainer, _PATIENCE_S, daemon=False) as saving:
            nbytes = saving("build", mib, 1, kib_each)[0]
            ways = saving("open", contender, sockets)[0]
            saves = saving("save", paths, options.unloaded, options.warm_up, options.neighbours)[0]
            saving("close")
        sample: dict[str, Any] = {"bytes": nbytes, "saves": saves, "loads": {}, "equal": True}
        for way in ways:
            with Job("the restarted trainer", 1, Trainer, _PATIENCE_S, daemon=False) as loading:
                loading("build", mib, 2, kib_each)
                loading("open", contender, sockets)
                sample["loads"][way] = loading("load", paths[-1], way)[0]
                sample["equal"] = sample["equal"] and loading("equals", mib, 1, kib_each)[0]
                loading("close")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return sample


def _quickest_load(samples: list[dict[str, Any]]) -> tuple[str, list[float]]:
    """Returns the way to load with the lowest median, and its seconds."""
    ways = {way: [s["loads"][way] for s in samples if way in s["loads"]] for s in samples for way in s["loads"]}
    return min(ways.items(), key=lambda item: statistics.median(item[1]), default=("", []))


def as_text(results: dict[str, Any]) -> str:
    """Returns the table."""
    good = [s for s in results["samples"] if "error" not in s]
    lines = [
        f"{good[0]['bytes'] / MIB:.0f} MiB of state, {results['machine']['cores']} cores; medians (lowest-highest)"
        if good
        else "no contender could be measured",
        "",
        "| | first save, stand still ms | later saves, stand still ms | step rate meanwhile | durable ms | load ms "
        "| memory MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    medians: dict[str, dict[str, float]] = {}
    for contender in CONTENDERS:
        samples = [s for s in good if s["contender"] == contender]
        if not samples:
            continue
        later = [save for s in samples for save in s["saves"][results["warm_up"] :]]
        still = [save["stand_still_s"] for save in later]
        rates = [save["rate"] for save in later if save.get("rate") is not None]
        durable = [save["durable_s"] for save in later if "durable_s" in save]
        way, loads = _quickest_load(samples)
        extra = [float(max(found)) for s in samples if (found := [e["extra"] for e in s["saves"] if "extra" in e])]
        medians[contender] = {
            name: statistics.median(values)
            for name, values in {"still": still, "durable": durable, "load": loads}.items()
            if values
        }
        cells = [
            contender,
            spread_text([s["saves"][0]["stand_still_s"] for s in samples], 0, 1e3),
            spread_text(still, 0, 1e3),
            spread_text(rates, 2),
            spread_text(durable, 0, 1e3),
            spread_text(loads, 0, 1e3) + (f", {way}" if way not in ("", "load") else ""),
            spread_text(extra, 0, 1 / MIB),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_summary(medians)])


def _summary(medians: dict[str, dict[str, float]]) -> list[str]:
    """Returns a line for each figure in which we are compared with the best of the others."""
    lines = []
    others = {name: found for name, found in medians.items() if name not in (FLOOR, OURS, KEEPER)}
    for ours in (OURS, KEEPER):
        for key, what in (("still", "stands still"), ("durable", "is durable"), ("load", "loads")):
            rivals = {name: found[key] for name, found in others.items() if key in found}
            if key in medians.get(ours, {}) and rivals:
                best = min(rivals, key=lambda name: rivals[name])
                ratio = rivals[best] / medians[ours][key]
                lines.append(f"{ours} {what} {ratio:.2f} times as fast as the best of the others ({best})")
    for ours in (OURS, KEEPER):
        for key, what in (("still", "stands still"), ("load", "loads")):
            if key in medians.get(ours, {}) and FLOOR in medians:
                ratio = medians[ours][key] / medians[FLOOR]["still"]
                lines.append(f"{ours} {what} {ratio:.2f} times as long as {FLOOR} takes")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("build/bench/checkpointing.json"), help="samples")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="where checkpoints are written")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--kib-each", type=int, default=0, help="size of each tensor; by default a model's")
    parser.add_argument("--saves", type=int, default=8, help="saves of each process")
    parser.add_argument("--warm-up", type=int, default=4, help="how many of them come before those that count as later")
    parser.add_argument("--unloaded", type=float, default=1.5, help="seconds of training before each save")
    parser.add_argument("--neighbours", type=int, default=0, help="processes beside that keep a core busy each")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="separated by commas without blanks")
    options = parser.parse_args()
    contenders = _split(options.contenders)
    for name in {*contenders} - {*CONTENDERS}:
        parser.error(f"no such contender: {name}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "version": 1,
        "machine": facts(),
        "others_busy": others_busy(),
        "warm_up": options.warm_up,
        "neighbours": options.neighbours,
        "samples": [],
        "problems": [],
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(options.rounds):
            for contender in contenders[::-1] if number % 2 else contenders:
                try:
                    sample = measure(contender, options, Path(folder).resolve() / "job")
                    if not sample.get("equal", True):
                        results["problems"].append(f"{contender}: what was loaded differs")
                except RankFailed as e:
                    sample = {"error": str(e)}
                    results["problems"].append(f"{contender}: {e}")
                results["samples"].append({"contender": contender, "round": number, **sample})
                options.json.write_text(json.dumps(results, indent=1) + "\n")
                print(f"round {number + 1}, {contender}", file=sys.stderr, flush=True)
    print(as_text(results))
    return end(results["problems"])


def _split(names: str) -> list[str]:
    """Splits at commas that no blank follows: the names of some contenders have commas in them."""
    return re.split(r",(?! )", names)


if __name__ == "__main__":
    sys.exit(main())
