"""Clients of object stores are kept for later operations, and batches of objects are removed to the last one."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from stores import objects
from tensorferry.storage.objects import bucket, client
from tensorferry.storage.places import any_place
from tensorferry.storage.stores import store_of

OPTIONS = {"region": "us-east-1"}


@pytest.fixture
def made(monkeypatch):
    """Names of the clients that were made, each of which is a new object."""
    names = []
    monkeypatch.setattr(client, "_clients", {})
    monkeypatch.setattr(client, "_make", lambda *how: names.append(how[2]) or object())
    return names


def test_the_client_that_was_used_last_stays(made):
    used = client.client_of("s3://a", OPTIONS, 0)
    for timeout in range(1, 30):
        client.client_of("s3://a", OPTIONS, timeout)
        assert client.client_of("s3://a", OPTIONS, 0) is used
        assert len(client._clients) <= client._KEPT
    assert made == list(range(30))


@pytest.mark.waits
def test_a_missing_object_of_a_batch_leaves_no_others(server, monkeypatch):
    """Some stores say what is missing, and stop there."""
    folder, library = any_place(server.place), client.obstore()
    for name in "abc":
        (folder / name).write_bytes(b"x")

    async def delete(store, keys):
        for key in [keys] if isinstance(keys, str) else keys:
            if key.endswith("missing"):
                raise FileNotFoundError(key)
            await library.delete_async(store, key)

    strict = SimpleNamespace(**{**vars(library), "delete_async": delete})
    monkeypatch.setattr(bucket.client, "obstore", lambda: strict)
    store_of(folder).remove(["a", "missing", "b", "c"])
    assert not objects(server.url, server.prefix)


_EXITS = """
import asyncio, gc, sys, threading, time
from tensorferry.storage.places import any_place
from tensorferry.storage.stores import store_of

wake = asyncio.SelectorEventLoop._write_to_self

def slowly(loop):
    # A thread of the client wakes the loop, and needs the interpreter again when that has ended.
    wake(loop)
    if threading.current_thread().name.startswith("Dummy"):
        time.sleep(0.3)

class Last:
    # It is collected when the interpreter is being finalized.
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0.6)

asyncio.SelectorEventLoop._write_to_self = slowly
gc.disable()
Last()
print(any_place(sys.argv[1]).is_file())
"""


@pytest.mark.process
@pytest.mark.waits
def test_a_process_that_ends_right_after_a_request_ends_as_it_should(server):
    done = subprocess.run(
        [sys.executable, "-c", _EXITS, f"{server.place}/nothing"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
