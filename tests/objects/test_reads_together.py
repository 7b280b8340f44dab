"""What ends a read of several objects ends all of it at once, although some of the requests stand still."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from datetime import timedelta

import pytest

from tensorferry.errors import CorruptCheckpoint, TransferCancelled
from tensorferry.memory.tensors import no_rows
from tensorferry.storage import reserved
from tensorferry.storage.commits import Commit, commit_index
from tensorferry.storage.container import Container
from tensorferry.storage.objects.reader import RangeReader
from tensorferry.storage.places import any_place, begun
from tensorferry.storage.source import FolderSource

#: Seconds of patience, longer than pytest waits for a test.
PATIENCE = 500.0
pytestmark = pytest.mark.timeout(60)
NAMES = ["rank00000-0123456789abcdef0123.safetensors", "rank00001-0123456789abcdef0123.safetensors"]
NBYTES = 200_000


class Reading:
    """Two objects of one checkpoint, and memory for both."""

    def __init__(self, server):
        place = any_place(server.place, timeout=timedelta(seconds=PATIENCE))
        data = bytes(range(256)) * (NBYTES // 256 + 1)
        headers = {}
        for name in NAMES:
            made = Container(no_rows(), None, True, [("data", data[:NBYTES])])
            headers[name] = made.write(place / name, partial=place / f"{name}.partial").header
        index = place / "index.safetensors"
        commit_index(index, [(reserved.INDEX, b"{}")], Commit(headers, 1))
        self.source = FolderSource(begun(place) / index.name, None)
        self.source.read_index()
        self.memory = [ctypes.create_string_buffer(NBYTES) for _ in NAMES]
        self.slices = {
            name: [("data", "U8", NBYTES, 0, NBYTES, ctypes.addressof(memory), [])]
            for name, memory in zip(NAMES, self.memory, strict=True)
        }
        self.expected = data[:NBYTES]


def of_rank(rank, method, path):
    return method == "GET" and f"/rank{rank:05d}-" in path


def test_all_is_read_and_progress_is_told_one_at_a_time(server):
    reading, told, at_once = Reading(server), [], threading.Lock()

    def progress(done, total):
        assert at_once.acquire(blocking=False)
        told.append((done, total))
        at_once.release()

    reading.source.read(reading.slices, progress)
    assert all(memory.raw == reading.expected for memory in reading.memory)
    assert told == sorted(told)
    assert told[-1] == (2 * NBYTES, 2 * NBYTES)


def test_a_damaged_object_is_told_while_another_one_stalls(gateway, server):
    reading, is_stalled = Reading(server), threading.Event()

    def act(_, method, path):
        if of_rank(0, method, path):
            is_stalled.set()
            return "stall"
        if of_rank(1, method, path):
            is_stalled.wait(30)
            return lambda data: data[:-1] + bytes([data[-1] ^ 1])
        return None

    gateway.act = act
    with pytest.raises(CorruptCheckpoint, match="rank00001"):
        reading.source.read(reading.slices)


@pytest.mark.parametrize("ends", ["by an error", "by its caller"])
def test_a_read_that_has_ended_leaves_the_memory_alone(server, monkeypatch, ends):
    """A request may go on for a moment after it was cancelled."""
    place = any_place(server.place, timeout=timedelta(seconds=PATIENCE)) / "data"
    place.write_bytes(bytes(NBYTES))
    opened, memory = begun(place).opened(), ctypes.create_string_buffer(NBYTES)
    went_on = threading.Event()

    async def get(_, at, nbytes):
        if at and ends == "by an error":
            raise CorruptCheckpoint("no")
        if at:
            opened.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(PATIENCE)
        asyncio.get_running_loop().call_soon(went_on.set)
        return memoryview(b"x" * nbytes)

    monkeypatch.setattr(RangeReader, "_get", get)
    half, address = NBYTES // 2, ctypes.addressof(memory)
    with pytest.raises(CorruptCheckpoint if ends == "by an error" else TransferCancelled):
        opened.read_all([(0, address, half), (half, address + half, NBYTES - half)])
    assert went_on.wait(30)
    assert not any(memory.raw)
