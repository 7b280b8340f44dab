"""What is asked of an accelerator: which memory is its own, streams, events and copies.

Everything that touches a device goes through one object of this class: copies of bytes through
:meth:`Accelerator.copy`, and what torch or code of others does with device memory for us through
:meth:`Accelerator.reading` and :meth:`Accelerator.writing`. So the order of copies, their overlap with the network and
what happens when one fails can be tested with a stand-in, on machines that have no accelerator, and the stand-in sees
what goes past it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

import torch

from ..errors import InvalidArgument
from .pinned import pinned


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether all that was queued before it is done."""

    def synchronize(self) -> None:
        """Waits until it is."""


#: Puts more devices in order, in the middle of :meth:`Accelerator.reading` or :meth:`Accelerator.writing`.
Also: TypeAlias = Callable[[Iterable[torch.device]], None]


class Accelerator:
    """The accelerators torch knows, whichever they are.

    Attributes:
        refused: whether page-locked memory was refused, and that was told
    """

    refused = False

    def is_available(self) -> bool:
        """Whether there is one."""
        return bool(torch.accelerator.is_available())

    def in_use(self) -> list[torch.device]:
        """The devices on which something may be queued that code of others reads or writes, without asking a device.

        For CUDA these are all on which this process has a context, for others the calling thread's own. Left out is one
        on whose stream in use a graph is being captured: what needs it is refused when it is known to.
        """
        device = torch.accelerator.current_accelerator()
        module = None if device is None else _module(device)
        if device is None or not getattr(module, "is_initialized", self.is_available)():
            return []
        if device.type == "cuda":
            used = [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)]
        else:
            used = [torch.accelerator.current_device_index()]
        return [one for one in (torch.device(device.type, i) for i in used) if not self.is_capturing(one)]

    def device_of(self, storage: torch.UntypedStorage) -> torch.device | None:
        """The device a storage lies on, ``None`` for host memory."""
        device = storage.device
        return None if device.type == "cpu" else device

    def holding(self, tensors: Iterable[torch.Tensor]) -> list[torch.device]:
        """The devices that the memory of ``tensors`` lies on, DTensors and others without a storage included."""
        found = {getattr(tensor, "_local_tensor", tensor).device for tensor in tensors}
        return [device for device in found if device.type not in ("cpu", "meta")]

    def device_indices(self, memory: Sequence[Any], found: list[int]) -> list[int]:
        """Numbers of those tensors in ``memory`` that are on a device: ``found`` while they were looked at."""
        del memory
        return found

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory, 1-D uint8.

        Raises:
            RuntimeError: the system refuses
        """
        return pinned(nbytes)

    def device_guard(self, devices: Iterable[torch.device]) -> AbstractContextManager[Any]:
        """Makes one of ``devices`` the calling thread's own for a while; without any it does nothing.

        Streams and events are made, recorded and destroyed in it. torch goes back to the thread's own device after each
        of these, and for CUDA that makes a context there, of some hundred megabytes: a thread that nobody has told of a
        device has device 0, whichever one its process uses.
        """
        index = next((device.index for device in devices), None)
        guard: AbstractContextManager[Any] = torch.accelerator.device_index(index)
        return guard

    def stream(self, device: torch.device) -> Any:
        """A new stream of ``device``."""
        return torch.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        """The stream the calling thread uses on ``device``."""
        return torch.accelerator.current_stream(device)

    def default_stream(self, device: torch.device) -> Any | None:
        """The stream that threads use on ``device`` until they take another one; ``None`` where torch does not tell.

        CUDA, ROCm and MTIA do, and so do backends from elsewhere that have taken over the name. XPU does not.
        """
        name = getattr(_module(device), "default_stream", None)
        if name is None:
            return None
        try:
            stream = name(device)
        except Exception:  # Modules of other backends have the name as they like.
            return None
        # What no stream of torch's can wait for is of no use.
        return stream if isinstance(stream, torch.Stream) else None

    def synchronize_device(self, device: torch.device) -> None:
        """Waits for all that is queued on any stream of ``device``."""
        torch.accelerator.synchronize(device)

    def is_capturing(self, device: torch.device) -> bool:
        """Whether a graph is being captured on the stream the calling thread uses on ``device``."""
        captures = getattr(_module(device), "is_current_stream_capturing", None)
        if captures is None:
            return False
        with self.device_guard([device]):
            return bool(captures())

    def check(self, devices: Iterable[torch.device]) -> None:
        """Refuses to work with ``devices`` where that cannot be done.

        Raises:
            InvalidArgument: a graph is being captured on the stream in use
        """
        for device in devices:
            if self.is_capturing(device):
                kind = "CUDA graph" if device.type == "cuda" else "graph"
                raise InvalidArgument(
                    f"a {kind} is being captured on {device}: what is queued there is not done, so there is "
                    "nothing to copy or to write to yet; send or receive before the capture, or after it"
                )

    def wait_for_pending(self, stream: Any, device: torch.device) -> None:
        """Lets ``stream`` wait for what is queued on ``device``: on its caller's stream and on the default one.

        A trainer's thread mostly uses the default stream. torchft calls from a thread of its own, on a stream of its
        own that waits for nothing. Where torch does not tell which stream is the default one, the calling thread waits
        for the whole device.

        Raises:
            InvalidArgument: a graph is being captured on the caller's stream
        """
        self.check([device])
        default = self.default_stream(device)
        if default is None:
            self.synchronize_device(device)
            return
        for before in (default, self.current_stream(device)):
            if before != stream:
                stream.wait_stream(before)

    @contextmanager
    def reading(self, devices: Iterable[torch.device]) -> Iterator[Also]:
        """For what torch, or code of others, does with memory of ``devices`` on the calling thread's streams.

        It comes after what is queued on the default streams. More devices can be added as they become known.

        Raises:
            InvalidArgument: a graph is being captured on the caller's stream
        """
        ordered: set[torch.device] = set()
        self._order(ordered, devices)
        yield lambda more: self._order(ordered, more)

    @contextmanager
    def writing(self, devices: Iterable[torch.device]) -> Iterator[Also]:
        """As :meth:`reading`, and at the end all of it is done: whatever is queued next, on any stream, comes later."""
        ordered: set[torch.device] = set()
        self._order(ordered, devices)
        try:
            yield lambda more: self._order(ordered, more)
        except BaseException:
            drain_after_error(self, [self.current_stream(device) for device in ordered])
            raise
        for device in ordered:
            self.synchronize(self.current_stream(device))

    def _order(self, ordered: set[torch.device], devices: Iterable[torch.device]) -> None:
        for device in set(devices) - ordered:
            with self.device_guard([device]):
                self.wait_for_pending(self.current_stream(device), device)
            ordered.add(device)

    def copy(self, stream: Any, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queues copies on ``stream``: to the first of each pair, from the second."""
        with self.device_guard([stream.device]):
            # Not "with stream": it remembers what to go back to in the stream itself, where a second thread finds it.
            before = torch.accelerator.current_stream(stream.device)
            torch.accelerator.set_stream(stream)
            try:
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
            finally:
                torch.accelerator.set_stream(before)

    def record(self, stream: Any) -> Event:
        """The point in ``stream`` behind all that is queued there."""
        event: Event = stream.record_event()
        return event

    def synchronize(self, stream: Any) -> None:
        """Waits for all that is queued on ``stream``."""
        stream.synchronize()


def _module(device: torch.device) -> Any:
    """The module torch has for devices of this type, ``None`` if it has none."""
    return getattr(torch, device.type, None)


class Streams:
    """One stream of our own for each device, made when it is first needed."""

    def __init__(self, accelerator: Accelerator) -> None:
        """None yet."""
        self._accelerator = accelerator
        self._made: dict[torch.device, Any] = {}

    def synced(self, devices: Iterable[torch.device]) -> dict[torch.device, Any]:
        """The streams of ``devices``; what they do from now on comes after all that the caller has queued there."""
        streams = {}
        for device in dict.fromkeys(devices):
            with self._accelerator.device_guard([device]):
                if device not in self._made:
                    self._made[device] = self._accelerator.stream(device)
                streams[device] = self._made[device]
                self._accelerator.wait_for_pending(streams[device], device)
        return streams


def drain_after_error(accelerator: Accelerator, streams: Iterable[Any]) -> bool:
    """Waits for all that is queued on ``streams`` after something went wrong; whether it is certain that it is over."""
    certain, waiting = True, list(streams)
    while waiting:
        try:
            accelerator.synchronize(waiting[-1])
            waiting.pop()
        except Exception:  # Whatever the device says: it was told already, or will be.
            certain = False
            waiting.pop()
        except BaseException:  # Who interrupts again waits, too: something else is raised already.
            continue
    return certain


#: The real ones.
ACCELERATOR = Accelerator()
