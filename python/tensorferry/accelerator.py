"""What is asked of an accelerator: which memory is its own, streams, events and copies.

Everything that touches a device goes through one object of this class. So the order of copies, their overlap with the
network and what happens when one fails can be tested with a stand-in, on machines that have no accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch


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
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def stream(self, device: torch.device) -> Any:
        """A new stream of ``device``."""
        return torch.Stream(device)

    def follow(self, stream: Any, device: torch.device) -> None:
        """Lets ``stream`` wait for all that is queued on the stream its caller uses on ``device``."""
        stream.wait_stream(torch.accelerator.current_stream(device))

    def copy(self, stream: Any, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queues copies on ``stream``: to the first of each pair, from the second."""
        with stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

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
            if device not in self._made:
                self._made[device] = self._accelerator.stream(device)
            streams[device] = self._made[device]
            self._accelerator.follow(streams[device], device)
        return streams


def settled(accelerator: Accelerator, streams: Iterable[Any]) -> bool:
    """Waits for all that is queued on ``streams`` after something went wrong; whether it is certain that it is over."""
    certain = True
    for stream in streams:
        try:
            accelerator.synchronize(stream)
        except Exception:  # Whatever the device says: it was told already, or will be.
            certain = False
    return certain


#: The real ones.
ACCELERATOR = Accelerator()
