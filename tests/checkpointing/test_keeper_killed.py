"""Keepers are killed at random moments while a trainer saves and loads: it notices nothing, and nothing is wrong.

``--keeper-kills`` says how often.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest

from checkpoint_files import is_whole
from keepers import PATIENCE, KeeperAtWork, eventually, loaded
from tensorferry.checkpointing import latest_checkpoint
from tensorferry.checkpointing.keeper.client import Keeper
from tensorferry.errors import TensorferryError

pytestmark = pytest.mark.nightly


SECRET = "a secret of more than sixteen bytes"

TRAINER = """
import itertools, sys, threading, torch
from tensorferry.checkpointing import AsyncCheckpointer
root = sys.argv[1]
told = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), told.set()), daemon=True).start()
checkpointer = AsyncCheckpointer(keeper="default", keep_last=2)
state = {"w": torch.zeros(1 << 20)}
for n in itertools.count(1):
    state["w"].fill_(n)
    staged, written = checkpointer.save(f"{root}/step-{n}", state, step=n)
    staged.result()
    if n % 3 == 0:
        written.result()
        newest = checkpointer.latest(root)
        assert newest == f"{root}/step-{n}", newest
        found = checkpointer.load(newest, {"w": torch.zeros(1 << 20)})
        assert (found["w"] == n).all(), n
    print(n, flush=True)
    if told.is_set():
        break
checkpointer.close()
"""


def assert_all_is_right(keeper: Keeper) -> int:
    """Loads what a keeper holds, itself and at its buddy, as far as it can be reached; returns how much that was."""
    found = 0
    for one in keeper.held():
        try:
            state = loaded(keeper, one)
        except (TensorferryError, AssertionError):
            # It was evicted meanwhile, or the buddy that has it was killed.
            continue
        assert (state["w"] == one.step).all(), one
        found += 1
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_keepers_that_are_killed_while_a_trainer_saves_and_loads(folder, tmp_path, pytestconfig, monkeypatch):
    monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
    moments = random.Random(pytestconfig.getoption("--keeper-kills"))
    ports: dict[str, str] = {}
    root = tmp_path / "run"

    def start(name: str) -> KeeperAtWork:
        other = "buddy" if name == "default" else "default"
        options = ["--port", ports.get(name, "0")] + (
            ["--buddy", f"127.0.0.1:{ports[other]}"] if other in ports else []
        )
        started = KeeperAtWork(folder, *options, name=name, secret=SECRET)
        with Keeper(name) as keeper:
            ports[name] = keeper.address().split("/")[2].rpartition(":")[2]
        return started

    running = {name: start(name) for name in ("default", "buddy")}
    checked = 0
    with (
        Keeper() as own,
        Keeper("buddy") as buddy,
        subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as trainer,
    ):
        own.set_buddies([f"127.0.0.1:{ports['buddy']}"])
        assert trainer.stdout
        assert trainer.stdin
        said = [trainer.stdout.readline()]
        for kill in range(pytestconfig.getoption("--keeper-kills")):
            time.sleep(moments.random() * 0.5)
            name = "buddy" if kill % 3 == 2 else "default"
            running[name].kill()
            time.sleep(moments.random() * 0.1)
            running[name] = start(name)
            own.set_buddies([f"127.0.0.1:{ports['buddy']}"])
            for keeper in (own, buddy):
                checked += assert_all_is_right(keeper)
            assert trainer.poll() is None
        eventually("the keepers hold something", lambda: own.held() and buddy.held())
        for keeper in (own, buddy):
            checked += assert_all_is_right(keeper)
        trainer.stdin.close()
        said += trainer.stdout.read().splitlines()
        assert trainer.wait(PATIENCE) == 0
        last = int(said[-1])
        # What was accepted is on the disk, whatever became of the keepers; the last two stay.
        assert latest_checkpoint(root) == str(root / f"step-{last}")
        assert sorted(os.listdir(root)) == sorted(f"step-{n}" for n in (last, last - 1))
        assert all(is_whole(root / f"step-{n}", n) for n in (last, last - 1))
        assert assert_all_is_right(own) > 0
    assert checked > 0
    for keeper_process in running.values():
        assert keeper_process.end() == 0
        assert "Traceback" not in keeper_process.said()
    assert os.listdir(folder) == []
