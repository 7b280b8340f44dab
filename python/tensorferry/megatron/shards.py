"""Megatron's sharded state: its leaves, the part of the whole that each of them is, and whether they make it up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..storage.boxes import Box, crossings
from .release import CheckpointingException, ShardedBase, ShardedObject, ShardedTensor


def box_of(shard: ShardedTensor) -> Box:
    """Returns the part of the whole tensor that ``shard`` is, with its prepended axes."""
    sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return Box(tuple(map(int, shard.global_offset)), tuple(map(int, sizes)))


def with_axes(shard: ShardedTensor) -> torch.Tensor:
    """Returns the shard's data, detached, as a view that has its prepended axes."""
    data: torch.Tensor = shard.data.detach()
    return data[(None,) * shard.prepend_axis_num] if shard.prepend_axis_num else data


def object_of(unique_key: str) -> ShardedObject:
    """Returns the object with this unique key, without data. Unlike for Megatron's own function, keys may have slashes.

    Raises:
        CheckpointingException: no object has this unique key
    """
    key, _, shard = unique_key.rpartition("/")
    try:
        made = ShardedObject.empty_from_unique_key(f"key/{shard}")
    except (ValueError, AssertionError) as e:
        raise CheckpointingException(f"{unique_key!r} does not have the name of an object that Megatron saves") from e
    made.key = key
    return made


def check(shard: ShardedTensor) -> None:
    """Checks that the fields of ``shard`` fit together.

    Raises:
        CheckpointingException: they do not; key and fields are named
    """
    key = shard.key
    if getattr(shard, "flattened_range", None) is not None:
        raise CheckpointingException(
            f"{key}: flattened_range is not supported, by Megatron neither: describe the shard by its offsets"
        )
    box, whole = box_of(shard), tuple(shard.global_shape)
    if not len(box.offsets) == len(box.sizes) == len(whole):
        raise CheckpointingException(
            f"{key}: global_shape {list(whole)}, global_offset {list(box.offsets)} and local_shape "
            f"{list(shard.local_shape)} with {shard.prepend_axis_num} prepended axes differ in the number of dimensions"
        )
    if any(a < 0 or a + n > dim for a, n, dim in zip(box.offsets, box.sizes, whole, strict=True)):
        raise CheckpointingException(f"{key}: the shard {box} goes beyond the whole tensor of shape {list(whole)}")
    if shard.data is not None and tuple(shard.data.shape) != tuple(shard.local_shape):
        raise CheckpointingException(
            f"{key}: its data has shape {list(shard.data.shape)}, but its local_shape is {list(shard.local_shape)}"
        )


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, ShardedBase]]:
    """Yields all sharded leaves of a nested state, each with its path.

    Raises:
        CheckpointingException: there is something else in the state
    """
    if isinstance(state, (dict, list)):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in pairs:
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, (ShardedTensor, ShardedObject)):
        yield path, state
    else:
        raise CheckpointingException(
            f"{path or 'the state'} is a {type(state).__name__}: a strategy takes dicts and lists of ShardedTensors "
            "and ShardedObjects; call save() or load(), which take states with other values, too"
        )


def replaced(state: Any, value: Callable[[ShardedBase], Any]) -> Any:
    """Returns a copy of a nested state in which ``value`` of each leaf stands in its place."""
    if isinstance(state, dict):
        return {key: replaced(part, value) for key, part in state.items()}
    if isinstance(state, list):
        return [replaced(part, value) for part in state]
    return value(state)


def check_cover(key: str, shape: tuple[int, ...], boxes: list[Box], who: str) -> None:
    """Checks that ``boxes`` make up a tensor of ``shape``, each element exactly once.

    Raises:
        CheckpointingException: an element is missing or is there twice; ``who`` says whose boxes they are
    """
    total = math.prod(shape)
    # Uneven shardings leave some ranks without an element.
    boxes = [box for box in boxes if box.numel]
    seen: set[Box] = set()
    for box in boxes:
        if box in seen:
            raise CheckpointingException(
                f"Invalid access pattern for {key}: {who} have the shard {box} more than once: give all but one of its "
                "copies another replica_id than 0"
            )
        seen.add(box)
    covered = sum(box.numel for box in boxes)
    for one, other in crossings(boxes):
        raise CheckpointingException(
            f"Invalid access pattern for {key}: {who} have {boxes[one]} and {boxes[other]}, which overlap"
        )
    if covered != total:
        raise CheckpointingException(
            f"Invalid access pattern for {key}: {who} have {covered} of the {total} elements of the shape "
            f"{list(shape)}: a shard is missing, or no rank has it with replica_id 0"
        )


def check_access(ranks: Iterable[Iterable[tuple[Any, ...]]]) -> None:
    """Checks that the main replicas that all ranks ask for make up each tensor and object exactly once.

    Args:
        ranks: what :func:`access` has returned on each rank

    Raises:
        CheckpointingException: they do not; key and shard are named
    """
    tensors: dict[str, tuple[Any, list[Box]]] = {}
    objects: dict[str, tuple[Any, list[Any]]] = {}
    for of_rank in ranks:
        for kind, key, about, box, is_main in of_rank:
            known = objects if kind == "o" else tensors
            first, boxes = known.setdefault(key, (about, []))
            if first != about:
                raise CheckpointingException(
                    f"{key}: the ranks do not agree on it: one asks for {about[0]} {list(about[1])}, another one for "
                    f"{first[0]} {list(first[1])}"
                )
            if is_main:
                boxes.append(box)
    for key, (about, boxes) in tensors.items():
        check_cover(key, about[1], boxes, "the main replicas of all ranks")
    for key, (about, offsets) in objects.items():
        if len(offsets) != len(set(offsets)):
            raise CheckpointingException(f"Duplicate ShardedObject keys: {key}: two main replicas have the same offset")
        if -1 not in about[1] and len(offsets) != math.prod(about[1]):
            raise CheckpointingException(
                f"Invalid access pattern: {key}: {math.prod(about[1]) - len(offsets)} ShardedObject are missing"
            )


def access(items: Iterable[ShardedBase], is_main: Callable[[Any], bool]) -> list[tuple[Any, ...]]:
    """Returns what :func:`check_access` compares of the leaves of one rank."""
    found: list[tuple[Any, ...]] = []
    for item in items:
        if isinstance(item, ShardedObject):
            about = ("an object", tuple(item.global_shape))
            found.append(("o", item.key, about, tuple(item.global_offset), is_main(item.replica_id)))
        else:
            about = (str(item.dtype), tuple(map(int, item.global_shape)))
            found.append(("t", item.key, about, box_of(item), is_main(item.replica_id)))
    return found
