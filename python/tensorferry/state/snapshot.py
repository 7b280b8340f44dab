"""Takes a snapshot of a state: the entries of a container, and the memory behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch

from .. import _gc
from .._native import HostView, Readiness, Server, _add_pieces
from ..errors import InvalidArgument
from ..memory.accelerator import Accelerator
from ..memory.host_pool import Buffer
from ..memory.staging import HostStager, Piece, buffer_view, host_view
from ..memory.tensors import as_bytes, storage_over
from ..pickles.allowlist import Allowed
from ..storage import reserved
from ..storage.container import Container
from . import aliases, manifest, pickling, tree
from .build import StateBuilder

#: If a state is on an accelerator and at most this many of its bytes are in host memory, these are copied as well, so
#: that the whole snapshot is private.
_SMALL_HOST_PART = 64 << 20

SnapshotMode = Literal["borrow", "copy"]

#: The memory of an entry: a whole storage that is served from where it is, the buffer that it was copied to, or, on an
#: accelerator, a piece of a storage and its place in a buffer.
RowOwner: TypeAlias = torch.UntypedStorage | Buffer | Piece


def snapshot_mode(snapshot: SnapshotMode) -> SnapshotMode:
    """Returns ``snapshot`` after checking it.

    Raises:
        InvalidArgument: it is neither ``"borrow"`` nor ``"copy"``
    """
    if snapshot not in ("borrow", "copy"):
        raise InvalidArgument(f'snapshot must be "borrow" or "copy", not {snapshot!r}')
    return snapshot


class StateSnapshot:
    """A state laid out for publishing: a row for each entry, and the memory behind it.

    The constructor copies the host memory that has to be copied. Accelerator memory is copied by :meth:`publish`, so
    that its first bytes can be sent while later ones are still being copied to the host.

    Args:
        state: any tree of tensors and picklable objects
        stager: makes the copies
        snapshot: whether host memory is served from where it is (``"borrow"``) or copied

    Attributes:
        rows: the entries of the container
        memory: the memory of each entry
        private: whether all memory is a copy to which nothing else writes
        pickle_bytes: the pickle of everything that is not a plain tensor
        globals: for each class and function that the pickle names, as ``(module, name)``, the first leaf that needs it

    Raises:
        UnsupportedLeaf: a leaf of the state cannot be sent
        InvalidArgument: a graph is being captured on the current stream of a device that holds a part of the state
    """

    def __init__(self, state: Any, stager: HostStager, snapshot: SnapshotMode) -> None:
        with _gc.gc_paused():
            device = self._read(state, stager.accelerator)
            self._stage(stager, snapshot, device)
        # If nothing was copied, rebuild() can return the state itself. Not so for a private snapshot without any bytes:
        # it is the state of one moment, and its objects are those of the pickle.
        self._state = state if not self.private and not self._buffers else None

    def _read(self, state: Any, accelerator: Accelerator) -> list[int]:
        """Reads and pickles the state; returns the numbers of the rows in accelerator memory."""
        flat = tree.flatten(state)
        self.pickle_bytes, self.globals = _pickled(flat, accelerator)
        device = flat.accelerated
        self._lay_out(flat)
        return device

    def _lay_out(self, flat: tree.Flat) -> None:
        """Makes the rows and the manifest, but for what depends on where copies will lie."""
        self.rows = flat.rows
        shared = aliases.LeafMemory(flat).groups
        # Storages, not tensors: a trainer may give a tensor other memory (`p.data = ...`) while this is served.
        self.memory: list[RowOwner] = self.rows.owners
        # Read before the rows of pieces are added below: only leaves have flags.
        flags = self.rows.flags
        layout, self._elsewhere = _add_pieces(self.rows)
        numbers = pickling.numbers(flat)
        self._fields = manifest.encode(flat, flags, layout, shared, self.globals, numbers)
        self._tree = flat.tree
        self.rows.forget()

    def _stage(self, stager: HostStager, snapshot: SnapshotMode, device: list[int]) -> None:
        """Gives the rows ``device``, in accelerator memory, their places on the host; copies host memory if asked."""
        accelerator = stager.accelerator
        device = device + [i for i in self._elsewhere if accelerator.device_of(self._storage(i)) is not None]
        if device:
            devices = ((i, accelerator.device_of(self._storage(i))) for i in sorted(device))
            self._fields = manifest.with_devices(self._fields, ((i, one) for i, one in devices if one is not None))
        on_host = self.rows.nbytes - sum([self.rows.size(i) for i in device])
        copies_host = snapshot == "copy" or bool(device and on_host <= _SMALL_HOST_PART)
        pieces = [(i, self._piece(i)) for i in device]
        self._staging = stager.begin([piece for _, piece in pieces])
        for i, piece in pieces:
            self.memory[i] = piece
            self.rows.place(i, piece.data_ptr())
        self._on_device = [(i, piece) for i, piece in pieces if piece.nbytes]
        buffers = {id(piece.buffer): piece.buffer for _, piece in pieces}
        if copies_host:
            buffers[0] = stager.copy_rows(self.rows, device)
        self._buffers = [buffer for buffer in buffers.values() if buffer is not None]
        self.private = copies_host or not on_host

    def _storage(self, row: int) -> torch.UntypedStorage:
        memory = self.memory[row]
        assert isinstance(memory, torch.UntypedStorage)
        return memory

    def _piece(self, row: int) -> Piece:
        """Returns the memory of an entry as a piece of a storage, unless it is host memory that was copied."""
        memory = self.memory[row]
        if isinstance(memory, Piece):
            return memory
        storage, nbytes = self._storage(row), self.rows.size(row)
        start = self.rows.address(row) - storage.data_ptr() if nbytes else 0
        return Piece(storage, start, start + nbytes)

    def _host_view(self, row: int) -> tuple[HostView, int]:
        """As :func:`host_view`, for the memory of an entry."""
        memory = self.memory[row]
        if isinstance(memory, Buffer):
            return buffer_view(memory), self.rows.address(row) - memory.address
        return host_view(self._piece(row))

    def publish(self, server: Server, step: int, alternate: Callable[[str], list[Any] | None] | None = None) -> None:
        """Publishes the snapshot on ``server`` as ``step``, and copies accelerator memory to the host.

        Receivers can fetch bytes as soon as they are copied; when this returns, all are. If a copy fails, the
        publication is withdrawn.

        Args:
            server: serves the snapshot
            step: the step number
            alternate: as for :meth:`Container.publish`

        Raises:
            Exception: whatever the device raises when a copy fails
        """
        readiness = self.container().publish(server, step, alternate=alternate, filled=not self._on_device)
        if readiness is not None:
            self._fill(server, readiness)
        if self._state is not None:
            # The server has its own copies, and rebuild() returns the state itself.
            self.pickle_bytes = b""
            self._fields, self._tree = [], ""

    @property
    def is_complete(self) -> bool:
        """Whether no bytes of an accelerator are still to be copied, by :meth:`publish` or :meth:`complete`."""
        return not self._on_device

    def complete(self) -> None:
        """Copies accelerator memory to the host, for a snapshot that is not published; when it returns, all is there.

        Raises:
            Exception: whatever the device raises when a copy fails
        """
        self._staging.run([(0, piece) for _, piece in self._on_device])
        self._on_device = []

    def container(self) -> Container:
        """Returns the container that is published; not valid after ``publish`` if nothing was copied."""
        return Container(self.rows, self.memory, self.private, self._control())

    def buffers(self) -> list[Buffer]:
        """Returns the buffers that the copies lie in, each once."""
        return list(self._buffers)

    def manifest(self) -> bytes:
        """Returns the complete manifest as JSON; not valid after ``publish`` if nothing was copied."""
        return manifest.with_tree(self._fields, self._tree)

    def _fill(self, server: Server, readiness: Readiness) -> None:
        """Copies accelerator memory into a publication, and says how far it is; withdraws it if a copy fails."""
        try:
            starts = readiness.starts
            self._staging.run([(starts[i], piece) for i, piece in self._on_device], readiness.ready)
        except BaseException:
            server.abandon(readiness)
            raise
        readiness.finish()

    def _control(self) -> list[tuple[str, bytes]]:
        control = [(reserved.MANIFEST, self.manifest())]
        return [*control, (reserved.PICKLE, _padded(self.pickle_bytes, b"\0"))] if self.pickle_bytes else control

    def rebuild(self) -> Any:
        """Returns the state with all tensors on the host, over the published memory where possible.

        If the snapshot is private, this is the state as of the snapshot; if nothing was copied, it is the state itself.
        Accelerator memory has to be on the host: :meth:`publish` or :meth:`complete` has returned.
        """
        if self._state is not None:
            return self._state
        plain = [i for i, name in enumerate(self.rows.names) if not name.startswith(reserved.PREFIX)]
        builder = StateBuilder(manifest.Manifest(self.manifest(), self._tree), self.rows, plain)
        for k, storage in builder.scattered.items():
            whole = as_bytes(storage)
            for entry, lo in builder.manifest.storages[k][1]:
                part = storage_over(*self._host_view(entry), self.rows.size(entry))
                whole[lo : lo + part.nbytes()].copy_(as_bytes(part))
        return builder.build(self.pickle_bytes, Allowed(trust=True), self._host_view)


def _pickled(flat: tree.Flat, accelerator: Accelerator) -> tuple[bytes, dict[tuple[str, str], str]]:
    """Pickles the objects of a state, natively if they are plain; returns what :func:`pickling.dump` does."""
    if not flat.objects:
        return b"", {}
    if flat.native and (plain := pickling.plain(flat)) is not None:
        return plain
    # What was read natively is in host memory.
    tensors = [flat.leaf(number) for number in flat.unread]
    # Objects may read device memory while they are pickled.
    with accelerator.reading({*accelerator.in_use(), *accelerator.holding(tensors)}):
        return pickling.dump(flat)


def _padded(data: bytes, fill: bytes) -> bytes:
    return data + fill * (-len(data) % 64)
