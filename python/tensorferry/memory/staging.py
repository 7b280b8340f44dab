"""Private copies of tensor memory: accelerator memory to pinned host memory, or host memory to host memory.

Copies off an accelerator run on a separate stream that waits for the work that is queued there already, so the copy is
the state as of the call. The copies can be served while they are still being made: :meth:`Staging.run` reports its
progress.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .._native import HostView, Rows, _copy_memory
from .accelerator import Accelerator, Event, Streams, drain_after_error
from .host_pool import Buffer, HostMemory, HostPool
from .layout import side_by_side
from .tensors import as_bytes

#: Bytes that are copied off an accelerator at a time; progress is reported after each such batch.
PART = 64 << 20
#: How many batches of copies are queued behind the one under way.
_QUEUED = 4
#: Threads that copy host memory, at most.
_MOST_THREADS = 16


def copying_threads() -> int:
    """Returns how many threads copy host memory: a few fill the bandwidth of a machine's memory."""
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


class Piece:
    """Bytes ``[start, end)`` of a storage, and the place in a host buffer to which they are copied."""

    __slots__ = ("buffer", "end", "offset", "start", "storage")

    def __init__(self, storage: torch.UntypedStorage, start: int, end: int) -> None:
        """A piece without a buffer yet; :meth:`aim` assigns one."""
        self.storage: torch.UntypedStorage | None = storage
        self.start = start
        self.end = end
        self.buffer: Buffer | None = None
        self.offset = 0

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        return self.end - self.start

    def aim(self, buffer: Buffer, offset: int) -> None:
        """Sets the destination: the bytes are, or will be, at ``offset`` in ``buffer``."""
        self.buffer, self.offset = buffer, offset

    def release(self) -> None:
        """Releases the storage: its bytes are in the buffer already, or are not needed any more."""
        self.storage = None

    def parts(self, most: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Splits the piece into parts of at most ``most`` bytes.

        Yields:
            The byte of the piece at which the part starts, and two 1-D uint8 tensors: its place in the buffer, and its
            bytes in the storage
        """
        assert self.storage is not None
        assert self.buffer is not None
        source = as_bytes(self.storage)
        for at in range(0, self.nbytes, most):
            end = min(at + most, self.nbytes)
            target = self.buffer.memory[self.offset + at : self.offset + end]
            yield at, target, source[self.start + at : self.start + end]

    def copy(self) -> tuple[int, int, int]:
        """Returns where the bytes are, where they go, and how many they are; the storage lies in host memory."""
        assert self.storage is not None
        return int(self.storage.data_ptr()) + self.start, self.data_ptr(), self.nbytes

    def data_ptr(self) -> int:
        """Returns the host address where the bytes are, or will be; 0 if the piece is empty and has no buffer."""
        if self.buffer is not None:
            return self.buffer.address + self.offset
        assert self.storage is not None
        return int(self.storage.data_ptr()) + self.start if self.nbytes else 0


def host_view(memory: torch.UntypedStorage | Piece) -> tuple[HostView, int]:
    """Returns a buffer object and an offset in it, from which tensors over the same host memory can be built."""
    start = 0
    if not isinstance(memory, Piece):
        whole = as_bytes(memory)
    elif memory.buffer is not None:
        return buffer_view(memory.buffer), memory.offset
    else:
        assert memory.storage is not None
        whole, start = as_bytes(memory.storage), memory.start
    return HostView(whole, whole.data_ptr(), whole.nbytes), start


def buffer_view(buffer: Buffer) -> HostView:
    """Returns a buffer object for tensors in ``buffer``, which is not reused while one of them exists."""
    return HostView(buffer, buffer.address, buffer.memory.nbytes)


class HostStager:
    """Copies pieces of storages into private host memory. Streams and buffers are created when they are first needed.

    Args:
        accelerator: the accelerators, or a stand-in
        pinned: allocates memory for copies off an accelerator; by default memory of this process
        pageable: allocates memory for copies of host memory; likewise
    """

    def __init__(
        self, accelerator: Accelerator, pinned: HostMemory | None = None, pageable: HostMemory | None = None
    ) -> None:
        self.accelerator = accelerator
        self._pinned = HostPool(pinned or HostMemory(accelerator))
        self._pageable = HostPool(pageable or HostMemory(None))
        self._streams = Streams(accelerator)

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copies the bytes of ``pieces``; when it returns, all copies are complete.

        Raises:
            InvalidArgument, SystemRefused: as for :meth:`begin`
            Exception: whatever the device raises when a copy fails
        """
        staging = self.begin(pieces)
        staging.run([(0, piece) for piece in staging.pending])

    def begin(self, pieces: Sequence[Piece]) -> Staging:
        """Assigns every piece with bytes its place in host memory, and copies those whose storage lies in host memory.

        Returns:
            The copies of the pieces on accelerators, still to be run. They will hold the bytes as of this call,
            including the effect of the work that is queued on the calling thread's stream and on the default stream.

        Raises:
            InvalidArgument: a graph is being captured on a device that holds a piece
            SystemRefused: there is no memory for the copies
        """
        if not pieces:
            return Staging(self.accelerator, {}, [])
        on_host: list[Piece] = []
        pending: list[Piece] = []
        devices: list[torch.device] = []
        for piece in pieces:
            if not piece.nbytes or piece.storage is None:
                continue
            device = self.accelerator.device_of(piece.storage)
            if device is None:
                on_host.append(piece)
            else:
                pending.append(piece)
                devices.append(device)
        streams = self._streams.synced(devices)
        _place(pending, self._pinned)
        _place(on_host, self._pageable)
        copies = [piece.copy() for piece in on_host]
        _copy_memory(copies, copying_threads())
        for piece in on_host:
            piece.release()
        return Staging(self.accelerator, streams, pending)

    def copy_rows(self, rows: Rows, without: list[int]) -> Buffer | None:
        """Copies the memory of all rows but those in ``without`` into one buffer, which becomes their owner.

        They lie in host memory. Nothing is done for each of them in Python: a state may have a million.

        Returns:
            The buffer; ``None`` if they have no bytes.

        Raises:
            SystemRefused: there is no memory for the copy
        """
        nbytes = rows.copied_size(without)
        if not nbytes:
            return None
        buffer = self._pageable.take(nbytes)
        rows.copy_into(buffer, buffer.address, buffer.memory.nbytes, without, threads=copying_threads())
        return buffer

    def close(self) -> None:
        """Releases the free buffers; buffers in use are not reused any more."""
        self._pinned.close()
        self._pageable.close()


def _place(pieces: list[Piece], pool: HostPool) -> None:
    """Assigns all of ``pieces`` places in one buffer."""
    if pieces:
        offsets, total = side_by_side(piece.nbytes for piece in pieces)
        buffer = pool.take(total)
        for piece, offset in zip(pieces, offsets, strict=True):
            piece.aim(buffer, offset)


class _CopyBatch:
    """Copies that are queued together on one device, and the payload bytes ``[start, end)`` that they complete."""

    def __init__(self, device: torch.device, start: int) -> None:
        self.device = device
        self.start = self.end = start
        self.nbytes = 0
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []


class Staging:
    """Copies off accelerators that are still to be made. Made by :meth:`HostStager.begin`.

    Attributes:
        pending: the pieces to be copied; each has its place in a buffer
    """

    def __init__(self, accelerator: Accelerator, streams: dict[torch.device, Any], pending: list[Piece]) -> None:
        self._accelerator = accelerator
        self._streams = streams
        self.pending = pending

    def run(self, placed: Sequence[tuple[int, Piece]], ready: Callable[[int], bool] | None = None) -> None:
        """Makes all copies; when it returns, the storages are not read any more.

        Args:
            placed: each pending piece with the payload byte at which it begins; pieces are copied in the order of these
            ready: called with a growing number of payload bytes, below which everything is copied. If it returns false,
                the rest is not needed and is left out.

        Raises:
            Exception: whatever the device raises when a copy fails; the storages are not read any more then either
        """
        try:
            with self._accelerator.device_guard(self._streams):
                self._run(sorted(placed, key=lambda one: one[0]), ready)
            for stream in self._streams.values():
                self._accelerator.synchronize(stream)
        except BaseException:
            sound = drain_after_error(self._accelerator, self._streams.values())
            for piece in self.pending:
                if piece.buffer is not None:
                    piece.buffer.sound = sound
            raise
        finally:
            for piece in self.pending:
                piece.release()

    def _run(self, placed: list[tuple[int, Piece]], ready: Callable[[int], bool] | None) -> None:
        """Queues a few batches ahead of the device, and reports each one that it has copied."""
        queued: deque[tuple[Event, _CopyBatch]] = deque()
        reported = -1

        def is_wanted(copied: int) -> bool:
            nonlocal reported
            if ready is None or copied <= reported:
                return True
            reported = copied
            return ready(copied)

        end = 0
        for batch in self._batches(placed):
            if not is_wanted(queued[0][1].start if queued else batch.start):
                return
            stream = self._streams[batch.device]
            self._accelerator.copy(stream, batch.pairs)
            queued.append((self._accelerator.record(stream), batch))
            end = batch.end
            while queued and (len(queued) > _QUEUED or queued[0][0].query()):
                queued.popleft()[0].synchronize()
        while queued:
            if not is_wanted(queued[0][1].start):
                return
            queued.popleft()[0].synchronize()
        is_wanted(end)

    def _batches(self, placed: list[tuple[int, Piece]]) -> Iterator[_CopyBatch]:
        """Yields all copies in order, in batches of at most :data:`PART` bytes; larger pieces are split."""
        batch: _CopyBatch | None = None
        for start, piece in placed:
            assert piece.storage is not None
            device = self._accelerator.device_of(piece.storage)
            assert device is not None
            for at, target, source in piece.parts(PART):
                if batch is None or batch.device != device or batch.nbytes + target.nbytes > PART:
                    if batch is not None:
                        yield batch
                    batch = _CopyBatch(device, start + at)
                batch.pairs.append((target, source))
                batch.nbytes += target.nbytes
                batch.end = start + at + target.nbytes
        if batch is not None:
            yield batch
