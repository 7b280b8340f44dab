"""Bounce buffers: page-locked host memory between accelerators and the network or files, filled in waves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._native import StagedFetch
from .accelerator import Accelerator, Event, Streams, drain_after_error
from .host_pool import Buffer, HostMemory, HostPool
from .tensors import as_bytes

#: The largest size of a slot: bytes that are received before they are copied on.
SLOT = 64 << 20
#: The smallest size of a slot: one block of the container.
_LEAST = 1 << 20


class BounceBuffers:
    """Host memory through which bytes pass to an accelerator or off it, kept from one receive or save to the next.

    A receive has two slots: while the bytes in one are copied to the accelerator, on a separate stream, the network
    fills the other. However large a state is, at most two slots of it are in host memory. Streams and memory are
    created when they are first needed.

    Args:
        accelerator: the accelerators, or a stand-in

    Attributes:
        streams: those on which the copies run
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._pool = HostPool(HostMemory(accelerator))
        self.streams = Streams(accelerator)

    def take(self, nbytes: int) -> Buffer:
        """Returns a buffer of at least ``nbytes`` bytes, which comes back when its last reference is gone.

        Raises:
            SystemRefused: there is no memory for it
        """
        return self._pool.take(nbytes)

    def size(self, targets: Mapping[int, torch.Tensor]) -> int:
        """Returns the size of a slot in bytes for a receive into ``targets``."""
        return max(_LEAST, min(SLOT, _nbytes(targets)))

    def bring(self, waves: StagedFetch, targets: Mapping[int, torch.Tensor]) -> None:
        """Receives everything into ``targets``; when it returns, all copies are done.

        Only bytes that match their checksums are copied. The copies run after the work that is queued on the calling
        thread's stream and on the default stream.

        Args:
            waves: a receive that was begun for the entries in ``targets``, with the slot size from :meth:`size`
            targets: for each entry the accelerator tensor that takes its bytes and fills its own storage

        Raises:
            InvalidArgument: a graph is being captured on a device that is to be written to
            SystemRefused: there is no memory for the slots
            Exception: any error of a receive, or whatever the device raises; some tensors may hold new bytes then
        """
        accelerator, size = self.accelerator, self.size(targets)
        devices: dict[int, torch.device] = {}
        for number, target in targets.items():
            device = accelerator.device_of(target.untyped_storage())
            assert device is not None
            devices[number] = device
        streams = self.streams.synced(devices.values())
        # A state that fits into one slot needs no second one.
        count = 1 if _nbytes(targets) <= size else 2
        buffer = self.take(count * size)
        slots = [buffer.memory[number * size : (number + 1) * size] for number in range(count)]
        try:
            with accelerator.device_guard(streams):
                self._waves(waves, targets, devices, streams, slots)
            for stream in streams.values():
                accelerator.synchronize(stream)
        except BaseException:
            # The copies under way read from the slots: the memory may be reused only once they have ended.
            buffer.sound = drain_after_error(accelerator, streams.values())
            raise

    def _waves(
        self,
        waves: StagedFetch,
        targets: Mapping[int, torch.Tensor],
        devices: Mapping[int, torch.device],
        streams: Mapping[torch.device, Any],
        slots: list[torch.Tensor],
    ) -> None:
        """Receives wave after wave into ``slots`` in turn, and queues the copies of each."""
        busy: list[list[Event]] = [[] for _ in slots]
        turn = 0
        while True:
            for event in busy[turn]:
                event.synchronize()
            parts = waves.fetch(slots[turn].data_ptr())
            if parts is None:
                return
            pairs: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for entry, start, nbytes, at in parts:
                place = as_bytes(targets[entry].untyped_storage())[start : start + nbytes]
                pairs.setdefault(devices[entry], []).append((place, slots[turn][at : at + nbytes]))
            for device, of_device in pairs.items():
                self.accelerator.copy(streams[device], of_device)
            busy[turn] = [self.accelerator.record(streams[device]) for device in pairs]
            turn = (turn + 1) % len(slots)

    def close(self) -> None:
        """Releases the memory."""
        self._pool.close()


def _nbytes(targets: Mapping[int, torch.Tensor]) -> int:
    return sum([int(target.nbytes) for target in targets.values()])
