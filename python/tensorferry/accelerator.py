"""What is asked of an accelerator: which memory is its own, streams, events and copies.

Everything that touches a device goes through one object of this class. So the order of copies, their overlap with the
network and what happens when one fails can be tested with a stand-in, on machines that have no accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .errors import InvalidArgument
from .locked import locked


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether all that was queued before it is done."""

    def synchronize(self) -> None:
        """Waits until it is."""


class Accelerator:
    """The accelerators torch knows, whichever they are."""

    def is_available(self) -> bool:
        """Whether there is one."""
        return bool(torch.accelerator.is_available())

    def device_of(self, storage: torch.UntypedStorage) -> torch.device | None:
        """The device a storage lies on, ``None`` for host memory."""
        device = storage.device
        return None if device.type == "cpu" else device

    def among(self, memory: Sequence[Any], found: list[int]) -> list[int]:
        """Numbers of those tensors in ``memory`` that are on a device: ``found`` while they were looked at."""
        del memory
        return found

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory, 1-D uint8.

        Raises:
            RuntimeError: the system refuses
        """
        return locked(nbytes)

    def on(self, devices: Iterable[torch.device]) -> AbstractContextManager[Any]:
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

    def follow(self, stream: Any, device: torch.device) -> None:
        """Lets ``stream`` wait for all that is queued on ``device``: on its caller's stream and on the default one.

        A trainer's thread mostly uses the default stream. torchft calls from a thread of its own, on a stream of its
        own that waits for nothing.

        Raises:
            InvalidArgument: a CUDA graph is captured on the caller's stream
        """
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise InvalidArgument(
                    f"a CUDA graph is being captured on {device}: what is queued there is not done, so there is "
                    "nothing to copy or to write to yet; send or receive before the capture, or after it"
                )
            stream.wait_stream(torch.cuda.default_stream(device))
        stream.wait_stream(torch.accelerator.current_stream(device))

    def copy(self, stream: Any, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queues copies on ``stream``: to the first of each pair, from the second."""
        with self.on([stream.device]):
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


class Streams:
    """One stream of our own for each device, made when it is first needed."""

    def __init__(self, accelerator: Accelerator) -> None:
        """None yet."""
        self._accelerator = accelerator
        self._made: dict[torch.device, Any] = {}

    def behind(self, devices: Iterable[torch.device]) -> dict[torch.device, Any]:
        """The streams of ``devices``; what they do from now on comes after all that the caller has queued there."""
        streams = {}
        for device in dict.fromkeys(devices):
            with self._accelerator.on([device]):
                if device not in self._made:
                    self._made[device] = self._accelerator.stream(device)
                streams[device] = self._made[device]
                self._accelerator.follow(streams[device], device)
        return streams


def settled(accelerator: Accelerator, streams: Iterable[Any]) -> bool:
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
