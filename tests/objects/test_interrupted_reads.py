"""Ctrl-C, pressed twice, gives no memory back before those who write to it have ended."""

from __future__ import annotations

import pytest
import torch

from child import Child
from stores import BUCKET, client

pytestmark = pytest.mark.process

#: Loads again and again, with Ctrl-C twice within 0.1 s at another moment of each load.
SCRIPT = """
import os, random, signal, threading, time
from tensorferry.checkpointing import load_file

def press(pauses):
    for pause in pauses:
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)

load_file({url!r})
rng, interrupted = random.Random(1), 0
for number in range({rounds}):
    pressing = threading.Thread(target=press, args=([rng.random() * 0.25, rng.random() * 0.1],))
    try:
        pressing.start()
        try:
            load_file({url!r})
        finally:
            while pressing.is_alive():
                try:
                    pressing.join()
                except KeyboardInterrupt:
                    pass
    except KeyboardInterrupt:
        interrupted += 1
print("interrupted", interrupted > 0)
"""


def test_two_interrupts_of_a_download_end_it(server, tmp_path):
    torch.save({"w": torch.ones(12 << 20)}, tmp_path / "x.pt")
    client(server.url).upload_file(str(tmp_path / "x.pt"), BUCKET, f"{server.prefix}/x.pt")
    child = Child(forks=True)
    try:
        child.start(SCRIPT.format(url=f"{server.place}/x.pt", rounds=24))
        assert child.finish(90).strip() == "interrupted True"
    finally:
        child.end()
