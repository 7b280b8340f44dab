"""Private copies of tensor memory: accelerator memory to pinned host memory, or host memory to host memory.

Copies off an accelerator run on a stream of their own that waits for what is queued there already, so what is
published is the state as of the call. They can be served while they are made: :meth:`Staging.run` tells how far it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .._native import HostView
from .accelerator import Accelerator, Event, Streams, drain_after_error
from .host_pool import Buffer, HostMemory, HostPool
from .tensors import as_bytes

#: Where each copied piece starts in its buffer.
_ALIGNMENT = 64
#: As much is copied off an accelerator at a time; then those who wait for it are told.
PART = 64 << 20
#: Batches of copies that wait behind the one under way.
_QUEUED = 4


class Piece:
    """Bytes ``[start, end)`` of a storage, and the place in a buffer they are copied to."""

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

    def aim(self, buffer: Buffer, offset: int) -> None:
        """The bytes are, or will be, at ``offset`` of ``buffer``."""
        self.buffer, self.offset = buffer, offset

    def release(self) -> None:
        """Lets go of the storage: its bytes are in the buffer, or nobody wants them."""
        self.storage = None

    def parts(self, most: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Where each part of at most ``most`` bytes starts in the piece, its place in the buffer, and its bytes now."""
        assert self.storage is not None
        assert self.buffer is not None
        source = as_bytes(self.storage)
        for at in range(0, self.nbytes, most):
            end = min(at + most, self.nbytes)
            target = self.buffer.memory[self.offset + at : self.offset + end]
            yield at, target, source[self.start + at : self.start + end]

    def data_ptr(self) -> int:
        """Where the bytes are, or will be, on the host; 0 if there are none."""
        if self.buffer is not None:
            return int(self.buffer.memory.data_ptr()) + self.offset
        assert self.storage is not None
        return int(self.storage.data_ptr()) + self.start if self.nbytes else 0


def host_view(memory: torch.UntypedStorage | Piece) -> tuple[HostView, int]:
    """A buffer object and an offset in it, from which tensors over the same host memory can be built."""
    start = 0
    if not isinstance(memory, Piece):
        whole = as_bytes(memory)
    elif memory.buffer is not None:
        whole, start = memory.buffer.memory, memory.offset
    else:
        assert memory.storage is not None
        whole, start = as_bytes(memory.storage), memory.start
    return HostView(whole, whole.data_ptr(), whole.nbytes), start


class Stager:
    """Copies pieces of storages into host memory of its own.

    Args:
        accelerator: does what a device has to do
    """

    def __init__(self, accelerator: Accelerator) -> None:
        """Streams and buffers are made when they are first needed."""
        self.accelerator = accelerator
        self._pinned = HostPool(HostMemory(accelerator))
        self._pageable = HostPool(HostMemory(None))
        self._streams = Streams(accelerator)

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copies the bytes of ``pieces``; when it returns, they are private and complete."""
        staging = self.begin(pieces)
        staging.run([(0, piece) for piece in staging.pending])

    def begin(self, pieces: Sequence[Piece]) -> Staging:
        """Gives every piece its place in host memory, and copies those that lie in host memory.

        Those on an accelerator are copied as they are now, with all that is queued on the stream in use here and on the
        default stream.
        """
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
        for piece in on_host:
            for _, target, source in piece.parts(piece.nbytes):
                target.copy_(source)
            piece.release()
        return Staging(self.accelerator, streams, pending)

    def close(self) -> None:
        """Lets go of every kept buffer."""
        self._pinned.close()
        self._pageable.close()


def _place(pieces: list[Piece], pool: HostPool) -> None:
    """Gives all of ``pieces`` places in one buffer."""
    offsets, total = [], 0
    for piece in pieces:
        offsets.append(total)
        total = (total + piece.nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    if pieces:
        buffer = pool.take(total)
        for piece, offset in zip(pieces, offsets, strict=True):
            piece.aim(buffer, offset)


class _Batch:
    """Copies that are queued together, on one device, and which bytes of a payload they bring."""

    def __init__(self, device: torch.device, start: int) -> None:
        self.device = device
        self.start = self.end = start
        self.nbytes = 0
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []


class Staging:
    """Copies off accelerators that are still to be made.

    Attributes:
        pending: the pieces to be copied; where each of them goes is settled
    """

    def __init__(self, accelerator: Accelerator, streams: dict[torch.device, Any], pending: list[Piece]) -> None:
        """See :meth:`Stager.begin`."""
        self._accelerator = accelerator
        self._streams = streams
        self.pending = pending

    def run(self, placed: Sequence[tuple[int, Piece]], ready: Callable[[int], bool] | None = None) -> None:
        """Copies everything; when it returns, nothing of the storages is read any more.

        Args:
            placed: each pending piece, and at which byte of a payload it begins; copied in that order
            ready: called with numbers of payload bytes, ever larger: of these, all that is to be copied is there. If it
                says that nobody wants the rest, that is left out.

        Raises:
            Exception: whatever the device says when a copy fails; then, too, nothing is read any more
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
        queued: deque[tuple[Event, _Batch]] = deque()
        known = -1

        def is_wanted(there: int) -> bool:
            nonlocal known
            if ready is None or there <= known:
                return True
            known = there
            return ready(there)

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

    def _batches(self, placed: list[tuple[int, Piece]]) -> Iterator[_Batch]:
        """Everything in order, cut and gathered into batches of at most :data:`PART` bytes."""
        batch: _Batch | None = None
        for start, piece in placed:
            assert piece.storage is not None
            device = self._accelerator.device_of(piece.storage)
            assert device is not None
            for at, target, source in piece.parts(PART):
                if batch is None or batch.device != device or batch.nbytes + target.nbytes > PART:
                    if batch is not None:
                        yield batch
                    batch = _Batch(device, start + at)
                batch.pairs.append((target, source))
                batch.nbytes += target.nbytes
                batch.end = start + at + target.nbytes
        if batch is not None:
            yield batch
