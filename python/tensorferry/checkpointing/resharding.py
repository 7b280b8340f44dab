"""Puts DTensors together from the files of all ranks, for other placements or another number of ranks."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._native import Stored, _read_file
from ..errors import ProtocolError, StateMismatch
from ..memory.tensors import address, byte_strides, scratch, takes_bytes, why_not_writable
from ..state import tree
from ..state.shards import Shard, described, entry_of
from ..storage import folder as folders
from ..storage.slices import SliceTuple, runs

#: Runs of fewer bytes than this are not read one by one: all bytes from the first run to the last are read into a
#: temporary buffer, and torch copies the elements out of it.
_SHORT_RUN = 256
#: Bytes of temporary memory after which what was scheduled is read, unless one part needs more.
_SCRATCH = 256 << 20


class _Job(NamedTuple):
    """A tensor to be filled with a box of a DTensor of the checkpoint."""

    path: str
    target: Tensor
    offsets: list[int]


class Resharding:
    """Fills tensors with values of a checkpoint's DTensors.

    Args:
        path: the checkpoint's folder
        index: its index
        rank: the rank of this process
        world_size: how many ranks load
        threads: threads that read; ``None`` chooses by the number of cores
    """

    def __init__(self, path: Path, index: folders.Index, rank: int, world_size: int, threads: int | None) -> None:
        self._path, self._index, self._threads = path, index, threads
        self._rank, self._is_same = rank, world_size == index.world_size
        self._jobs: list[_Job] = []
        self._entries: dict[int, tuple[list[Any], list[str], list[str], list[int]]] = {}
        self._slices: dict[int, list[SliceTuple]] = defaultdict(list)
        self._after: list[tuple[Tensor, Tensor]] = []
        self._temporary = 0

    def plan(self, asking: Any) -> set[int]:
        """Finds the tensors of ``asking`` that cannot be filled from this rank's file.

        Returns:
            The identities of these tensors.

        Raises:
            StateMismatch: one of them differs from the checkpoint's in dtype or shape, or cannot be written to
        """
        kept: set[int] = set()
        wrong: list[str] = []
        if not self._index.shards:
            return kept
        for value, path in _tensors(asking):
            if path not in self._index.shards:
                continue
            dtype, shape, shards = self._described(path)
            local, offsets = _local(value)
            own = next((s for s in shards if s.rank == self._rank), None)
            is_own = own is not None and (own.offsets, own.shape) == (offsets, list(local.shape))
            if _is_dtensor(value) and self._is_same and is_own:
                continue
            if (value.dtype, list(value.shape)) != (dtype, shape):
                wrong.append(f"{path}: {value.dtype} {list(value.shape)} here, {dtype} {shape} in the checkpoint")
            elif (why := why_not_writable(local)) is not None:
                wrong.append(f"{path}: cannot be written to here: {why}")
            kept.add(id(value))
            self._jobs.append(_Job(path, local.detach(), offsets))
        _refuse(wrong)
        return kept

    def gathered(self, state: Any) -> Any:
        """Returns ``state``; if another number of ranks has saved it, with a whole tensor in place of each DTensor."""
        if self._is_same or not self._index.shards:
            return state
        flat = tree.flatten(state)
        for number, (value, path) in enumerate(zip(flat.objects, flat.object_paths, strict=True)):
            if path in self._index.shards and _is_dtensor(value):
                dtype, shape, _ = self._described(path)
                memory = scratch(math.prod(shape) * dtype.itemsize).untyped_storage()
                whole = torch.empty(0, dtype=dtype, device="cpu").set_(memory, 0, shape)
                self._jobs.append(_Job(path, whole, [0] * len(shape)))
                flat.objects[number] = torch.nn.Parameter(whole, value.requires_grad) if _is_parameter(value) else whole
        self.fill()
        return tree.unflatten(flat.tree, flat.plain, flat.objects)

    def fill(self) -> None:
        """Reads the values of all planned tensors.

        Raises:
            ProtocolError: index and files contradict each other
            CorruptCheckpoint: bytes do not match their checksums
        """
        for job in self._jobs:
            dtype, _, shards = self._described(job.path)
            covered = 0
            for shard in shards:
                covered += self._schedule(job, shard, dtype)
                if self._temporary > _SCRATCH:
                    self._flush()
            if covered < job.target.numel():
                raise ProtocolError(f"{self._path}: its ranks do not have all elements of {job.path}")
        self._flush()
        self._jobs.clear()

    def _described(self, path: str) -> tuple[torch.dtype, list[int], list[Shard]]:
        """Returns dtype, global shape and parts of a DTensor of the checkpoint, without replicas."""
        return described(self._path, path, self._index.shards[path], self._rank)

    def _schedule(self, job: _Job, shard: Shard, dtype: torch.dtype) -> int:
        """Schedules the read of what ``shard`` has of a job's box; returns how many elements that is."""
        size = int(dtype.itemsize)
        ends = [o + n for o, n in zip(job.offsets, job.target.shape, strict=True)]
        first = [max(a, b) for a, b in zip(job.offsets, shard.offsets, strict=True)]
        last = [min(a, o + n) for a, o, n in zip(ends, shard.offsets, shard.shape, strict=True)]
        lengths = [max(b - a, 0) for a, b in zip(first, last, strict=True)]
        count: int = math.prod(lengths)
        if not count:
            return 0
        target = job.target
        for dim, (a, o, n) in enumerate(zip(first, job.offsets, lengths, strict=True)):
            target = target.narrow(dim, a - o, n)
        strides = [step * size for step in shard.stride]
        start, span = shard.span(first, lengths, size)
        entry, kind, nbytes, start = self._entry(job.path, shard, start, span)
        if takes_bytes(target, dtype):
            run, repeats = runs(lengths, strides, byte_strides(target), size)
            if run >= _SHORT_RUN or not repeats:
                self._slices[shard.rank].append((entry, kind, nbytes, start, run, address(target), repeats))
                return count
        memory = scratch(span + -span % size)
        self._temporary += span
        self._slices[shard.rank].append((entry, kind, nbytes, start, span, address(memory), []))
        self._after.append((target, memory.view(dtype).as_strided(lengths, shard.stride)))
        return count

    def _entry(self, path: str, shard: Shard, start: int, span: int) -> tuple[str, str, int, int]:
        """Returns the entry with the bytes ``[start, start + span)`` of a shard's storage, and where they are in it."""
        storages, names, dtypes, sizes = self._rank_entries(shard.rank)
        try:
            entry, start = entry_of(storages, sizes, shard.storage, start, span)
        except KeyError:
            message = f"{self._path}: the file of rank {shard.rank} does not have its part of {path}"
            raise ProtocolError(message) from None
        return names[entry], dtypes[entry], sizes[entry], start

    def _rank_entries(self, rank: int) -> tuple[list[Any], list[str], list[str], list[int]]:
        """Returns the storages of a rank's file; name, dtype and size of its entries."""
        if rank not in self._entries:
            if rank not in self._index.files:
                raise ProtocolError(f"{self._path}: its index names a rank {rank}, whose file it does not")
            name, header = self._index.files[rank]
            stored = Stored.open(self._path / name, threads=1, header=header)
            if stored.manifest is None:
                raise ProtocolError(f"{self._path / name} does not hold a state")
            storages = json.loads(stored.manifest)["storages"]
            self._entries[rank] = storages, stored.names, stored.dtypes, stored.sizes
        return self._entries[rank]

    def _flush(self) -> None:
        for rank, slices in self._slices.items():
            name, header = self._index.files[rank]
            _read_file(self._path / name, slices, threads=self._threads, header=header)
        with torch.no_grad():
            for target, read in self._after:
                target.copy_(read)
        self._slices.clear()
        self._after.clear()
        self._temporary = 0


def check_parts(stored: Stored, asking: Any) -> None:
    """Checks that the DTensors of ``asking`` are the parts of the whole that the container ``stored`` has.

    Raises:
        StateMismatch: one of them is another part, of a tensor with other placements or of another rank
    """
    shards = json.loads(stored.manifest or b"{}").get("shards")
    if not isinstance(shards, dict) or not shards:
        return
    wrong = []
    for value, path in _tensors(asking):
        if _is_dtensor(value) and isinstance(shard := shards.get(path), dict):
            local, offsets = _local(value)
            if math.prod(local.shape) and (shard.get("offsets"), shard.get("shape")) != (offsets, list(local.shape)):
                there = f"{shard.get('shape')} at {shard.get('offsets')}"
                wrong.append(f"{path}: the part {list(local.shape)} at {offsets} here, {there} in the checkpoint")
    _refuse(wrong)


def check_placements(state: Any, asking: Any) -> None:
    """Checks that the DTensors of ``asking`` have the placements of those of ``state``.

    Raises:
        StateMismatch: one of them has others
    """
    there = {path: value for value, path in _tensors(state) if _is_dtensor(value)}
    wrong = []
    for tensor, path in _tensors(asking):
        value: Any = tensor
        if not _is_dtensor(value) or path not in there:
            continue
        here, other = (getattr(value, "placements", None), getattr(there[path], "placements", None))
        if here != other and value.device_mesh.size() > 1:
            wrong.append(f"{path}: placements {here} here, {other} in the checkpoint")
    _refuse(wrong)


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise StateMismatch(
            "nothing was overwritten: the checkpoint does not fit into this state:\n  " + "\n  ".join(wrong)
        )


def _tensors(state: Any) -> list[tuple[Tensor, str]]:
    """Returns the tensors of a state with their paths."""
    flat = tree.flatten(state)
    leaves = [*zip(flat.plain, flat.rows.names, strict=True), *zip(flat.objects, flat.object_paths, strict=True)]
    return [(value, path) for value, path in leaves if isinstance(value, Tensor)]


def _is_dtensor(value: Any) -> bool:
    return isinstance(getattr(value, "_local_tensor", None), Tensor)


def _is_parameter(value: Tensor) -> bool:
    return bool(getattr(value, "_is_param", False)) or isinstance(value, torch.nn.Parameter)


def _local(value: Tensor) -> tuple[Tensor, list[int]]:
    """Returns the local part of a tensor, and where it begins in the whole one."""
    if not _is_dtensor(value):
        return value, [0] * value.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local: Any = value
    _, offsets = compute_local_shape_and_global_offset(value.shape, local.device_mesh, local.placements)
    return local._local_tensor, list(offsets)
