"""Page-locked memory has the requested size (with a simulated CUDA runtime) and is kept for later receives."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from equality import assert_same_state
from exchange import TIMEOUT, receive, until
from stand_in import StandIn, stand_in
from tensorferry.memory.accelerator import Accelerator
from tensorferry.memory.pinned import pinned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.beyond_torchft

MIB = 1 << 20
REFUSED = 801


class Runtime:
    """A CUDA runtime that records locked memory and devices: each thread has device 0 until it selects another."""

    def __init__(self) -> None:
        self.answer = 0
        self.locked: dict[int, int] = {}
        self.unlocked: list[tuple[int, bytes]] = []
        self.contexts = {0}
        self._own = threading.local()

    def device(self) -> int:
        return getattr(self._own, "device", 0)

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        before = self.device()
        self._own.device = device
        try:
            yield
        finally:
            self._own.device = before

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        assert flags == 1
        self.contexts.add(self.device())
        if not self.answer:
            self.locked[address] = nbytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # CUDA's name
        self.contexts.add(self.device())
        # The memory must still be mapped.
        self.unlocked.append((address, ctypes.string_at(address, 4)))
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", runtime.device)
    monkeypatch.setattr(torch.cuda, "device", runtime.on)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", runtime.contexts.__contains__, raising=False)
    return runtime


def test_locked_to_the_byte_and_unlocked_before_it_is_unmapped(runtime: Runtime) -> None:
    memory = pinned(5 * MIB + 123)
    address = memory.data_ptr()
    assert runtime.locked == {address: 5 * MIB + 123}
    assert (memory.shape, memory.dtype) == ((5 * MIB + 123,), torch.uint8)
    memory.fill_(7)
    part = memory[10:20]
    del memory
    gc.collect()
    assert runtime.locked, "a part of it is in use"
    del part
    assert runtime.unlocked == [(address, b"\7\7\7\7")]
    assert not runtime.locked


def test_a_runtime_that_does_not_lock_is_asked_to_make_it(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that the runtime remembers is cleared; otherwise the trainer's next kernel would report it."""
    made, asked = [], []
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: made.append((shape, options)))
    # This runs a kernel; making zeros runs none in newer torch.
    monkeypatch.setattr(torch, "ones", lambda *shape, device: asked.append((shape, device)))
    runtime.answer = REFUSED
    pinned(MIB)
    assert made == [((MIB,), {"dtype": torch.uint8, "device": "cpu", "pin_memory": True})]
    assert asked == [((1,), "cuda")]
    gc.collect()
    assert runtime.unlocked == []


def test_no_context_is_made_where_the_process_has_none(runtime: Runtime) -> None:
    """A thread without a current device would use device 0, where a context takes some hundred megabytes."""
    runtime.contexts.clear()
    runtime.contexts.add(3)
    memory = [pinned(MIB)]
    with runtime.on(2):
        memory.append(pinned(MIB))
    assert len(runtime.locked) == 2
    forget = threading.Thread(target=memory.clear)
    forget.start()
    forget.join()
    assert len(runtime.unlocked) == 2
    assert runtime.contexts == {3}


#: Maps memory of its own at the address of the parent's locked memory, and then frees the parent's.
CHILD = """
import ctypes, gc
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
READ_AND_WRITE, PRIVATE_ANONYMOUS_HERE = 3, 0x100022
assert libc.mmap(address, nbytes, READ_AND_WRITE, PRIVATE_ANONYMOUS_HERE, -1, 0) == address
ctypes.memset(address, 5, nbytes)
kept.clear()
gc.collect()
assert ctypes.string_at(address, nbytes) == bytes([5]) * nbytes
"""


@pytest.mark.process
def test_a_forked_child_lets_go_of_it(runtime: Runtime) -> None:
    """The child's own mapping at that address stays, and the child makes no call to the parent's device."""
    kept = [pinned(MIB)]
    address = kept[0].data_ptr()
    kept[0].fill_(7)
    child = os.fork()
    if not child:
        code = 1
        try:
            exec(CHILD, {"address": address, "nbytes": MIB, "kept": kept})
            code = 0 if not runtime.unlocked else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert runtime.locked == {address: MIB}
    kept.clear()
    assert runtime.unlocked == [(address, b"\7\7\7\7")]


def test_nothing_is_asked_of_an_accelerator_before_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, open_transport: Callable[..., Any]
) -> None:
    """CUDA counts its devices in a way that leaves forked children without any."""

    class Untouchable(Accelerator):
        def is_available(self) -> bool:
            raise AssertionError("asked")

    monkeypatch.setattr("tensorferry.torchft.transport.ACCELERATOR", Untouchable())
    source = open_transport(reuse_bytes=MIB)
    source.send_checkpoint([1], 1, {"w": torch.ones(10)}, TIMEOUT)
    live = {"w": torch.zeros(10)}
    open_transport(state_dict=lambda: live).recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert torch.equal(live["w"], torch.ones(10))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in() as device:
        monkeypatch.setattr("tensorferry.torchft.transport.ACCELERATOR", device)
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
    # The scalars are not included: they are stored separately.
    assert 4 * MIB <= device.pinned_bytes[0] < 4 * MIB + 4096
    assert target._pool.held == device.pinned_bytes[0]


def test_a_refusal_is_logged_once_for_the_whole_process(
    device: StandIn, open_transport: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Sends, receives in place, kept memory, saves and other transports each have their own memory, but warn once."""
    device.refuses_to_pin = True
    live, sent = {"w": torch.zeros(MIB)}, {"w": torch.ones(MIB)}
    device.adopt(live["w"], sent["w"])
    for _ in range(2):
        source, kept = open_transport(), open_transport(reuse_bytes=64 * MIB)
        source.send_checkpoint([1], 1, sent, TIMEOUT)
        assert_same_state(receive(kept, source, 1), sent)
        receive(open_transport(state_dict=lambda: live), source, 1)
        assert_same_state(live, sent)
    assert len([record for record in caplog.records if "cannot pin" in record.message]) == 1
