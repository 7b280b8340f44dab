"""Private copies of tensor memory: accelerator memory to pinned host memory, or host memory to host memory.

Copies off an accelerator run on a stream of their own that waits for the stream the trainer is using, so what is
published is the state as of the call. Buffers are kept and used again: pinning memory costs far more than filling it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch

from .tensors import as_bytes

logger = logging.getLogger("tensorferry")

#: Where each copied piece starts in its buffer.
_ALIGNMENT = 64
#: A kept buffer may be this many times larger than what is asked for.
_SLACK = 1.25


class Pool:
    """Host buffers that go from one snapshot to the next.

    Args:
        pinned: page-locked memory, from which an accelerator copies at full speed; where the system refuses, one
        warning and
            pageable memory
    """

    def __init__(self, pinned: bool) -> None:
        """An empty pool."""
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._keep = True

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes`` bytes; it comes back when its last reference is gone."""
        with self._lock:
            fitting = [t for t in self._free if nbytes <= t.nbytes <= nbytes * _SLACK + (1 << 20)]
            memory = min(fitting, key=lambda t: t.nbytes) if fitting else None
            # What does not fit will not fit next time either: a state hardly changes in size.
            self._free = [t for t in self._free if fitting and t is not memory]
        return Buffer(self, memory if memory is not None else self._allocate(nbytes))

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._pinned:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as e:
                self._pinned = False
                logger.warning(
                    "cannot pin %d bytes of host memory for checkpoints (%s): copies off the accelerator "
                    "will be slower; raise the limit on locked memory (ulimit -l)",
                    nbytes,
                    e,
                )
        return torch.empty(nbytes, dtype=torch.uint8)

    def give_back(self, memory: torch.Tensor) -> None:
        """Keeps ``memory`` for the next snapshot."""
        with self._lock:
            if self._keep:
                self._free.append(memory)

    def close(self) -> None:
        """Keeps nothing from now on."""
        with self._lock:
            self._keep = False
            self._free.clear()


class Buffer:
    """Memory taken from a pool, as a 1-D uint8 CPU tensor; returned when this object is gone."""

    def __init__(self, pool: Pool, memory: torch.Tensor) -> None:
        """See :meth:`Pool.take`."""
        self._pool = pool
        self.memory = memory

    def __del__(self) -> None:
        self._pool.give_back(self.memory)


class Piece:
    """Bytes ``[start, end)`` of a storage, or after copying the same bytes in a buffer."""

    __slots__ = ("buffer", "end", "offset", "start", "storage")

    def __init__(self, storage: torch.UntypedStorage, start: int, end: int) -> None:
        """Nothing is copied yet."""
        self.storage: torch.UntypedStorage | None = storage
        self.start = start
        self.end = end
        self.buffer: Buffer | None = None
        self.offset = 0

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start

    @property
    def is_cpu(self) -> bool:
        """Whether the bytes are in host memory."""
        return self.storage is None or self.storage.device.type == "cpu"

    def move(self, buffer: Buffer, offset: int) -> None:
        """The bytes are in ``buffer`` now; the storage is let go of."""
        self.storage, self.buffer, self.offset = None, buffer, offset

    def data_ptr(self) -> int:
        """Where the bytes are on the host; 0 if there are none."""
        if self.storage is not None:
            return int(self.storage.data_ptr()) + self.start if self.nbytes else 0
        assert self.buffer is not None
        return int(self.buffer.memory.data_ptr()) + self.offset


def host_view(memory: torch.Tensor | Piece) -> tuple[Any, int]:
    """A buffer object and an offset in it, from which tensors over the same host memory can be built."""
    if isinstance(memory, Piece):
        if memory.buffer is not None:
            return memory.buffer.memory.numpy(), memory.offset
        assert memory.storage is not None
        return as_bytes(memory.storage).numpy(), memory.start
    return as_bytes(memory.untyped_storage()).numpy(), 0


class Stager:
    """Copies pieces of storages into host memory of its own.

    Args:
        pinned: whether accelerator memory goes to pinned memory (it does wherever there is an accelerator)
    """

    def __init__(self, pinned: bool | None = None) -> None:
        """Streams and buffers are made when they are first needed."""
        self._pools = {
            True: Pool(pinned=torch.accelerator.is_available() if pinned is None else pinned),
            False: Pool(pinned=False),
        }
        self._streams: dict[torch.device, torch.Stream] = {}

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copies the bytes of ``pieces``; when it returns, they are private and complete."""
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in pieces:
            if piece.nbytes and piece.storage is not None:
                by_device.setdefault(piece.storage.device, []).append(piece)
        for device, group in by_device.items():
            if device.type == "cpu":
                self._copy_group(group, non_blocking=False)
                continue
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.Stream(device)
            # What the trainer has queued so far is part of the state; what it queues next is not.
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                self._copy_group(group, non_blocking=True)

    def _copy_group(self, group: list[Piece], non_blocking: bool) -> None:
        offsets, total = [], 0
        for piece in group:
            offsets.append(total)
            total = (total + piece.nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        buffer = self._pools[non_blocking].take(total)
        for piece, offset in zip(group, offsets, strict=True):
            assert piece.storage is not None
            source = as_bytes(piece.storage)[piece.start : piece.end]
            buffer.memory[offset : offset + piece.nbytes].copy_(source, non_blocking=non_blocking)
        if non_blocking:
            # The storages must outlive the copies that are under way.
            torch.accelerator.current_stream(group[0].storage.device).synchronize()  # type: ignore[union-attr]
        for piece, offset in zip(group, offsets, strict=True):
            piece.move(buffer, offset)

    def close(self) -> None:
        """Lets go of every kept buffer."""
        for pool in self._pools.values():
            pool.close()
