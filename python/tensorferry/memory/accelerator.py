"""The interface to accelerators: where memory lies, streams, events and copies.

Everything that touches a device goes through one :class:`Accelerator` object: copies of bytes through
:meth:`Accelerator.copy`, and work that torch or other code does with device memory through :meth:`Accelerator.reading`
and :meth:`Accelerator.writing`. Tests replace the object by a stand-in. So the order of copies, their overlap with the
network and the handling of a failed copy can be tested on machines without an accelerator, and the stand-in detects
accesses to device memory that do not go through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

import torch

from ..errors import InvalidArgument
from .pinned import lock, pinned


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether all work that was queued before this point is done."""

    def synchronize(self) -> None:
        """Waits until all work that was queued before this point is done."""


#: Adds devices to a running :meth:`Accelerator.reading` or :meth:`Accelerator.writing`.
AddDevices: TypeAlias = Callable[[Iterable[torch.device]], None]


class Accelerator:
    """The accelerators of this process, as torch offers them: of any backend.

    Attributes:
        refused: whether the system has refused page-locked memory; a warning was logged then
    """

    refused = False

    def is_available(self) -> bool:
        """Whether this process has an accelerator."""
        return bool(torch.accelerator.is_available())

    def in_use(self) -> list[torch.device]:
        """Returns the devices on which work may be queued, without a call to any device.

        Code that is not ours, such as a pickled object's ``__reduce__``, may read or write memory of any of them. For
        CUDA these are all devices on which this process has a context, for other backends the calling thread's current
        device. A device is left out while a graph is being captured on its current stream: whatever turns out to need
        that device is refused at that point.
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
        """Returns the device that a storage lies on; ``None`` for host memory."""
        device = storage.device
        return None if device.type == "cpu" else device

    def holding(self, tensors: Iterable[torch.Tensor]) -> list[torch.device]:
        """Returns the accelerators on which ``tensors`` lie; DTensors and others without a storage are allowed."""
        # A subclass may raise anything when it is asked through __torch_function__.
        with torch._C.DisableTorchFunctionSubclass():
            found = {getattr(tensor, "_local_tensor", tensor).device for tensor in tensors}
        return [device for device in found if device.type not in ("cpu", "meta")]

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Returns ``nbytes`` bytes of page-locked host memory as a 1-D uint8 tensor.

        Raises:
            RuntimeError: the system refuses
        """
        return pinned(nbytes)

    def page_lock(self, address: int, nbytes: int) -> Callable[[], None] | None:
        """Page-locks existing host memory, so that copies to and from it run at full speed.

        Returns:
            Unlocks it, and has to be called before the memory is unmapped; ``None`` if no accelerator here can do this.

        Raises:
            RuntimeError: the system refuses
        """
        return lock(address, nbytes) if torch.cuda.is_available() else None

    def device_guard(self, devices: Iterable[torch.device]) -> AbstractContextManager[Any]:
        """While the block runs, makes the first of ``devices`` the calling thread's current device.

        Without any device it does nothing. Streams and events are created, recorded and destroyed inside such a block.
        Otherwise torch would switch back to the thread's previous current device after each of these calls, and for
        CUDA that creates a context there, of some hundred megabytes: in a thread that never set a device it is
        device 0, whichever device the process uses.
        """
        index = next((device.index for device in devices), None)
        guard: AbstractContextManager[Any] = torch.accelerator.device_index(index)
        return guard

    def stream(self, device: torch.device) -> Any:
        """Creates a new stream on ``device``."""
        return torch.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        """Returns the stream that the calling thread uses on ``device``."""
        return torch.accelerator.current_stream(device)

    def default_stream(self, device: torch.device) -> Any | None:
        """Returns the stream that threads use on ``device`` unless they set another; ``None`` if torch cannot name it.

        torch names it for CUDA, ROCm and MTIA, and for out-of-tree backends that have adopted the function's name. It
        does not for XPU.
        """
        name = getattr(_module(device), "default_stream", None)
        if name is None:
            return None
        try:
            stream = name(device)
        except Exception:  # In the modules of other backends, the name can stand for anything.
            return None
        # A stream of torch's cannot wait for an object of any other class.
        return stream if isinstance(stream, torch.Stream) else None

    def synchronize_device(self, device: torch.device) -> None:
        """Waits for all work that is queued on any stream of ``device``."""
        torch.accelerator.synchronize(device)

    def is_capturing(self, device: torch.device) -> bool:
        """Whether a graph is being captured on the stream that the calling thread uses on ``device``."""
        captures = getattr(_module(device), "is_current_stream_capturing", None)
        if captures is None:
            return False
        with self.device_guard([device]):
            return bool(captures())

    def check(self, devices: Iterable[torch.device]) -> None:
        """Raises if memory of ``devices`` cannot be read or written now.

        Raises:
            InvalidArgument: a graph is being captured on the current stream of one of them
        """
        for device in devices:
            if self.is_capturing(device):
                kind = "CUDA graph" if device.type == "cuda" else "graph"
                raise InvalidArgument(
                    f"a {kind} is being captured on {device}: work that is queued meanwhile does not run, so its "
                    "memory can be neither read nor written; send or receive before the capture, or after it"
                )

    def wait_for_pending(self, stream: Any, device: torch.device) -> None:
        """Makes ``stream`` wait for the work queued on the calling thread's current stream and on the default stream.

        A trainer's thread mostly uses the default stream, but torchft calls from another thread, on another stream that
        does not wait for the default one. Where torch cannot name the default stream, the calling thread waits for the
        whole device.

        Raises:
            InvalidArgument: a graph is being captured on the calling thread's stream
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
    def reading(self, devices: Iterable[torch.device]) -> Iterator[AddDevices]:
        """A block in which torch, or code that is not ours, reads memory of ``devices`` on the thread's own streams.

        What the block queues there runs after the work that is queued on the default streams now. The block gets a
        function that adds further devices.

        Raises:
            InvalidArgument: a graph is being captured on the calling thread's stream
        """
        ordered: set[torch.device] = set()
        self._order(ordered, devices)
        yield lambda more: self._order(ordered, more)

    @contextmanager
    def writing(self, devices: Iterable[torch.device]) -> Iterator[AddDevices]:
        """Like :meth:`reading`, for a block that writes, and waits at its end until all of its work is done.

        So whatever is queued afterwards, on any stream, finds what was written.
        """
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
        """Queues copies on ``stream``; each pair is ``(target, source)``."""
        with self.device_guard([stream.device]):
            # Not "with stream": that stores the stream to return to in the stream object, which threads share.
            before = torch.accelerator.current_stream(stream.device)
            torch.accelerator.set_stream(stream)
            try:
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
            finally:
                torch.accelerator.set_stream(before)

    def record(self, stream: Any) -> Event:
        """Records an event in ``stream``, behind all work that is queued there."""
        event: Event = stream.record_event()
        return event

    def synchronize(self, stream: Any) -> None:
        """Waits for all work that is queued on ``stream``."""
        stream.synchronize()


def _module(device: torch.device) -> Any:
    """Returns torch's module for devices of this type, such as ``torch.cuda``; ``None`` if there is none."""
    return getattr(torch, device.type, None)


class Streams:
    """One stream of our own for each device, created when it is first needed."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._made: dict[torch.device, Any] = {}

    def synced(self, devices: Iterable[torch.device]) -> dict[torch.device, Any]:
        """Returns our streams of ``devices``, each of which waits for the work that is queued there already.

        That is the work on the calling thread's stream and on the default stream, see
        :meth:`Accelerator.wait_for_pending`.

        Raises:
            InvalidArgument: a graph is being captured on the calling thread's stream of one of them
        """
        streams = {}
        for device in dict.fromkeys(devices):
            with self._accelerator.device_guard([device]):
                if device not in self._made:
                    self._made[device] = self._accelerator.stream(device)
                streams[device] = self._made[device]
                self._accelerator.wait_for_pending(streams[device], device)
        return streams


def drain_after_error(accelerator: Accelerator, streams: Iterable[Any]) -> bool:
    """Waits for all work that is queued on ``streams`` after an error.

    Returns:
        Whether all of it has certainly ended; not if a device reported an error while it was waited for.
    """
    certain, waiting = True, list(streams)
    while waiting:
        try:
            accelerator.synchronize(waiting[-1])
            waiting.pop()
        except Exception:  # Whatever the device reports: the caller raises an error already.
            certain = False
            waiting.pop()
        except BaseException:  # A second Ctrl-C must not skip the wait; the caller raises an error already.
            continue
    return certain


#: The real accelerators.
ACCELERATOR = Accelerator()
