"""The deadline of a receive is that of its pickles, too, whoever the source is; pickles of files have no deadline."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry import HTTPTransport
from tensorferry.checkpointing import load_file
from tensorferry.dcp import PeerReader, PeerWriter, own_errors
from tensorferry.errors import FetchTimeout
from tensorferry.pickles import deadline as deadlines
from tensorferry.pickles.allowlist import Allowed
from tensorferry.pickles.deadline import Deadline
from tensorferry.pickles.unpickler import unpickler_class

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.beyond_torchft,
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore::FutureWarning"),
]

TIMEOUT = timedelta(seconds=30)
OVER = r"timed out: the whole receive was given 30\.000 s, which its pickles exceed"


class Clock:
    """Stands in for the clock of deadlines: they all have passed as soon as they are set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1000.0
        return self.now


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "time", Clock())


@pytest.fixture
def transport() -> Iterator[HTTPTransport[Any]]:
    opened: HTTPTransport[Any] = HTTPTransport(TIMEOUT, interface="127.0.0.1")
    yield opened
    opened.shutdown()


def objects(count: int) -> dict[str, Any]:
    """Returns a state whose pickle is as long as ``count`` long texts."""
    return {"w": torch.arange(3.0), "texts": {number: f"{number:01000}" for number in range(count)}}


@pytest.mark.usefixtures("over")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_receive_does_not_work_on_a_pickle_beyond_its_deadline(in_place: bool, transport: Any) -> None:
    transport.send_checkpoint([1], 1, objects(300), TIMEOUT)
    live = {"w": torch.zeros(3), "texts": {}}
    receiver: Any = HTTPTransport(TIMEOUT, interface="127.0.0.1", state_dict=(lambda: live) if in_place else None)
    try:
        with pytest.raises(FetchTimeout, match=OVER):
            receiver.recv_checkpoint(0, transport.metadata(), 1, TIMEOUT)
        # What is read in no time needs no look at the clock.
        transport.send_checkpoint([1], 2, objects(1), TIMEOUT)
        assert receiver.recv_checkpoint(0, transport.metadata(), 2, TIMEOUT)["texts"] == objects(1)["texts"]
    finally:
        receiver.shutdown()


@pytest.mark.usefixtures("over")
def test_nor_does_a_load_from_another_job() -> None:
    state = {"w": torch.arange(3.0), "o": list(range(100_000))}
    with_writer = PeerWriter(TIMEOUT, interface="127.0.0.1")
    try:
        dcp.save(state, storage_writer=with_writer, no_dist=True)
        with pytest.raises(FetchTimeout, match=OVER), own_errors():
            dcp.load(
                {"w": torch.zeros(3), "o": []},
                storage_reader=PeerReader(with_writer.metadata(), timeout=TIMEOUT),
                no_dist=True,
            )
    finally:
        with_writer.shutdown()


@pytest.mark.usefixtures("over")
def test_a_file_is_read_however_long_that_takes(tmp_path: Any) -> None:
    torch.save(objects(300), tmp_path / "saved.pt")
    assert load_file(tmp_path / "saved.pt")["texts"] == objects(300)["texts"]


def test_keys_of_one_instruction_are_not_set_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """One instruction sets any number of keys, and keys that collide are the slower, the more there are."""
    # Each key, in nine bytes, has the place of all others in a table of up to 2**20 entries.
    keys = b"".join(b"\x8a\x07" + struct.pack("<Q", (number + 1) << 35)[:7] + b"N" for number in range(200))
    data = b"\x80\x02}(" + keys * 2 + b"u."
    clock = Clock()
    monkeypatch.setattr(deadlines, "time", clock)
    looks = []

    class Counting(Deadline):
        def check(self) -> None:
            looks.append(None)
            if len(looks) > 1:
                super().check()

    allowed = Allowed().until(Counting(5.0))
    with pytest.raises(FetchTimeout, match=r"given 5\.000 s"):
        unpickler_class(allowed)(io.BytesIO(data)).load()
    assert len(looks) == 2
    assert len(unpickler_class(Allowed())(io.BytesIO(data)).load()) == 200
