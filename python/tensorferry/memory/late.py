"""Rows of a container that come into host memory while they are written, a part at a time."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from .._native import _copy_memory
from .accelerator import drain_after_error
from .bounce import SLOT, BounceBuffers
from .host_pool import Buffer
from .layout import side_by_side
from .staging import Piece, copying_threads
from .tensors import as_bytes


class OnHost(Protocol):
    """Bytes in several places of host memory."""

    @property
    def nbytes(self) -> int:
        """How many there are."""

    def copies(self, begin: int, end: int, to: int) -> list[tuple[int, int, int]]:
        """Returns what copies those from ``begin`` to ``end`` to the address ``to``: from where, to where, how many."""


class LateRows:
    """Brings rows into a buffer that is used again for each part of the container.

    Copies off accelerators come after the work that is queued now, on the calling thread's stream and on the default
    stream.

    Args:
        buffers: gives the buffer, and copies off accelerators
        rows: the bytes of each row: on an accelerator, or on the host

    Raises:
        InvalidArgument: a graph is being captured on a device that holds a row
    """

    def __init__(self, buffers: BounceBuffers, rows: Mapping[int, Piece | OnHost]) -> None:
        self._buffers, self._rows = buffers, rows
        self._accelerator = buffers.accelerator
        self._streams = buffers.streams.synced(
            device for row in rows.values() if (device := self._device_of(row)) is not None
        )
        self._most = min(SLOT, side_by_side(row.nbytes for row in rows.values())[1])
        self._buffer: Buffer | None = None
        self._order: list[tuple[int, int]] | None = None

    def _device_of(self, row: Piece | OnHost) -> torch.device | None:
        return self._accelerator.device_of(row.storage) if isinstance(row, Piece) and row.storage is not None else None

    def places(self, starts: Sequence[int], begin: int, stop: int) -> list[tuple[int, int]]:
        """Brings what the rows have of a part of the container; what they had of the part before is gone then.

        Args:
            starts: where each row begins in the container
            begin: where the part begins
            stop: where it ends

        Returns:
            For each row of the part the byte of the container at which it begins there, and its address.

        Raises:
            SystemRefused: there is no memory for the buffer
            Exception: whatever the device raises when a copy fails
        """
        if self._order is None:
            self._order = sorted((starts[row], row) for row in self._rows)
        parts = []
        first = max(bisect.bisect(self._order, (begin,)) - 1, 0)
        for start, row in self._order[first:]:
            if start >= stop:
                break
            low, high = max(begin - start, 0), min(stop - start, self._rows[row].nbytes)
            if low < high:
                parts.append((start + low, self._rows[row], low, high))
        offsets, total = side_by_side(high - low for _, _, low, high in parts)
        if self._buffer is None or self._buffer.memory.nbytes < total:
            self._buffer = None
            self._buffer = self._buffers.take(max(total, self._most))
        try:
            self._copy(self._buffer, [(*part[1:], offset) for part, offset in zip(parts, offsets, strict=True)])
        except BaseException:
            self._buffer.sound = drain_after_error(self._accelerator, self._streams.values())
            raise
        return [(part[0], self._buffer.address + offset) for part, offset in zip(parts, offsets, strict=True)]

    def _copy(self, buffer: Buffer, parts: Sequence[tuple[Piece | OnHost, int, int, int]]) -> None:
        """Copies bytes of rows to offsets in the buffer; when it returns, they are there."""
        pairs: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        copies: list[tuple[int, int, int]] = []
        for row, low, high, offset in parts:
            if isinstance(row, Piece):
                assert row.storage is not None
                source = as_bytes(row.storage)[row.start + low : row.start + high]
                pairs[self._device_of(row)].append((buffer.memory[offset : offset + high - low], source))
            else:
                copies += row.copies(low, high, buffer.address + offset)
        with self._accelerator.device_guard(self._streams):
            for device, of_device in pairs.items():
                self._accelerator.copy(self._streams[device], of_device)
            _copy_memory(copies, copying_threads())
            for device in pairs:
                self._accelerator.synchronize(self._streams[device])
