"""A state as the entries of a container, and a container as a state."""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast

import torch

from .. import _gc
from .._native import Arena, Filling, Remote, Rows, Server
from ..errors import InvalidArgument, ProtocolError
from ..memory.accelerator import Accelerator
from ..memory.bounce import Landing
from ..memory.staging import Piece, Stager, host_view
from ..memory.tensors import DTYPES, as_bytes, over, parameter, storage_key, storage_over
from ..storage import reserved
from . import aliases, pickling, tree
from .allowlist import Allowed
from .in_place import Targets, describe

VERSION = 1
_METADATA = [("format", "pt"), ("tensorferry.version", str(VERSION))]
#: Host memory up to this size is copied along with an accelerator's, so that the whole snapshot is private.
_SMALL_HOST_PART = 64 << 20

Snapshot = Literal["borrow", "copy"]

#: Memory of an entry: a whole storage where it is, or a part of one, possibly copied.
Memory: TypeAlias = torch.UntypedStorage | Piece


def known_snapshot(snapshot: Snapshot) -> Snapshot:
    """``snapshot`` itself.

    Raises:
        InvalidArgument: it is no way to take one
    """
    if snapshot not in ("borrow", "copy"):
        raise InvalidArgument(f'snapshot is "borrow" or "copy", not {snapshot!r}')
    return snapshot


class Packed:
    """A state laid out for publishing: a row for each entry, and the memory behind it.

    Accelerator memory is copied only when it is published, so that its first bytes can leave while later ones are on
    their way to the host.

    Attributes:
        private: whether all memory is a copy that nobody else writes to
        pickle_bytes: everything that is no plain tensor
        globals: module and name of each class and function the pickle names, and the first leaf that needs it
    """

    def __init__(self, state: Any, stager: Stager, snapshot: Snapshot) -> None:
        """Takes ``state`` apart and copies what has to be copied of host memory.

        Raises:
            UnsupportedLeaf: something in it cannot be carried
        """
        with _gc.held_off():
            flat = tree.flatten(state)
            self.pickle_bytes, storages, self.globals = _pickled(flat, stager.accelerator)
            device = stager.accelerator.among(flat.plain, flat.accelerated)
            self._lay_out(flat, storages)
            copied = self._stage(stager, snapshot, device)
        # If nothing had to be copied, the state itself stands in the memory that is served. But a private snapshot is
        # of one moment, also where it has no bytes to copy: its objects are those of the pickle.
        self._state = state if not self.private and all([m.buffer is None for m in copied]) else None

    def _lay_out(self, flat: tree.Flat, storages: list[pickling.Storage]) -> None:
        self.rows = flat.rows
        shared = aliases.Memory(flat).groups
        # Storages and no tensors: a trainer may give a tensor other memory (`p.data = ...`) while this is served.
        self.memory: list[Memory] = self.rows.owners
        flags = self.rows.flags
        self._pieces: list[int] = []
        layout = []
        for number, known in enumerate(storages):
            parts = []
            if known.entry is not None:
                parts.append([known.entry, 0])
            else:
                for index, (start, end) in enumerate(known.covered()):
                    parts.append([len(self.rows), start])
                    self._pieces.append(len(self.rows))
                    name = reserved.piece(number, index)
                    self.rows.append(Piece(known.storage, start, end), name, "U8", (end - start,), 0, end - start, 0)
            layout.append([known.storage.nbytes(), parts])
        manifest = {
            "version": VERSION,
            "flags": flags if flags.strip("0") else "",
            "objects": len(flat.objects),
            "keys": flat.keys,
            "storages": layout,
            "tensors": describe(flat),
            "shared": shared,
            "shards": _shards(flat, storages),
            "globals": {f"{module}.{name}": path for (module, name), path in self.globals.items()},
        }
        # The manifest but for the tree, which is JSON already and long.
        self._fields = json.dumps(manifest, separators=(",", ":"))
        self._tree = flat.tree
        self.rows.forget()

    def _stage(self, stager: Stager, snapshot: Snapshot, device: list[int]) -> list[Piece]:
        accelerator = stager.accelerator
        device = device + [i for i in self._pieces if accelerator.device_of(self.memory[i].storage) is not None]
        copied = device
        on_host = self.rows.nbytes - sum([self.rows.size(i) for i in device])
        if snapshot == "copy" or (device and on_host <= _SMALL_HOST_PART):
            known = set(device)
            copied, on_host = device + [i for i in range(len(self.rows)) if i not in known], 0
        pieces = {}
        for i in copied:
            memory = self.memory[i]
            piece = memory if isinstance(memory, Piece) else Piece(memory, 0, memory.nbytes())
            self.memory[i] = piece
            pieces[i] = piece
        self._staging = stager.begin(list(pieces.values()))
        self._on_device = [(i, pieces[i]) for i in device if pieces[i].nbytes]
        for i in {*copied, *self._pieces}:
            self.rows.place(i, self.memory[i].data_ptr())
        self.private = not on_host
        return list(pieces.values())

    def publish(self, server: Server, step: int, alternate: Callable[[str], list[Any] | None] | None) -> None:
        """Hands everything to ``server``, to be served as ``step``, and copies what is on an accelerator.

        When this returns, all of that is copied. Receivers get what is there meanwhile. If a copy fails, what was
        published is withdrawn.

        Raises:
            Exception: whatever the device says when a copy fails
        """
        filling = server.publish(
            step,
            rows=self.rows,
            control=self._control(),
            metadata=_METADATA,
            owner=self.memory,
            private=self.private,
            alternate=alternate,
            filled=not self._on_device,
        )
        if filling is not None:
            self._fill(server, filling)
        if self._state is not None:
            # The server has its own, and nobody will ask again.
            self.pickle_bytes = b""
            self._fields = self._tree = ""

    def manifest(self) -> bytes:
        """The manifest as it travels, JSON, for as long as somebody can ask for it."""
        return f'{self._fields[:-1]},"tree":{self._tree}}}'.encode()

    def _fill(self, server: Server, filling: Filling) -> None:
        try:
            starts = filling.starts
            self._staging.run([(starts[i], piece) for i, piece in self._on_device], filling.ready)
        except BaseException:
            server.abandon(filling)
            raise
        filling.finish()

    def _control(self) -> list[tuple[str, bytes]]:
        control = [(reserved.MANIFEST, _padded(self.manifest(), b" "))]
        return [*control, (reserved.PICKLE, _padded(self.pickle_bytes, b"\0"))] if self.pickle_bytes else control

    def rebuild(self) -> Any:
        """The state again, over the published memory: on the host, and if private, as of when it was published."""
        if self._state is not None:
            return self._state
        plain = [i for i, name in enumerate(self.rows.names) if not name.startswith(reserved.PREFIX)]
        builder = Builder(json.loads(self._fields), self._tree, self.rows, plain)
        for k, storage in builder.scattered.items():
            whole = as_bytes(storage)
            for entry, lo in builder.manifest["storages"][k][1]:
                part = storage_over(*host_view(self.memory[entry]), self.rows.size(entry))
                whole[lo : lo + part.nbytes()].copy_(as_bytes(part))
        return builder.build(self.pickle_bytes, Allowed(trust=True), lambda i: host_view(self.memory[i]))


def _pickled(
    flat: tree.Flat, accelerator: Accelerator
) -> tuple[bytes, list[pickling.Storage], dict[tuple[str, str], str]]:
    if not flat.objects:
        return b"", [], {}
    tensors = [value for value in flat.objects if isinstance(value, torch.Tensor)]
    # Objects may read a device while they are pickled.
    with accelerator.reading({*accelerator.in_use(), *accelerator.holding(tensors)}):
        return pickling.dump(flat)


def _padded(data: bytes, fill: bytes) -> bytes:
    return data + fill * (-len(data) % 64)


def _shards(flat: tree.Flat, storages: list[pickling.Storage]) -> dict[str, dict[str, Any]]:
    """Where each DTensor's local part lies in the whole: a job with other placements can read slices by this."""
    if "torch.distributed.tensor" not in sys.modules:
        return {}
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    numbers = {storage_key(s.storage): n for n, s in enumerate(storages)}
    shards = {}
    for value, path in zip(flat.objects, flat.object_paths, strict=True):
        if isinstance(value, DTensor):
            local = value._local_tensor
            _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            shards[path] = {
                "dtype": str(value.dtype),
                "global_shape": list(value.shape),
                "offsets": list(offsets),
                "shape": list(local.shape),
                "stride": list(local.stride()),
                "storage": numbers.get(storage_key(local.untyped_storage())),
                "storage_offset": local.storage_offset(),
            }
    return shards


class Builder:
    """Builds a state from entries whose memory is known."""

    def __init__(self, manifest: dict[str, Any], tree: str, entries: Remote | Rows, plain: Sequence[int]) -> None:
        """For the ``entries`` of a container, of which those with the numbers ``plain`` are plain tensors.

        ``tree`` is the manifest's, as JSON text; nothing is read of what ``manifest`` says of it.
        """
        self.manifest = manifest
        self.tree = tree
        self.plain = plain
        self.size = entries.size
        self._entries = entries
        # Storages of which not every byte was sent, or that lie in several pieces: memory of their own, zero, of which
        # only the pages that bytes come to are ever there. A view of a few bytes may look into many gigabytes.
        scattered = {
            k: nbytes
            for k, (nbytes, pieces) in enumerate(manifest["storages"])
            if not (len(pieces) == 1 and self.size(pieces[0][0]) == nbytes) and nbytes
        }
        memory = Arena(list(scattered.values())) if scattered else None
        self.scattered = {
            k: storage_over(memory.part(i), 0, nbytes) for i, (k, nbytes) in enumerate(scattered.items()) if memory
        }

    # Columns of Python objects are made only where somebody asks: with many small tensors they are what takes memory.
    @cached_property
    def dtypes(self) -> list[str]:
        """What the container calls each entry's dtype."""
        return self._entries.dtypes

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each entry."""
        return self._entries.shapes

    def scattered_entries(self) -> dict[int, int]:
        """Entry to address, for the pieces of scattered storages."""
        return {
            entry: self.scattered[k].data_ptr() + lo
            for k in self.scattered
            for entry, lo in self.manifest["storages"][k][1]
            if self.size(entry)
        }

    def build(
        self,
        pickled: bytes,
        allowed: Allowed,
        memory: Callable[[int], tuple[Any, int]],
        targets: Targets | None = None,
        made: tuple[list[torch.Tensor | None], Sequence[int]] | None = None,
    ) -> Any:
        """The state.

        Args:
            pickled: everything that is no plain tensor
            allowed: which globals it may name
            memory: gives the buffer and offset of an entry
            targets: filled in place
            made: the plain tensors that exist already, and the places of those that do not
        """
        received, leaves = self._leaves(memory, targets, *(made or ([None] * len(self.plain), range(len(self.plain)))))
        rows = self.manifest["storages"]
        storages = self.scattered.copy()

        def storage(k: int) -> torch.UntypedStorage:
            if k not in storages:
                if not 0 <= k < len(rows):
                    raise ProtocolError(f"the source's pickle refers to storage {k}, which does not exist")
                nbytes, pieces = rows[k]
                if nbytes == 0:
                    storages[k] = torch.UntypedStorage(0)
                else:
                    entry = pieces[0][0]
                    number = bisect_left(self.plain, entry)
                    if number < len(self.plain) and self.plain[number] == entry:
                        storages[k] = received[number].untyped_storage()
                    else:
                        storages[k] = storage_over(*memory(entry), nbytes)
            return storages[k]

        needs = self.manifest.get("globals")
        needs = needs if isinstance(needs, dict) else {}  # only for messages, and so not checked before
        objects = pickling.load(pickled, allowed, leaves, storage, needs) if pickled else []
        if len(objects) != self.manifest["objects"]:
            raise ProtocolError(f"the source announced {self.manifest['objects']} objects and sent {len(objects)}")

        take = targets.take if targets is not None else None
        return tree.unflatten(self.tree, leaves, objects, take, allowed.defaultdict)

    def _leaves(
        self,
        memory: Callable[[int], tuple[Any, int]],
        targets: Targets | None,
        made: list[torch.Tensor | None],
        missing: Sequence[int],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors over the received memory, and those that stand in the state: Parameters over the same."""
        flags = self.manifest["flags"]
        direct = targets.direct if targets is not None else {}
        for number in missing:
            i = self.plain[number]
            if i in direct:
                made[number] = direct[i]
            else:
                size = self.size(i)
                buffer, offset = memory(i) if size else (None, 0)
                try:
                    made[number] = over(buffer, offset, DTYPES[self.dtypes[i]], self.shapes[i], size)
                except (RuntimeError, OverflowError, TypeError, ValueError) as e:
                    raise ProtocolError(f"no tensor can be made of entry {i} of the source's state: {e}") from e
        received = cast("list[torch.Tensor]", made)
        if not flags:
            return received, received
        leaves = received.copy()
        for number, flag in enumerate(flags):
            if flag != "0" and self.plain[number] not in direct:
                leaf = leaves[number]
                leaves[number] = leaf.requires_grad_() if flag == "2" else parameter(leaf, flag == "3")
        return received, leaves


def receive(
    remote: Remote, allowed: Allowed, live: Callable[[], Targets] | None, landing: Landing
) -> tuple[Any, dict[str, Any]]:
    """Fetches what ``remote`` offers and builds the state.

    Args:
        remote: an opened checkpoint
        allowed: which globals its pickle may name
        live: takes the receiver's own state apart, which is filled in place
        landing: what goes to an accelerator passes through it

    Returns:
        The state, and a report of the transfer.
    """
    manifest, layout = remote.manifest, remote.tree
    if manifest is None or layout is None:
        raise ProtocolError(
            "the source serves no state of an HTTPTransport: load what a PeerWriter publishes with a PeerReader, and a "
            "file that tensorferry did not write with safetensors"
        )
    pickled = remote.pickle or b""
    for dtype, name in remote.kinds.items():
        if dtype not in DTYPES:
            raise ProtocolError(f"entry {name!r} has dtype {dtype}, which this version does not build")
    with _gc.held_off():
        builder = Builder(json.loads(manifest), layout, remote, remote.plain)
        targets = live() if live is not None else None
        if targets is not None:
            targets.assign(builder, remote.names)
        addresses = builder.scattered_entries()
        if targets is not None:
            addresses |= targets.places
    places = [addresses.get(i) for i in range(len(remote))] if addresses else None
    if targets is not None and targets.landing:
        waves = remote.waves(places, list(targets.landing), landing.size(targets.landing))
        landing.bring(waves, targets.landing)
        arena, report = waves.finish()
    else:
        arena, report = remote.fetch(places)

    def memory(i: int) -> tuple[Any, int]:
        part = arena.part(i)
        if part is None:
            raise ProtocolError(f"entry {remote.names[i]!r} stands for two things")
        return part, 0

    with _gc.held_off():
        made = arena.tensors(torch.Tensor)
        state = builder.build(pickled, allowed, memory, targets, made)
        if targets is not None:
            targets.write()
            report["in_place"] = targets.fit
    return state, report
