"""SIGKILL of the trainer and of the process that writes, at random moments: no accepted save is lost, none is wrong.

``--saver-kills`` says how often, and seeds the moments.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest

from checkpoint_files import children, files_in, is_running, is_whole
from keepers import eventually
from tensorferry.storage.folder import read_index

pytestmark = pytest.mark.process


WAIT_S = 60

TRAINER = """
import itertools, os, sys, torch
from tensorferry.checkpointing import AsyncCheckpointer
root, in_place = sys.argv[1], sys.argv[2] == "1"
checkpointer = AsyncCheckpointer()
state = {"w": torch.zeros(6 << 20)}
print("ready", flush=True)
for n in itertools.count():
    state["w"].fill_(n)
    staged, _ = checkpointer.save(root if in_place else f"{root}/{n}", state, step=n)
    staged.result()
    print(n, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_trainer_loses_no_accepted_save(tmp_path, pytestconfig) -> None:
    """Every other trainer saves into one folder again and again, the others into one after the other."""
    moments = random.Random(pytestconfig.getoption("--saver-kills"))
    for kill in range(pytestconfig.getoption("--saver-kills")):
        root, in_place = tmp_path / str(kill), bool(kill % 2)
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(root), str(int(in_place))], stdout=subprocess.PIPE, text=True
        )
        assert trainer.stdout.readline() == "ready\n"
        writers = children(trainer.pid)
        assert len(writers) == 1
        first = trainer.stdout.readline()
        time.sleep(moments.random() * 0.6)
        trainer.kill()
        trainer.wait(WAIT_S)
        accepted = [int(line) for line in (first + trainer.stdout.read()).split()]
        trainer.stdout.close()
        eventually("the writer ends", lambda pids=writers: not any(map(is_running, pids)))
        if in_place:
            step = read_index(root).step
            assert step >= accepted[-1]
            assert is_whole(root, step)
            assert len(files_in(root)) == 2
            continue
        for n in accepted:
            assert is_whole(root / str(n), n)
        for folder in root.iterdir():
            # One that was handed over and of which the trainer has not said so any more; never half of one.
            assert is_whole(folder, int(folder.name))
