"""An accelerator simulated in host memory, so that tests can watch and delay its work.

A stream is a thread that runs its work in order; a copy reads the bytes that are there when it runs. A stream can be
held: it then runs nothing until a test allows it.

Inside `StandIn.simulation`, torch operators on memory of the device run on the calling thread's stream. As on a real
device, `copy_`, `clone` and the like only queue their work, and those that bring bytes to the host wait for it. So a
copy that does not wait for work on another stream reads old bytes, and a copy that was not waited for may not have
happened yet. Operators that bypass the object under test are recorded, and fail the test.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tensorferry.memory.accelerator import Accelerator, AddDevices
from tensorferry.memory.tensors import storage_key
from tensorferry.state import tree

#: The byte that fills page-locked memory before it is written to.
POISON = 0xA5
WAIT_S = 20


class Event:
    """A point in a stream, reached when `reach` is called. `gone` is called when the event is freed."""

    def __init__(self, gone: Callable[[], object] = lambda: None) -> None:
        self._reached = threading.Event()
        self._gone = gone
        self.error: BaseException | None = None

    def __del__(self) -> None:
        self._gone()

    def reach(self, error: BaseException | None) -> None:
        self.error = error
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        assert self._reached.wait(WAIT_S), "the stream was held and never released"
        if self.error is not None:
            raise self.error


class Stream:
    """Runs queued work in order. After a failure it runs nothing more and reports the error, as a device does."""

    def __init__(self) -> None:
        self.done = 0
        self.error: BaseException | None = None
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._let = threading.Semaphore(0)
        self._held = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work

    def queue(self, work: Callable[[], object]) -> None:
        """Queues `work`; while the stream is held, each such piece of work needs a `let`."""

        def turn() -> None:
            if self._held:
                self._let.acquire()
            if self.error is None:
                try:
                    work()
                except BaseException as e:
                    self.error = e
            self.done += 1

        self._work.put(turn)

    def record(self, gone: Callable[[], object] = lambda: None) -> Event:
        event = Event(gone)
        self._work.put(functools.partial(self._reach, event))
        return event

    def _reach(self, event: Event) -> None:
        event.reach(self.error)

    def wait(self, event: Event) -> None:
        self._work.put(functools.partial(event._reached.wait, WAIT_S))

    def wait_stream(self, other: Stream) -> None:
        self.wait(other.record())

    def hold(self) -> None:
        """Makes each further piece of work wait for a `let`."""
        self._let = threading.Semaphore(0)
        self._held = True

    def let(self, count: int = 1) -> None:
        self._let.release(count)

    def release(self) -> None:
        self._held = False
        self._let.release(1000)

    def end(self) -> None:
        self.release()
        self._work.put(None)
        self._thread.join(WAIT_S)


class StandIn(Accelerator):
    """An accelerator on which all adopted tensors are.

    Attributes:
        trainer: the default stream, which the trainer uses
        has_default: whether `default_stream` returns it
        callers: the streams that threads took with `on_stream`
        captures: whether a graph is being captured on the current stream
        known: whether `in_use` reports the devices
        touched: names of the operators that used memory of the device
        outside: those of them that bypassed the object under test
        followed: how often a stream was made to wait for queued work
        side: the streams that the object under test made, in order
        copies: the queued copies: number of bytes, and identity of the storage on the device
        pinned_bytes: sizes of the requested page-locked memory
        locked: address and size of memory that was page-locked where it was, and is not unlocked yet
        strays: number of events that a thread freed while it had no device
    """

    def __init__(self) -> None:
        self.strays = 0
        self._own = threading.local()
        self.trainer = Stream()
        self.has_default = True
        self.callers: list[Stream] = []
        self.captures = False
        self.known = True
        self.touched: list[str] = []
        self.outside: list[str] = []
        self.followed = 0
        self.side: list[Stream] = []
        self.copies: list[tuple[int, int]] = []
        self.pinned_bytes: list[int] = []
        self.locked: dict[int, int] = {}
        self.refuses_to_pin = False
        self.fails: Callable[[int], bool] = lambda _: False
        self.hold_new = False
        self._devices: dict[int, torch.device] = {}
        self._kept: list[Any] = []

    def adopt(self, *tensors: torch.Tensor, device: int = 0, keep: bool = True) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._devices[storage_key(storage)] = torch.device("cuda", device)
            if keep:
                # Otherwise another storage could get the same identity.
                self._kept.append(storage)

    def is_available(self) -> bool:
        return True

    def in_use(self) -> list[torch.device]:
        return sorted(set(self._devices.values()), key=str) if self.known and not self.captures else []

    def device_of(self, storage: torch.UntypedStorage) -> torch.device | None:
        return self._devices.get(storage_key(storage))

    def holding(self, tensors: Iterable[torch.Tensor]) -> list[torch.device]:
        storages = [part.untyped_storage() for tensor in tensors for part in parts(tensor)]
        return [device for device in dict.fromkeys(map(self.device_of, storages)) if device is not None]

    def indices(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [i for i, tensor in enumerate(tensors) if self.device_of(tensor.untyped_storage()) is not None]

    def pinned(self, nbytes: int) -> torch.Tensor:
        if self.refuses_to_pin:
            raise RuntimeError("cudaErrorMemoryAllocation")
        self.pinned_bytes.append(nbytes)
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def page_lock(self, address: int, nbytes: int) -> Callable[[], None] | None:
        if self.refuses_to_pin:
            raise RuntimeError("cudaErrorMemoryAllocation")
        self.locked[address] = nbytes
        return lambda: self.locked.pop(address) and None

    @contextlib.contextmanager
    def device_guard(self, devices: Iterable[torch.device]) -> Iterator[None]:
        before = self._has_device()
        self._own.has = before or bool(list(devices))
        try:
            yield
        finally:
            self._own.has = before

    def _has_device(self) -> bool:
        return getattr(self._own, "has", False)

    def _gone(self) -> None:
        self.strays += threading.current_thread() not in self._threads() and not self._has_device()

    def _streams(self) -> list[Stream]:
        return [self.trainer, *self.callers, *self.side]

    def _threads(self) -> list[threading.Thread]:
        return [stream._thread for stream in self._streams()]

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[Stream]:
        """Gives the calling thread a stream of its own, as torchft's healing thread has."""
        before = self.current_stream(CUDA)
        self.callers.append(Stream())
        self._own.stream = self.callers[-1]
        try:
            yield self.callers[-1]
        finally:
            self._own.stream = before

    def current_stream(self, device: torch.device) -> Stream:
        del device
        return getattr(self._own, "stream", self.trainer)

    def default_stream(self, device: torch.device) -> Stream | None:
        del device
        return self.trainer if self.has_default else None

    def synchronize_device(self, device: torch.device) -> None:
        del device
        for stream in self._streams():
            self.synchronize(stream)

    def is_capturing(self, device: torch.device) -> bool:
        del device
        return self.captures

    def stream(self, device: torch.device) -> Stream:
        assert self._has_device()
        assert device in self._devices.values()
        self.side.append(Stream())
        if self.hold_new:
            self.side[-1].hold()
        return self.side[-1]

    def wait_for_pending(self, stream: Stream, device: torch.device) -> None:
        assert self._has_device()
        self.followed += 1
        super().wait_for_pending(stream, device)

    @contextlib.contextmanager
    def reading(self, devices: Iterable[torch.device]) -> Iterator[AddDevices]:
        with super().reading(devices) as also, self._inside():
            yield also

    @contextlib.contextmanager
    def writing(self, devices: Iterable[torch.device]) -> Iterator[AddDevices]:
        with super().writing(devices) as also, self._inside():
            yield also

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        before, self._own.inside = getattr(self._own, "inside", False), True
        try:
            yield
        finally:
            self._own.inside = before

    def copy(self, stream: Stream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            number = len(self.copies)
            on_device = [t for t in (target, source) if self.device_of(t.untyped_storage()) is not None]
            assert len(on_device) == 1
            self.copies.append((source.nbytes, storage_key(on_device[0].untyped_storage())))

            def work(target: torch.Tensor = target, source: torch.Tensor = source, number: int = number) -> None:
                if self.fails(number):
                    raise RuntimeError("the device is lost")
                target.copy_(source)

            stream.queue(work)

    def record(self, stream: Stream) -> Event:
        assert self._has_device()
        return stream.record(self._gone)

    def synchronize(self, stream: Stream) -> None:
        stream.record().synchronize()

    def release(self) -> None:
        for stream in self._streams():
            stream.release()

    def close(self) -> None:
        for stream in self._streams():
            stream.end()

    @contextlib.contextmanager
    def simulation(self) -> Iterator[None]:
        """Runs torch operators on memory of the device on this thread's stream."""
        save = torch.serialization._save

        def save_from_host(*arguments: Any) -> None:
            # It reads memory without operators. On a device it copies storages on the current stream and waits.
            self.touch("torch.save")
            save(*arguments)

        # Only one thread at a time saves, in these tests.
        with pytest.MonkeyPatch.context() as patch, _Readings(self), _Operators(self):
            patch.setattr(torch.serialization, "_save", save_from_host)
            yield

    def simulated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `function` so that it runs inside `simulation`."""

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            with self.simulation():
                return function(*arguments, **options)

        return run

    def touch(self, name: str, waits: bool = True) -> Stream:
        """Records a use of the device's memory and returns its stream, after waiting for it with `waits`."""
        if not getattr(self._own, "inside", False):
            self.outside.append(name)
        stream = self.current_stream(CUDA)
        self.touched.append(name)
        if waits:
            self.synchronize(stream)
        return stream


CUDA = torch.device("cuda", 0)
#: Operators that write to the tensor object and not to its memory.
_NAMES_ONLY = {
    "aten::set_",
    "aten::detach_",
    "aten::resize_",
    "aten::as_strided_",
    "aten::requires_grad_",
}


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors that hold the memory of `tensor`."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.layout is torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    return [tensor]


class _Operators(TorchDispatchMode):
    """Runs operators on memory of the device on the calling thread's stream."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(one not in (torch.Tensor, torch.nn.Parameter) for one in types):
            # The operators that it runs on its parts come here again.
            return NotImplemented
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        schema = func._schema
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in schema.arguments)
        views = not writes and any(value.alias_info for value in schema.returns)
        if views or schema.name in _NAMES_ONLY or not self._device.holding(tensors):
            return func(*args, **kwargs)
        if schema.name == "aten::copy_":
            return self._copy(*args, **kwargs)
        if writes:
            self._queue(schema.name, lambda: func(*args, **kwargs))
            return args[0]
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not made:
            self._device.touch(schema.name)
            return func(*args, **kwargs)
        for one in (part for tensor in made for part in parts(tensor)):
            self._device.adopt(one)
            if one.nbytes:
                # The memory holds other bytes until the work has run.
                one.untyped_storage().fill_(POISON)

        def work() -> None:
            for target, value in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                for to, part in zip(parts(target), parts(value), strict=True):
                    to.copy_(part)

        self._queue(schema.name, work)
        return result

    def _queue(self, name: str, work: Callable[[], object]) -> Stream:
        stream = self._device.current_stream(CUDA)
        stream.queue(torch.no_grad()(work))
        return self._device.touch(name, waits=False)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        stream = self._queue("aten::copy_", lambda: target.copy_(source))
        to_host, from_host = not self._device.holding([target]), not self._device.holding([source])
        # A copy to a non-contiguous target ends with a step on the device, which is not waited for.
        if not non_blocking and (to_host or (from_host and target.is_contiguous())):
            self._device.synchronize(stream)
        return target


class _Readings(TorchFunctionMode):
    """Notices transfers from the device to the host that run no operator here, because the device is host memory."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func is torch.Tensor.is_pinned and self._device.holding(args[:1]):
            return False
        leaves = torch.Tensor.cpu, torch.Tensor.to, torch.Tensor.numpy, torch.Tensor.tolist
        if func in leaves and self._device.holding(args[:1]):
            self._device.touch(func.__name__)
            if func is torch.Tensor.cpu:
                with _disable_current_modes():
                    return args[0].clone()
        return func(*args, **kwargs)


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    """Yields a device; fails at the end if operators bypassed the object under test."""
    device = StandIn()
    flatten = tree.flatten

    def flattened(state: Any, _native: bool = True) -> tree.Flat:
        # Native code asks torch where a tensor is, and would take the memory of this device for what it is: the host's.
        flat = flatten(state, False)
        assert not flat.accelerated, "a tensor is on a real device"
        flat.accelerated = device.indices(flat.plain)
        return flat

    tree.flatten = flattened
    try:
        yield device
        assert device.outside == [], device.outside
    finally:
        tree.flatten = flatten
        device.close()


def open_on(
    device: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    open_transport: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> Any:
    """Opens a transport whose accelerator is `device`; its sends and receives run in the simulation."""
    with monkeypatch.context() as patch:
        patch.setattr("tensorferry.torchft.transport.ACCELERATOR", device)
        transport = open_transport(*arguments, **options)
    for name in ("send_checkpoint", "recv_checkpoint"):
        setattr(transport, name, device.simulated(getattr(transport, name)))
    return transport
