"""Page-locked memory of the size asked for, tried with a stand-in for the CUDA runtime; and kept for receives."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from equality import assert_same_state
from exchange import TIMEOUT, receive, until
from stand_in import StandIn, stand_in
from tensorferry.locked import locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.beyond_torchft

MIB = 1 << 20
REFUSED = 801


class Runtime:
    """What the CUDA runtime knows of locked memory."""

    def __init__(self) -> None:
        self.answer = 0
        self.locked: dict[int, int] = {}
        self.unlocked: list[tuple[int, bytes]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        assert flags == 1
        if not self.answer:
            self.locked[address] = nbytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # CUDA's name
        # It must still be there.
        self.unlocked.append((address, ctypes.string_at(address, 4)))
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def flags_of(address: int) -> list[str]:
    """What the kernel says of the mapping at `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if "-" in name and not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
            inside = start <= address < end
        elif inside and name == "VmFlags:":
            return words
    raise AssertionError("there is no such mapping")


def test_locked_to_the_byte_and_unlocked_before_it_is_unmapped(runtime: Runtime) -> None:
    memory = locked(5 * MIB + 123)
    address = memory.data_ptr()
    assert runtime.locked == {address: 5 * MIB + 123}
    assert (memory.shape, memory.dtype) == ((5 * MIB + 123,), torch.uint8)
    memory.fill_(7)
    # Not for children: "dc" is "do not copy on fork".
    assert "dc" in flags_of(address)
    part = memory[10:20]
    del memory
    gc.collect()
    assert runtime.locked, "a part of it is in use"
    del part
    assert runtime.unlocked == [(address, b"\7\7\7\7")]
    assert not runtime.locked


def test_a_runtime_that_does_not_lock_is_asked_to_make_it(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it remembers of its refusal is taken off it, which would else meet the trainer's next kernel."""
    made, asked = [], []
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: made.append((shape, options)))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: asked.append((shape, device)))
    runtime.answer = REFUSED
    locked(MIB)
    assert made == [((MIB,), {"dtype": torch.uint8, "device": "cpu", "pin_memory": True})]
    assert asked == [((1,), "cuda")]
    gc.collect()
    assert runtime.unlocked == []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in() as device:
        monkeypatch.setattr("tensorferry.transport.ACCELERATOR", device)
        yield device


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((MIB,), float(value)), "b": torch.full((3,), float(value)), "step": int(value)}


def test_kept_memory_is_locked(device: StandIn, open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(), open_transport(reuse_bytes=64 * MIB)
    places = set()
    for step in (1, 2, 3):
        source.send_checkpoint([1], step, state_of(step), TIMEOUT)
        received = receive(target, source, step)
        assert_same_state(received, state_of(step))
        places.add(received["w"].data_ptr())
        source.disallow_checkpoint()
        del received
        until(lambda: target._pool.held > 0, "the memory has come back")
    assert len(places) == 1
    assert len(device.pinned_bytes) == 1
    assert 4 * MIB < device.pinned_bytes[0] < 4 * MIB + 4096
    assert target._pool.held == device.pinned_bytes[0]


def test_what_is_not_kept_is_not_locked(device: StandIn, open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(), open_transport(reuse_bytes=MIB)
    source.send_checkpoint([1], 1, state_of(1), TIMEOUT)
    assert_same_state(receive(target, source, 1), state_of(1))
    assert device.pinned_bytes == []


def test_memory_that_cannot_be_locked_is_kept_as_it_is(
    device: StandIn, open_transport: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    device.refuses_to_pin = True
    source, target = open_transport(), open_transport(reuse_bytes=64 * MIB)
    for step in (1, 2):
        source.send_checkpoint([1], step, state_of(step), TIMEOUT)
        both = [receive(target, source, step), receive(target, source, step)]
        for received in both:
            assert_same_state(received, state_of(step))
        source.disallow_checkpoint()
    assert len([record for record in caplog.records if "cannot pin" in record.message]) == 1


def test_the_transport_may_go_before_what_it_received(device: StandIn, open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(), open_transport(reuse_bytes=64 * MIB)
    source.send_checkpoint([1], 1, state_of(5), TIMEOUT)
    received = receive(target, source, 1)
    target.shutdown()
    del target
    gc.collect()
    assert device.pinned_bytes
    assert_same_state(received, state_of(5))
