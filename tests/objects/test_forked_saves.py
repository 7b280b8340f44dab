"""A process that was forked after requests were made cannot make any, and starts one that does."""

from __future__ import annotations

import pytest
import torch

from child import Child
from exchange import until
from stores import FORBIDDEN, objects, uploads
from tensorferry.checkpointing import load_file

pytestmark = pytest.mark.process

#: Makes a request, and has a forked process save; says what that has told, and which processes it has left.
SCRIPT = """
import multiprocessing, os, signal, threading, torch
from tensorferry.memory.accelerator import ACCELERATOR
from tensorferry.memory.staging import HostStager
from tensorferry.state.snapshot import StateSnapshot
from tensorferry.storage.places import any_place

place, does = any_place({place!r}), {does!r}
w = torch.arange({numbers})
place.parent.entries()

def progress(done, total):
    if does == "raises":
        raise ZeroDivisionError
    if does == "is killed" and done:
        os.kill(os.getpid(), signal.SIGKILL)

def write(tell):
    try:
        snapshot = StateSnapshot({{"w": w}}, HostStager(ACCELERATOR), "borrow")
        snapshot.container().write(place, partial=place, progress=progress)
        tell.send("written")
    except BaseException as e:
        tell.send(f"{{type(e).__name__}}: {{e}}")

told, tell = multiprocessing.Pipe(duplex=False)
process = multiprocessing.get_context("fork").Process(target=write, args=(tell,))
process.start()
w.fill_(-1)
tell.close()
try:
    print(told.recv())
except EOFError:
    print("ended")
process.join()
"""


def saved(server, name, numbers=1000, does="nothing"):
    """Returns the URL, and what the forked process has told."""
    url = f"{server.place}/{name}"
    child = Child(forks=True)
    try:
        child.start(SCRIPT.format(place=url, does=does, numbers=numbers))
        return url, child.finish(90).strip()
    finally:
        child.end()


@pytest.mark.parametrize("numbers", [1000, 3 << 20], ids=["whole", "in parts"])
def test_a_forked_process_saves_the_state_as_it_was(any_server, numbers):
    url, told = saved(any_server, "a.safetensors", numbers)
    assert told == "written"
    assert torch.equal(load_file(url)["w"], torch.arange(numbers))


def test_it_tells_what_the_store_says(gateway, server):
    gateway.act = lambda _, method, path: FORBIDDEN if method in ("PUT", "POST") and "a.safetensors" in path else None
    url, told = saved(server, "a.safetensors")
    assert told.startswith(f"StoreRefused: {url}")
    assert "does not permit it" in told


@pytest.mark.parametrize("does", ["raises", "is killed"])
def test_nothing_is_left_of_a_save_that_is_broken_off(server, does):
    _, told = saved(server, "a.safetensors", 3 << 20, does)
    assert told.startswith("ZeroDivisionError" if does == "raises" else "ended")
    assert not objects(server.url, server.prefix)
    # What has been killed does not wait for its helper to end.
    until(lambda: not uploads(server.url, server.prefix), "the parts are gone")
