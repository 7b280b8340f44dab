"""One load of this rank, planned: which parts of which stored chunks, and where each of them goes."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ..dcp.reader import SliceReader
from ..storage.boxes import Box
from . import shards
from .release import (
    COMMON,
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
)

#: What makes the shards of two ranks the same one, which is read in the same way: key, place, dtype, strides, device.
ShardId: TypeAlias = tuple[str, Box, str, tuple[int, ...], str]


class Loading:
    """A load that is planned: its items, and the planner that gives the reader their targets.

    The constructor gives data in host memory to tensors without any, and detaches that of others, once it has found all
    that the state asks for in the checkpoint. It overwrites nothing.

    Args:
        state: the sharded state
        metadata: the checkpoint
        reader: reads it
        reserved: keys in the checkpoint that a state may not ask for

    Attributes:
        objects: the items of this rank that read objects, by key
        values: the objects that were read, by key
        tensors: the items that read parts of tensors; the index of each item's target is the number of its leaf

    Raises:
        CheckpointingException: the state asks for what the checkpoint does not have, or has leaves that are not sharded
            or whose fields do not fit together
    """

    def __init__(
        self, state: Any, metadata: Metadata, reader: SliceReader, reserved: frozenset[str] = frozenset({COMMON})
    ) -> None:
        self.reader = reader
        self._metadata = metadata
        self.tensors: list[ReadItem] = []
        self._shards: dict[int, ShardedTensor] = {}
        self._targets: dict[int, torch.Tensor] = {}
        self.values: dict[str, Any] = {}
        stored = metadata.state_dict_metadata
        wanted: set[str] = set()
        leaves = list(shards.leaves(state))
        unknown = sorted({_key(leaf) for _, leaf in leaves if _key(leaf) not in stored or _key(leaf) in reserved})
        if unknown:
            raise CheckpointingException(
                f"Unexpected keys (not found in the checkpoint): {unknown[:10]}{' ...' if unknown[10:] else ''}: the "
                f"checkpoint has {len(stored)} keys. Pass strict= to load without them"
            )
        for number, (path, leaf) in enumerate(leaves):
            if isinstance(leaf, ShardedObject):
                wanted.add(leaf.unique_key)
            else:
                self._add(number, path, leaf, stored[leaf.key])
        for number, tensor in self._shards.items():
            self._targets[number] = _target(tensor)
        self.objects = {key: _object_item(key) for key in sorted(wanted)}

    def _add(self, number: int, path: str, shard: ShardedTensor, metadata: Any) -> None:
        """Adds the tensor leaf ``number``, and the parts of stored chunks that it needs.

        Args:
            number: the leaf's number
            path: its path in the state
            shard: the leaf
            metadata: torch's, of the stored tensor

        Raises:
            CheckpointingException: an object has this key, the global shapes differ, or the chunks do not cover the
                shard
        """
        shards.check(shard)
        if not isinstance(metadata, TensorStorageMetadata):
            raise CheckpointingException(f"{shard.key}: the checkpoint has an object of this key, and not a tensor")
        box, shape, asked = shards.box_of(shard), tuple(metadata.size), tuple(shard.global_shape)
        if len(shape) != len(asked) or (shape != asked and not shard.allow_shape_mismatch):
            raise CheckpointingException(
                f"Global shape mismatch for loaded ({list(shape)}) and expected ({list(asked)}) tensor for key "
                f"{shard.key}: build the model that was saved, or mark a padded tensor with allow_shape_mismatch=True"
            )
        self._shards[number] = shard
        there = 0
        for chunk in metadata.chunks:
            stored = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            common_part = box.common(stored)
            if common_part is None:
                continue
            inside = tuple(a - b for a, b in zip(common_part.offsets, stored.offsets, strict=True))
            local = tuple(a - b for a, b in zip(common_part.offsets, box.offsets, strict=True))
            self.tensors.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(path, torch.Size([0] * len(local)), number),
                    dest_offsets=torch.Size(local),
                    storage_index=MetadataIndex(shard.key, torch.Size(stored.offsets)),
                    storage_offsets=torch.Size(inside),
                    lengths=torch.Size(common_part.sizes),
                )
            )
            there += common_part.numel
        if there != box.numel and shape == asked:
            raise CheckpointingException(
                f"{shard.key}: the checkpoint has {there} of the {box.numel} elements of the shard {box}: its index is "
                "not complete. Load another checkpoint"
            )

    def clear(self) -> None:
        """Zeroes the data of leaves with ``allow_shape_mismatch``, of which the checkpoint may have a part only."""
        for number, shard in self._shards.items():
            if shard.allow_shape_mismatch:
                self._targets[number].zero_()

    def read(self, items: list[ReadItem]) -> None:
        """Reads items into their targets.

        Raises:
            TensorferryError: as for :meth:`SliceReader.read_data`
        """
        if items:
            self.reader.read_data(LoadPlan(items), self)

    def containers(self) -> set[str]:
        """Returns the files, or the containers of peers, from which tensors are read."""
        return {self._metadata.storage_data[item.storage_index].container for item in self.tensors}

    def shard(self, number: int) -> ShardId:
        """Returns what identifies the shard of a leaf."""
        shard, target = self._shards[number], self._targets[number]
        return shard.key, shards.box_of(shard), str(target.dtype), target.stride(), target.device.type

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        """Returns the target of an item, for the reader."""
        target = self._targets[item.dest_index.index]
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            if (start, length) != (0, target.shape[dim]):
                target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Does nothing: the reader has written into the leaf's own data."""

    def load_object(self, item: ReadItem, value: Any) -> None:
        """Takes an object, which the reader has unpickled with its allow-list."""
        self.values[item.storage_index.fqn] = value

    def value(self, leaf: Any) -> Any:
        """Returns what was loaded for a leaf."""
        if isinstance(leaf, ShardedObject):
            return self.values[leaf.unique_key]
        return leaf.data


def _key(leaf: Any) -> str:
    return str(leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key)


def _object_item(key: str) -> ReadItem:
    """Returns the item that reads the object ``key``."""
    zero = torch.Size([0])
    index = MetadataIndex(key)
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=index,
        dest_offsets=zero,
        storage_index=index,
        storage_offsets=zero,
        lengths=zero,
    )


def _target(shard: ShardedTensor) -> torch.Tensor:
    """Returns the tensor that a shard is read into, with its prepended axes.

    The shard's data is allocated if it has none.
    """
    if shard.data is None:
        shard.init_data("cpu", init_fn=torch.empty)
    else:
        shard.data = shard.data.detach()
    return shards.with_axes(shard)


def common_in(reader: SliceReader, metadata: Metadata) -> bytes | None:
    """Reads the copy of the common state inside a checkpoint; returns ``None`` if there is none.

    Raises:
        CheckpointingException: the index does not have all of it
        TensorferryError: as for :meth:`SliceReader.read_data`
    """
    stored = metadata.state_dict_metadata.get(COMMON)
    if not isinstance(stored, TensorStorageMetadata) or stored.properties.dtype != torch.uint8 or len(stored.size) != 1:
        return None
    (size,) = stored.size
    shard = ShardedTensor(COMMON, torch.empty(size, dtype=torch.uint8), torch.uint8, (size,), (size,), (0,), (1,))
    held = Loading({COMMON: shard}, metadata, reader, reserved=frozenset())
    held.read(held.tensors)
    return bytes(shard.data.numpy())
