"""Host memory that passes for an accelerator's, so that what is asked of one can be watched and held up.

A stream is a thread that does one thing after the other, and what it copies is what is there when it copies. It can be
held: then it does nothing until it is let.
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

from tensorferry.accelerator import Accelerator
from tensorferry.tensors import storage_key

#: What page-locked memory holds before it is written to.
POISON = 0xA5
WAIT_S = 20


class Event:
    """A point in a stream, reached when `reach` is called. `gone` is called when nobody has it any more."""

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
        assert self._reached.wait(WAIT_S), "the stream was never let"
        if self.error is not None:
            raise self.error


class Stream:
    """Does what is queued, in order. After a failure it does nothing any more and says why, as a device does."""

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
        """`work` is one of the things a held stream has to be let do."""

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

    def hold(self) -> None:
        """From here on every thing that is done has to be let."""
        self._held = True

    def let(self, count: int = 1) -> None:
        self._let.release(count)

    def let_go(self) -> None:
        self._held = False
        self._let.release(1000)

    def end(self) -> None:
        self.let_go()
        self._work.put(None)
        self._thread.join(WAIT_S)


class StandIn(Accelerator):
    """Tensors that were adopted are on a device.

    Attributes:
        trainer: the stream the trainer uses
        side: the streams that were made, in order
        copies: the copies that were queued: numbers of bytes and the storages they were from
        pinned_bytes: how much page-locked memory was asked for, each time
        strays: the events that a thread let go of while it had no device
    """

    def __init__(self) -> None:
        self.strays = 0
        self._own = threading.local()
        self.trainer = Stream()
        self.side: list[Stream] = []
        self.copies: list[tuple[int, int]] = []
        self.pinned_bytes: list[int] = []
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
                # Otherwise another storage could come to have its identity.
                self._kept.append(storage)

    def is_available(self) -> bool:
        return True

    def device_of(self, storage: torch.UntypedStorage) -> torch.device | None:
        return self._devices.get(storage_key(storage))

    def among(self, memory: Sequence[Any], found: list[int]) -> list[int]:
        assert not found, "nothing is on a real one"
        tensors = ((i, m) for i, m in enumerate(memory) if isinstance(m, torch.Tensor))
        return [i for i, tensor in tensors if self.device_of(tensor.untyped_storage()) is not None]

    def pinned(self, nbytes: int) -> torch.Tensor:
        if self.refuses_to_pin:
            raise RuntimeError("cudaErrorMemoryAllocation")
        self.pinned_bytes.append(nbytes)
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    @contextlib.contextmanager
    def on(self, devices: Iterable[torch.device]) -> Iterator[None]:
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

    def _threads(self) -> list[threading.Thread]:
        return [stream._thread for stream in [self.trainer, *self.side]]

    def stream(self, device: torch.device) -> Stream:
        assert self._has_device()
        assert device in self._devices.values()
        self.side.append(Stream())
        if self.hold_new:
            self.side[-1].hold()
        return self.side[-1]

    def follow(self, stream: Stream, device: torch.device) -> None:
        assert self._has_device()
        del device
        stream.wait(self.trainer.record())

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

    def let_go(self) -> None:
        for stream in [self.trainer, *self.side]:
            stream.let_go()

    def close(self) -> None:
        for stream in [self.trainer, *self.side]:
            stream.end()


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    device = StandIn()
    try:
        yield device
    finally:
        device.close()


def open_on(
    device: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    open_transport: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> Any:
    """A transport whose accelerator is `device`."""
    with monkeypatch.context() as patch:
        patch.setattr("tensorferry.transport.ACCELERATOR", device)
        return open_transport(*arguments, **options)
