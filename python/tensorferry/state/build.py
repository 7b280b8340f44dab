"""Builds a state from the entries of a container."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch

from .._native import Arena, Entries, Table
from ..errors import ProtocolError
from ..memory.tensors import DTYPES, Unread, over, parameter, storage_key, storage_over
from ..pickles.allowlist import Allowed
from . import pickling, tree
from .in_place import InPlaceTargets
from .manifest import Manifest

#: Takes a storage in host memory and the name of the device that it was on; returns it, or a storage with its bytes on
#: another device.
Relocate: TypeAlias = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]


class StateBuilder:
    """Builds a state from a manifest and from entries whose memory is known.

    Args:
        manifest: the state's manifest
        entries: the entries of the container
        plain: the numbers of those entries that are plain tensors, in ascending order

    Attributes:
        count: how many entries the container has
        scattered: by number, the storages that no single entry fills; their memory is allocated here

    Raises:
        SystemRefused: the machine has less memory than these storages have
    """

    def __init__(self, manifest: Manifest, entries: Entries | Table, plain: Sequence[int]) -> None:
        self.manifest = manifest
        self.plain = plain
        self.size = entries.size
        self.count = len(entries)
        self._entries = entries
        # Storages that were sent in part or in several pieces get memory of their own. It is zeroed, and only pages
        # that are written take memory: a view of a few bytes may have a storage of many gigabytes.
        scattered = {
            k: nbytes
            for k, (nbytes, pieces) in enumerate(manifest.storages)
            if not (len(pieces) == 1 and self.size(pieces[0][0]) == nbytes) and nbytes
        }
        memory = Arena(list(scattered.values())) if scattered else None
        self.scattered = {
            k: storage_over(memory.part(i), 0, nbytes) for i, (k, nbytes) in enumerate(scattered.items()) if memory
        }

    # These columns of Python objects are created on demand: with many small tensors they would dominate memory use.
    @cached_property
    def dtypes(self) -> list[str]:
        """The container's name for the dtype of each entry."""
        return self._entries.dtypes

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each entry."""
        return self._entries.shapes

    def scattered_entries(self) -> dict[int, int]:
        """Returns the address of each entry that is a piece of a scattered storage."""
        return {
            entry: self.scattered[k].data_ptr() + lo
            for k in self.scattered
            for entry, lo in self.manifest.storages[k][1]
            if self.size(entry)
        }

    def build(
        self,
        pickled: bytes,
        allowed: Allowed,
        memory: Callable[[int], tuple[Any, int]],
        targets: InPlaceTargets | None = None,
        made: tuple[list[torch.Tensor | None], Sequence[int]] | None = None,
        stand_ins: StandIns | None = None,
        relocate: Relocate | None = None,
        objects: list[Any] | None = None,
    ) -> Any:
        """Builds the state and returns it.

        Args:
            pickled: the pickle of everything that is not a plain tensor
            allowed: the globals that the pickle may name
            memory: returns the buffer of an entry and the offset in it
            targets: the receiver's own tensors, where it receives in place
            made: the plain tensors, ``None`` for those that do not exist yet; and the places of these in the list
            stand_ins: where only a part of the state was read, what stands in for the rest
            relocate: moves storages that are not the receiver's own to the device where they belong
            objects: the objects of the pickle, if they are known and refer to no tensor

        Raises:
            ProtocolError: pickle and manifest contradict each other, or a tensor cannot be built
            UnsafePickle: the pickle asks for something that is not allowed
            FetchTimeout: the time that ``allowed`` gives for pickles is over
            StateMismatch: as for :meth:`InPlaceTargets.take`
        """
        plain, missing = made or ([None] * len(self.plain), range(len(self.plain)))
        if stand_ins is not None:
            missing = [number for number in missing if number in stand_ins.leaves]
        received, leaves = self._leaves(memory, targets, plain, missing, relocate)
        storages: dict[int, torch.UntypedStorage] = {}

        def storage(k: int) -> torch.UntypedStorage:
            if k not in storages:
                if stand_ins is not None and k not in stand_ins.storages:
                    return stand_ins.storage(k)
                nbytes, entry, number = self.storage(k)
                if number is not None:
                    storages[k] = received[number].untyped_storage()
                elif k in self.scattered or not nbytes:
                    storages[k] = self.scattered.get(k, torch.UntypedStorage(0))
                else:
                    storages[k] = storage_over(*memory(entry), nbytes)
                if relocate is not None and number is None:
                    pieces = self.manifest.storages[k][1]
                    storages[k] = relocate(storages[k], self.manifest.location(pieces[0][0]) if pieces else "cpu")
            return storages[k]

        if objects is None:
            known = leaves if stand_ins is None else stand_ins.among(leaves)
            objects = self.objects(pickled, allowed, known, storage)
        if targets is None:
            return tree.unflatten(self.manifest.tree, leaves, objects, allowed.defaultdict)
        return tree.unflatten(targets.tree, targets.take(leaves, objects), objects, allowed.defaultdict)

    def objects(
        self,
        pickled: bytes,
        allowed: Allowed,
        leaves: Sequence[torch.Tensor],
        storage: Callable[[int], torch.UntypedStorage],
    ) -> list[Any]:
        """Returns the objects of the pickle; raises as :meth:`build` does."""
        objects = pickling.load(pickled, allowed, leaves, storage, self.manifest.needs) if pickled else []
        if len(objects) != self.manifest.objects:
            raise ProtocolError(f"the source announced {self.manifest.objects} objects but sent {len(objects)}")
        return objects

    def storage(self, k: int) -> tuple[int, int, int | None]:
        """Returns the size of a storage, its first entry, and the number of the plain tensor that fills it, if any.

        The entry is -1 if the storage is empty or scattered.

        Raises:
            ProtocolError: there is no such storage
        """
        rows = self.manifest.storages
        if not 0 <= k < len(rows):
            raise ProtocolError(f"the source's pickle refers to storage {k}, which does not exist")
        nbytes, pieces = rows[k]
        if not nbytes or k in self.scattered:
            return nbytes, -1, None
        entry = pieces[0][0]
        number = bisect_left(self.plain, entry)
        return nbytes, entry, number if number < len(self.plain) and self.plain[number] == entry else None

    def _leaves(
        self,
        memory: Callable[[int], tuple[Any, int]],
        targets: InPlaceTargets | None,
        made: list[torch.Tensor | None],
        missing: Sequence[int],
        relocate: Relocate | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the tensors over the received memory, and the leaves for the state: these tensors or Parameters."""
        flags = self.manifest.flags
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
                    raise ProtocolError(f"entry {i} of the source's state cannot be made a tensor: {e}") from e
        if relocate is not None:
            for number, value in enumerate(made):
                if value is not None and self.plain[number] not in direct:
                    location = self.manifest.location(self.plain[number])
                    made[number] = _relocated(value, relocate, location)
        received = cast("list[torch.Tensor]", made)
        if not flags:
            return received, received
        leaves = received.copy()
        for number, flag in enumerate(flags):
            if flag != "0" and self.plain[number] not in direct and made[number] is not None:
                leaf = leaves[number]
                leaves[number] = leaf.requires_grad_() if flag == "2" else parameter(leaf, flag == "3")
        return received, leaves


def _relocated(value: torch.Tensor, relocate: Relocate, location: str) -> torch.Tensor:
    storage = value.untyped_storage()
    moved = relocate(storage, location)
    if moved is storage:
        return value
    return torch.empty(0, dtype=value.dtype, device=moved.device).set_(moved, 0, value.shape, value.stride())


class StandIns:
    """Memory in place of bytes that are not read, because no object that is wanted needs them.

    The pickle of a state is one, so all its objects are built, those that nobody wants among them. What stands in for
    their bytes takes address space, and no page of memory as long as nothing is written to it.

    Args:
        builder: builds the state

    Attributes:
        leaves: the numbers of the plain tensors that are read
        storages: the numbers of the storages that are read
    """

    def __init__(self, builder: StateBuilder) -> None:
        self.leaves: set[int] = set()
        self.storages: set[int] = set()
        self._builder = builder
        self._made: dict[int, torch.Tensor] = {}
        self._storages = dict(builder.scattered)
        self._leaf_of: dict[int, int] = {}
        self._number_of = {storage_key(storage): k for k, storage in self._storages.items()}

    def leaf(self, number: int) -> torch.Tensor:
        """Returns what stands in for a plain tensor."""
        if number not in self._made:
            builder, i = self._builder, self._builder.plain[number]
            storage = Unread(builder.size(i))
            value = torch.empty(0, dtype=DTYPES[builder.dtypes[i]], device="cpu").set_(storage, 0, builder.shapes[i])
            self._made[number] = value
            self._leaf_of[storage_key(value.untyped_storage())] = number
        return self._made[number]

    def storage(self, k: int) -> torch.UntypedStorage:
        """Returns what stands in for a storage.

        Raises:
            ProtocolError: there is no such storage
        """
        if k not in self._storages:
            nbytes, _, number = self._builder.storage(k)
            storage = Unread(nbytes) if number is None else self.leaf(number).untyped_storage()
            self._storages[k] = storage
            self._number_of[storage_key(storage)] = k
        return self._storages[k]

    def number_of(self, storage: torch.UntypedStorage) -> int | None:
        """Returns the number of the storage for which ``storage`` stands in, ``None`` if it is none of these."""
        return self._number_of.get(storage_key(storage))

    @property
    def are_unused(self) -> bool:
        """Whether the objects of the pickle refer to no tensor."""
        return not self._made and not self._builder.manifest.storages

    def note_read(self) -> None:
        """Notes that the bytes of what is read are in the memory that stands in for them."""
        leaves = [self.leaf(number).untyped_storage() for number in self.leaves]
        for storage in [*leaves, *map(self.storage, self.storages)]:
            if isinstance(storage, Unread):
                storage.is_read = True

    def among(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns ``leaves`` with stand-ins for those that were not read."""
        return _Leaves(leaves, self, len(self._builder.plain))

    def want(self, leaves: set[int], storages: set[int]) -> list[int]:
        """Notes what is read: plain tensors by number, and the storages behind objects, by identity.

        Returns:
            The entries that are not read.
        """
        self.leaves = leaves | {self._leaf_of[key] for key in storages if key in self._leaf_of}
        self.storages = {self._number_of[key] for key in storages if key in self._number_of}
        rows = self._builder.manifest.storages
        needed = {self._builder.plain[number] for number in self.leaves}
        needed |= {entry for k in self.storages for entry, _ in rows[k][1]}
        return [i for i in range(self._builder.count) if i not in needed]


class _Leaves(Sequence[torch.Tensor]):
    """The plain tensors of a state of which only a part was read."""

    def __init__(self, leaves: Sequence[torch.Tensor], stand_ins: StandIns, count: int) -> None:
        self._leaves = leaves
        self._stand_ins = stand_ins
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        return self._leaves[number] if number in self._stand_ins.leaves else self._stand_ins.leaf(number)
