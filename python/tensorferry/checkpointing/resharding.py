"""Puts DTensors and ShardedTensors together from the files of all ranks, for other placements or numbers of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._native import Stored, _read_file
from ..errors import ProtocolError, StateMismatch, UnsupportedLeaf
from ..memory.tensors import DTYPES, count_as_written, scratch, takes_bytes, why_not_writable
from ..state import tree
from ..state.local_parts import is_spread, spread_tensor, whole_tensor
from ..state.match import tensors_in
from ..state.shards import Shard, described, entry_of, why_incomplete
from ..state.slice_batch import Entry, SliceBatch
from ..storage.boxes import Box
from ..storage.folder import Index
from ..storage.places import AnyPlace
from ..storage.reserved import is_reserved
from ..storage.slices import SliceTuple, contiguous_strides
from .union import unite


class _Part(NamedTuple):
    """A part of a tensor of the checkpoint that is to be filled; the checkpoint has it in these shards."""

    path: str
    box: Box
    target: Tensor
    shards: list[Shard]


class _Entries(NamedTuple):
    """The storages in the manifest of a rank's file, and the columns of its entries."""

    storages: list[Any]
    numbers: dict[str, int]
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    sizes: list[int]


class Resharding:
    """Fills tensors with values of tensors that are spread over the ranks of a checkpoint, or over ranks here.

    Args:
        path: the checkpoint's folder
        index: its index
        rank: the rank of this process
        world_size: how many ranks load; ``None`` for a process that takes everything whole
        threads: threads that read; ``None`` chooses by the number of cores
    """

    def __init__(self, path: AnyPlace, index: Index, rank: int, world_size: int | None, threads: int | None) -> None:
        self._path, self._index, self._threads = path, index, threads
        self._rank, self._is_same = rank, world_size == index.world_size
        self._parts: list[_Part] = []
        self._wholes: list[Tensor] = []
        self._entries: dict[int, _Entries] = {}
        self._batch = SliceBatch(self._read)

    def plan(self, target: Any, stored: Stored) -> set[int]:
        """Finds the tensors of ``target`` that cannot be filled from this rank's file; :meth:`fill` fills them.

        Args:
            target: the state that is loaded into
            stored: the file of this rank

        Returns:
            The identities of these tensors.

        Raises:
            StateMismatch: one of them differs from the checkpoint's in dtype or shape, or cannot be written to; or the
                checkpoint does not have all of one
            ProtocolError: the index does not describe its parts validly
            TensorferryError: the file of a rank cannot be read
        """
        kept: set[int] = set()
        wrong: list[str] = []
        tensors = list(tensors_in(target))
        # A DTensor is taken from this rank's file if it is one there, too.
        is_own = self._is_same and any(map(_is_dtensor, (value for _, value in tensors)))
        own = _shards_in(stored) if is_own else {}
        for path, value in tensors:
            try:
                spread = spread_tensor(value)
            except UnsupportedLeaf as e:
                if self._described(path, True) is not None:
                    wrong.append(f"{path}: {e}")
                continue
            if (found := self._described(path, spread is not None)) is None:
                continue
            dtype, shape, shards = found
            if spread is None:
                spread = whole_tensor(value)
            elif _is_dtensor(value) and "mesh" in own.get(path, ()):
                boxes = [shard.box for shard in shards if shard.rank == self._rank]
                if boxes and boxes == [part.box for part in spread.parts]:
                    continue
            if why := why_incomplete(shape, shards):
                wrong.append(f"{path}: {why}")
            if (spread.dtype, spread.shape) != (dtype, shape):
                wrong.append(f"{path}: {spread.dtype} {spread.shape} here, {dtype} {shape} in the checkpoint")
            wrong += [
                f"{path}: cannot be written to here: {why}"
                for part in spread.parts
                if (why := why_not_writable(part.tensor)) is not None
            ]
            kept.add(id(value))
            self._wholes.append(value)
            self._parts += [_Part(path, box, local.detach(), shards) for box, local in spread.parts]
        _refuse(wrong)
        return kept

    def with_keys_of_all_ranks(self, state: Any, read: Callable[[int], Any]) -> Any:
        """Returns ``state`` of this rank with what only other ranks have, if another number of ranks has saved it.

        Args:
            state: what the file of this rank holds
            read: returns what that of another rank holds

        Raises:
            StateMismatch, TensorferryError: as for :func:`union.unite`
        """
        files = {rank: partial(self.open_file, rank) for rank in self._index.files}
        return state if self._is_same else unite(state, self._rank if self._rank in files else 0, files, read)

    def with_whole_tensors(self, state: Any) -> Any:
        """Returns ``state``, with a whole tensor in place of each part if another number of ranks has saved it.

        A ShardedTensor that could not join its process group is replaced in any case. Raises as :meth:`fill`.
        """
        if not self._index.shards:
            return state
        flat = tree.flatten(state)
        for number, (value, path) in enumerate(zip(flat.objects, flat.object_paths, strict=True)):
            # A ShardedTensor that could not join a process group is of no other use.
            is_detached = getattr(value, "_process_group", value) is None
            found = self._described(path, False) if is_spread(value) else None
            if found is not None and (is_detached or not self._is_same):
                dtype, shape, shards = found
                if why := why_incomplete(shape, shards):
                    raise ProtocolError(f"{self._path}: {path}: {why}")
                memory = scratch(math.prod(shape) * dtype.itemsize).untyped_storage()
                whole = torch.empty(0, dtype=dtype, device="cpu").set_(memory, 0, shape)
                self._parts.append(_Part(path, Box((0,) * len(shape), tuple(shape)), whole, shards))
                flat.objects[number] = torch.nn.Parameter(whole, value.requires_grad) if _is_parameter(value) else whole
        self.fill()
        return tree.unflatten(flat.tree, flat.plain, flat.objects)

    def fill(self) -> None:
        """Reads the values of all planned tensors. After an error, some of them may have new values.

        Raises:
            ProtocolError: index and files contradict each other
            CorruptCheckpoint: bytes do not match their checksums
            SystemRefused: a file cannot be read, or there is no temporary memory
            TensorferryError: a store does not answer in time, or refuses
        """
        count_as_written([*self._wholes, *[part.target for part in self._parts]])
        for part in self._parts:
            for shard in part.shards:
                self._schedule(part, shard)
        self._batch.flush()
        self._parts.clear()

    def _described(self, path: str, take_plain: bool) -> tuple[torch.dtype, list[int], list[Shard]] | None:
        """Returns dtype, global shape and parts of a tensor of the checkpoint, without replicas.

        ``None`` if it is not spread over ranks there; with ``take_plain``, a plain one is a single part.
        """
        if path in self._index.shards:
            return described(self._path, path, self._index.shards[path], self._rank)
        if not take_plain:
            return None
        rank = self._rank if self._rank in self._index.files else 0
        entries = self._rank_entries(rank)
        if is_reserved(path) or (at := entries.numbers.get(path)) is None:
            return None
        shape = list(entries.shapes[at])
        strides = contiguous_strides(shape, 1)
        return DTYPES[entries.dtypes[at]], shape, [Shard(rank, [0] * len(shape), shape, strides, path, 0)]

    def _schedule(self, part: _Part, shard: Shard) -> None:
        """Schedules the read of what ``shard`` has of a part."""
        common = part.box.common(shard.box)
        if common is None:
            return
        target, dtype = part.target, part.target.dtype
        size = int(dtype.itemsize)
        first, lengths = map(list, common)
        for dim, (a, o, n) in enumerate(zip(first, part.box.offsets, lengths, strict=True)):
            target = target.narrow(dim, a - o, n)
        strides = [step * size for step in shard.stride]
        start, span = shard.span(first, lengths, size)
        entry, start = self._entry(part.path, shard, start, span)

        def copy(read: Tensor | None) -> None:
            if read is not None:
                with torch.no_grad():
                    target.copy_(read)

        self._batch.add_box(entry, start, lengths, strides, target, dtype, copy, direct=takes_bytes(target, dtype))

    def _entry(self, path: str, shard: Shard, start: int, span: int) -> tuple[Entry, int]:
        """Returns the entry with the bytes ``[start, start + span)`` of a shard's storage, and where they are in it."""
        of = self._rank_entries(shard.rank)
        try:
            # A plain tensor has an entry of its own, of its name.
            entry, start = (
                (of.numbers[shard.storage], start)
                if isinstance(shard.storage, str)
                else entry_of(of.storages, of.sizes, shard.storage, start, span)
            )
        except KeyError:
            message = f"{self._path}: the file of rank {shard.rank} does not have its part of {path}"
            raise ProtocolError(message) from None
        return Entry(shard.rank, of.names[entry], of.dtypes[entry], of.sizes[entry]), start

    def open_file(self, rank: int, threads: int | None = None) -> Stored:
        """Opens the file of a rank."""
        name, header = self._index.files[rank]
        return Stored.open(self._path / name, threads=threads or self._threads, header=header)

    def _rank_entries(self, rank: int) -> _Entries:
        """Returns the entries of a rank's file, and its storages."""
        if rank not in self._entries:
            if rank not in self._index.files:
                raise ProtocolError(f"{self._path}: its index names a rank {rank}, whose file it does not")
            stored = self.open_file(rank, 1)
            if stored.manifest is None:
                raise ProtocolError(f"{stored.path} does not hold a state")
            storages = json.loads(stored.manifest)["storages"]
            names = stored.names
            numbers = {name: number for number, name in enumerate(names)}
            self._entries[rank] = _Entries(storages, numbers, names, stored.dtypes, stored.shapes, stored.sizes)
        return self._entries[rank]

    def _read(self, slices: Mapping[int, list[SliceTuple]]) -> None:
        for rank, of_rank in slices.items():
            name, header = self._index.files[rank]
            _read_file(self._path / name, of_rank, threads=self._threads, header=header)


def _shards_in(stored: Stored) -> dict[str, dict[str, Any]]:
    """Returns what the manifest of a container says of spread tensors, by path."""
    shards = json.loads(stored.manifest or b"{}").get("shards")
    if not isinstance(shards, dict):
        return {}
    return {path: fields for path, fields in shards.items() if isinstance(fields, dict)}


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise StateMismatch(
            "nothing was overwritten: the checkpoint does not fit into this state:\n  " + "\n  ".join(wrong)
        )


def _is_dtensor(value: Any) -> bool:
    return isinstance(getattr(value, "_local_tensor", None), Tensor)


def _is_parameter(value: Tensor) -> bool:
    return bool(getattr(value, "_is_param", False)) or isinstance(value, torch.nn.Parameter)
