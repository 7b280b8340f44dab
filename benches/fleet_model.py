"""What the engine's simulator says of the scenario "at once" of `fleet.py`, beside what was measured.

The simulator drives the engine's own scheduling code (`rust/core/src/swarm/model/`), and is a test of the crate, which
`cargo` builds first.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet import Result

ROOT = Path(__file__).resolve().parent.parent
TEST = "swarm::model::trials::what_the_bench_measures"
COMMAND = ("cargo", "test", "-q", "-p", "tensorferry-core", "--lib", TEST, "--", "--ignored", "--nocapture")
#: The difference that the simulator may have, as a part of what was measured.
MOST = 0.15


def predicted(mbit: int, mib: int, counts: list[int]) -> dict[int, tuple[float, float]]:
    """Returns for each number of receivers the copies until the last has ended, and those that leave the source."""
    asked = ",".join(map(str, (mbit, mib, *counts)))
    done = subprocess.run(
        COMMAND, cwd=ROOT, env=os.environ | {"SWARM_MODEL": asked}, capture_output=True, text=True, check=False
    )
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("model ")]
    if done.returncode or len(lines) != len(counts):
        raise RuntimeError(f"the simulator failed: {done.stdout}{done.stderr}")
    return {int(count): (float(last), float(sent)) for count, last, sent in lines}


def compare(mbit: int, mib: int, results: list[Result]) -> bool:
    """Prints the medians of the rounds beside what the simulator says; returns whether all are near enough."""
    measured = [one for one in results if one.kind == "relay" and one.scenario.endswith("receivers at once")]
    counts = sorted({one.receivers for one in measured})
    near = bool(counts)
    print(f"{'receivers':>9} {'':6} {'measured':>9} {'model':>9} {'differs by':>11}")
    for count, said in predicted(mbit, mib, counts).items():
        rounds = [one for one in measured if one.receivers == count]
        medians = (statistics.median(one.last for one in rounds), statistics.median(one.sent for one in rounds))
        for name, found, model in zip(("last", "sent"), medians, said, strict=True):
            differs = model / found - 1
            near = near and abs(differs) <= MOST
            print(f"{count:9} {name:6} {found:9.2f} {model:9.2f} {differs:11.0%}")
    print(f"the simulator is {'' if near else 'NOT '}within {MOST:.0%} of all figures")
    return near
