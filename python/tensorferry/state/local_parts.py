"""The parts of tensors that this rank has: asked here by every door, for what is saved and for what is loaded into.

Torch's planners see the same parts, except for a DTensor whose part has gaps (``_StridedShard``): they see one box of
as many elements, here it is several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import UnsupportedLeaf
from ..memory.tensors import sharded_tensor_class
from ..storage.boxes import Box

#: The attributes of torch's ``CheckpointableTensor``.
_CHECKPOINTABLE = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
#: First element and length of each run along one dimension.
_Runs = list[tuple[int, int]]


class LocalPart(NamedTuple):
    """A box of a tensor, and the memory that has its elements on this rank."""

    box: Box
    tensor: Tensor


class SpreadTensor(NamedTuple):
    """A tensor that is spread over ranks.

    Attributes:
        dtype: its dtype
        shape: its shape
        parts: those that this rank has, without empty ones
    """

    dtype: torch.dtype
    shape: list[int]
    parts: list[LocalPart]


def is_spread(value: Any) -> bool:
    """Whether a value is a DTensor, a ShardedTensor, or a tensor that says itself which parts of a whole it has."""
    if not isinstance(value, Tensor):
        return False
    if type(value) in (Tensor, Parameter) and not value.__dict__:
        return False
    return (
        isinstance(getattr(value, "_local_tensor", None), Tensor)
        or _is_sharded(value)
        or hasattr(value, "__create_chunk_list__")
        or _is_checkpointable(value)
    )


def differs_by_rank(value: Any) -> bool:
    """Whether each rank has another part of the tensor ``value``, or another summand of it."""
    if not is_spread(value):
        return False
    placements = getattr(value, "placements", None)
    if placements is None:
        return True
    return any(n > 1 and not one.is_replicate() for one, n in zip(placements, value.device_mesh.shape, strict=True))


def spread_tensor(value: Any) -> SpreadTensor | None:
    """Returns the parts of ``value``; ``None`` if it is whole on each rank that has it.

    Raises:
        UnsupportedLeaf: this rank's part has no place in the whole
    """
    if not is_spread(value):
        return None
    shape = [int(dim) for dim in value.size()]
    if isinstance(local := getattr(value, "_local_tensor", None), Tensor):
        parts = _of_dtensor(value, local)
    elif hasattr(value, "__create_chunk_list__"):
        parts = _of_hooks(value)
    elif _is_checkpointable(value):
        shape = [int(dim) for dim in value.global_shape]
        parts = _of_checkpointable(value)
    else:
        parts = [
            LocalPart(_box(shard.metadata.shard_offsets, shard.metadata.shard_sizes), shard.tensor)
            for shard in value._local_shards
        ]
    parts = [part for part in parts if part.box.numel]
    # A wrapper of parts, such as LocalShardsWrapper, need not have their dtype.
    dtype = parts[0].tensor.dtype if parts else value.dtype
    for box, tensor in parts:
        if tuple(tensor.shape) != box.sizes or tensor.dtype != dtype:
            raise UnsupportedLeaf(f"its part {box} is {tensor.dtype} {list(tensor.shape)} on this rank")
        if len(box.sizes) != len(shape) or any(a + n > dim for a, n, dim in zip(*box, shape, strict=True)):
            raise UnsupportedLeaf(f"its part {box} is not inside of its shape {shape}")
    return SpreadTensor(dtype, shape, parts)


def whole_tensor(value: Tensor) -> SpreadTensor:
    """Returns a tensor that is whole here as its only part."""
    shape = [int(dim) for dim in value.shape]
    part = LocalPart(Box((0,) * len(shape), tuple(shape)), value)
    return SpreadTensor(value.dtype, shape, [part] if part.box.numel else [])


def local_tensors(value: Any) -> list[Tensor]:
    """Returns the tensors with this rank's elements of a DTensor or ShardedTensor, wherever these belong."""
    if isinstance(local := getattr(value, "_local_tensor", None), Tensor):
        return [local]
    return [shard.tensor for shard in value._local_shards] if _is_sharded(value) else []


def first_of_mesh(value: Any) -> int | None:
    """Returns the lowest rank of the mesh of a DTensor, the same on all ranks of it; ``None`` without a mesh."""
    mesh = getattr(value, "device_mesh", None)
    return None if mesh is None else int(mesh.mesh.min())


def is_partial(value: Any) -> bool:
    """Whether a value is a DTensor that is the sum, or another reduction, of what its ranks have."""
    return any(placement.is_partial() for placement in getattr(value, "placements", ()))


def _is_sharded(value: Any) -> bool:
    kind = sharded_tensor_class()
    return kind is not None and isinstance(value, kind)


def _is_checkpointable(value: Tensor) -> bool:
    if not all(hasattr(value, name) for name in _CHECKPOINTABLE):
        return False
    # To torch before 2.14, they say nothing.
    return find_spec("torch.distributed.checkpoint.protocol") is not None


def _of_checkpointable(value: Any) -> list[LocalPart]:
    from torch.distributed.checkpoint.protocol import _get_checkpointable_tensor_chunks

    try:
        chunks = _get_checkpointable_tensor_chunks(value)
    except (TypeError, ValueError) as e:
        raise UnsupportedLeaf(f"its attributes contradict each other: {e}") from e
    parts = []
    for chunk, at in zip(chunks, value.local_offsets, strict=True):
        box = _box(chunk.offsets, chunk.sizes)
        parts.append(LocalPart(box, _narrowed(value, Box(tuple(at), box.sizes))))
    return parts


def _of_hooks(value: Any) -> list[LocalPart]:
    """Returns the parts of a tensor that tells torch's planners of them by methods."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    chunks = [chunk for chunk in value.__create_chunk_list__() if math.prod(chunk.sizes)]
    if hasattr(value, "__get_tensor_shard__"):
        found = [value.__get_tensor_shard__(MetadataIndex("", torch.Size(chunk.offsets))) for chunk in chunks]
    elif len(chunks) < 2:
        found = [value] * len(chunks)
    else:
        raise UnsupportedLeaf("it has several parts on this rank, and no __get_tensor_shard__ to tell them apart")
    return [LocalPart(_box(chunk.offsets, chunk.sizes), one) for chunk, one in zip(chunks, found, strict=True)]


def _of_dtensor(value: Any, local: Tensor) -> list[LocalPart]:
    mesh, placements = value.device_mesh, value.placements
    if is_partial(value):
        raise UnsupportedLeaf(
            "it is Partial: each rank has a summand, and no rank the value; redistribute it to Shard or Replicate first"
        )
    # None on a rank that the mesh does not have.
    if (coordinate := mesh.get_coordinate()) is None:
        return []
    if hasattr(local, "__create_chunk_list__"):
        return _of_hooks(local)
    # Two placements of different classes may be equal.
    kinds = tuple(map(type, placements))
    dims = _dims(tuple(value.shape), tuple(placements), kinds, tuple(mesh.shape), tuple(coordinate))
    sizes = [sum(n for _, n in runs) for runs in dims]
    if list(local.shape) != sizes:
        raise UnsupportedLeaf(
            f"its part on this rank has the shape {list(local.shape)}, and {list(placements)} on {mesh} give it "
            f"{sizes}: parts of other sizes need __create_chunk_list__ and __create_write_items__ on the local tensor"
        )
    if all(len(runs) < 2 for runs in dims):
        return [LocalPart(Box(tuple(runs[0][0] if runs else 0 for runs in dims), tuple(sizes)), local)]
    starts = [itertools.accumulate((n for _, n in runs), initial=0) for runs in dims]
    along = [[(a, n, at) for (a, n), at in zip(runs, at, strict=False)] for runs, at in zip(dims, starts, strict=True)]
    parts = []
    for cell in itertools.product(*along):
        offsets, lengths, at = zip(*cell, strict=True)
        parts.append(LocalPart(Box(offsets, lengths), _narrowed(local, Box(at, lengths))))
    return parts


# Many DTensors have the same shape and placements.
@lru_cache(4096)
def _dims(
    shape: Sequence[int], placements: Sequence[Any], kinds: Any, mesh: Sequence[int], at: Sequence[int]
) -> list[_Runs]:
    """Returns which elements of each dimension a rank has, which is ``at`` this place in a mesh of this shape."""
    del kinds
    dims: list[_Runs] = [[(0, int(length))] for length in shape]
    for placement, count, number in zip(placements, mesh, at, strict=True):
        if not placement.is_replicate():
            runs = dims[placement.dim]
            chosen = _share(sum(n for _, n in runs), placement, count)[number]
            dims[placement.dim] = [run for start, length in chosen for run in _cut(runs, start, length)]
    return dims


def _share(length: int, placement: Any, count: int) -> list[_Runs]:
    """Returns what each of ``count`` ranks has of a dimension of this length, as runs."""
    if type(placement).__name__ == "Shard":
        step = -(-length // count)
        starts = [min(step * number, length) for number in range(count + 1)]
        return [[(a, b - a)] for a, b in itertools.pairwise(starts)]
    if type(placement).__name__ != "_StridedShard":
        raise UnsupportedLeaf(f"the parts that its placement {placement} makes are not known")
    every = torch.arange(length, device="cpu").view([1] * placement.dim + [length])
    try:
        split, _ = placement._split_tensor(every, count, with_padding=False, contiguous=False)
    except AssertionError as e:  # Some versions of torch divide a dimension evenly or not at all.
        raise UnsupportedLeaf(f"{placement} does not divide {length} elements over {count} ranks: {e}") from e
    return [_runs(one.flatten().tolist()) for one in split]


def _runs(numbers: Sequence[int]) -> _Runs:
    found: _Runs = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found


def _cut(runs: _Runs, start: int, length: int) -> _Runs:
    """Returns ``length`` elements of ``runs`` from the element ``start`` on."""
    found: _Runs = []
    for first, n in runs:
        a, b = max(start, 0), min(start + length, n)
        if a < b:
            found.append((first + a, b - a))
        start -= n
    return found


def _narrowed(tensor: Tensor, box: Box) -> Tensor:
    """Returns a view of the elements ``box`` of ``tensor``."""
    found = tensor.detach()
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        found = found.narrow(dim, start, length)
    return found


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return Box(tuple(map(int, offsets)), tuple(map(int, sizes)))
