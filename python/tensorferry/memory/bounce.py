"""Where received bytes go that belong on an accelerator: page-locked host memory they pass through, wave by wave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._native import StagedFetch
from .accelerator import Accelerator, Event, Streams, drain_after_error
from .host_pool import HostMemory, HostPool
from .tensors import as_bytes

#: Bytes that come before they are copied on.
SLOT = 64 << 20
#: A slot's least size: a block of the container.
_LEAST = 1 << 20


class BounceBuffers:
    """Memory that received bytes pass through on their way to an accelerator, kept from receive to receive.

    Two slots: while what came into one is copied to the accelerator, on a stream of its own, the network fills the
    other. However large a state is, no more of it than that is in host memory.

    Args:
        accelerator: does what a device has to do
    """

    def __init__(self, accelerator: Accelerator) -> None:
        """Streams and memory are made when they are first needed."""
        self.accelerator = accelerator
        self._pool = HostPool(HostMemory(accelerator))
        self._streams = Streams(accelerator)

    def size(self, targets: Mapping[int, torch.Tensor]) -> int:
        """Bytes of a slot for a receive into ``targets``."""
        return max(_LEAST, min(SLOT, _nbytes(targets)))

    def bring(self, waves: StagedFetch, targets: Mapping[int, torch.Tensor]) -> None:
        """Brings everything; when it returns, all copies are made.

        Only bytes that match their checksums are copied. What is queued on the stream in use here and on the default
        stream comes first.

        Args:
            waves: a receive begun with the entries in ``targets`` and with the size from :meth:`size`
            targets: for each such entry the tensor that takes its bytes and fills its storage

        Raises:
            Exception: as a receive does, or whatever the device says; some tensors may hold new bytes then
        """
        accelerator, size = self.accelerator, self.size(targets)
        devices: dict[int, torch.device] = {}
        for number, target in targets.items():
            device = accelerator.device_of(target.untyped_storage())
            assert device is not None
            devices[number] = device
        streams = self._streams.synced(devices.values())
        # What fits into one slot needs no second one.
        count = 1 if _nbytes(targets) <= size else 2
        buffer = self._pool.take(count * size)
        slots = [buffer.memory[number * size : (number + 1) * size] for number in range(count)]
        try:
            with accelerator.device_guard(streams):
                self._waves(waves, targets, devices, streams, slots)
            for stream in streams.values():
                accelerator.synchronize(stream)
        except BaseException:
            # The copies that are under way read from the slots.
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
        """Queues every copy, each wave's when its bytes are in one of ``slots``."""
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
        """Lets go of the memory."""
        self._pool.close()


def _nbytes(targets: Mapping[int, torch.Tensor]) -> int:
    return sum([int(target.nbytes) for target in targets.values()])
