"""What reads a place says how a fetch ends: at once, and wave by wave."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tensorferry._native import Stored, Table
from tensorferry.storage.container import Container

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20


class Lost(Exception):
    """What a reader raises."""


class Reader:
    """Reads bytes as long as ``obstacle`` lets it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.ended = data, threading.Event()
        self.obstacle: Callable[[], None] = lambda: None

    def _ranges(self) -> tuple[str, int, Reader]:
        return "s3://bucket/key", len(self.data), self

    def get(self, at: int, nbytes: int) -> bytes:
        self.obstacle()
        return self.data[at : at + nbytes]

    def cancel(self) -> None:
        self.ended.set()


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """A reader of a container of one entry."""
    tensor = torch.arange(3 * MIB, dtype=torch.uint8)
    table = Table()
    table.append(tensor, "w", "U8", tensor.shape, tensor.data_ptr(), tensor.nbytes, 0)
    file = tmp_path / "a"
    Container(table, None, True).write(file, partial=tmp_path / "a.partial")
    return Reader(file.read_bytes())


def in_waves(stored: Stored) -> None:
    """Fetches through a buffer."""
    buffer = torch.empty(MIB, dtype=torch.uint8)
    waves = stored.staged(None, [0], MIB)
    while waves.fetch(buffer.data_ptr()) is not None:
        pass


@pytest.mark.parametrize("fetch", [Stored.fetch, in_waves])
def test_what_the_reader_raises_is_raised_each_time(fetch: Callable[[Stored], object], reader: Reader) -> None:
    stored = Stored.open(reader)

    def fail() -> None:
        raise Lost(said)

    reader.obstacle = fail
    for said in ("first", "second"):
        with pytest.raises(Lost, match=said):
            fetch(stored)
    reader.obstacle = lambda: None
    fetch(stored)


@pytest.mark.parametrize("fetch", [Stored.fetch, in_waves])
def test_an_interrupt_ends_what_is_being_read(fetch: Callable[[Stored], object], reader: Reader) -> None:
    stored, ended = Stored.open(reader), []

    def wait() -> None:
        _thread.interrupt_main()
        ended.append(reader.ended.wait(10))

    reader.obstacle = wait
    with pytest.raises(KeyboardInterrupt):
        fetch(stored)
    assert ended
    assert all(ended), "nobody told the reader"
