"""One load of this rank, planned: which parts of which stored chunks, and where each of them goes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


class ChunkPart(NamedTuple):
    """What one leaf needs of one stored chunk.

    Attributes:
        number: the leaf
        key: the tensor
        chunk: where the chunk begins in the tensor
        stored: where the part begins in the chunk
        wanted: the part, in the leaf
    """

    number: int
    key: str
    chunk: tuple[int, ...]
    stored: tuple[int, ...]
    wanted: Box


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
        parts: what it reads of tensors
        tensors: the leaves that are tensors, by number

    Raises:
        CheckpointingException: the state asks for what the checkpoint does not have, or has leaves that are not sharded
            or whose fields do not fit together
    """

    def __init__(
        self, state: Any, metadata: Metadata, reader: SliceReader, reserved: frozenset[str] = frozenset({COMMON})
    ) -> None:
        self.reader = reader
        self._metadata = metadata
        self.parts: list[ChunkPart] = []
        self.tensors: dict[int, ShardedTensor] = {}
        self._targets: dict[int, torch.Tensor] = {}
        self.values: dict[str, Any] = {}
        self._paths: list[str] = []
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
            self._paths.append(path)
            if isinstance(leaf, ShardedObject):
                wanted.add(leaf.unique_key)
            else:
                self._add(number, leaf, stored[leaf.key])
        for number, tensor in self.tensors.items():
            self._targets[number] = _target(tensor)
        self.objects = {key: _object_item(key) for key in sorted(wanted)}

    def _add(self, number: int, shard: ShardedTensor, metadata: Any) -> None:
        """Adds the tensor leaf ``number``, and the parts of stored chunks that it needs.

        Args:
            number: the leaf's number
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
        self.tensors[number] = shard
        there = 0
        for chunk in metadata.chunks:
            stored = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            common_part = box.common(stored)
            if common_part is None:
                continue
            inside = tuple(a - b for a, b in zip(common_part.offsets, stored.offsets, strict=True))
            local = tuple(a - b for a, b in zip(common_part.offsets, box.offsets, strict=True))
            wanted = Box(local, common_part.sizes)
            self.parts.append(ChunkPart(number, shard.key, stored.offsets, inside, wanted))
            there += wanted.numel
        if there != box.numel and shape == asked:
            raise CheckpointingException(
                f"{shard.key}: the checkpoint has {there} of the {box.numel} elements of the shard {box}: its index is "
                "not complete. Load another checkpoint"
            )

    def item(self, part: ChunkPart) -> ReadItem:
        """Returns the item that reads a part. The target is known by the path of the leaf and the place in it."""
        return ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(self._paths[part.number], torch.Size([0] * len(part.chunk)), part.number),
            dest_offsets=torch.Size(part.wanted.offsets),
            storage_index=MetadataIndex(part.key, torch.Size(part.chunk)),
            storage_offsets=torch.Size(part.stored),
            lengths=torch.Size(part.wanted.sizes),
        )

    @property
    def is_in_folder(self) -> bool:
        """Whether the checkpoint is in a folder, and not in an object store or with peers."""
        return isinstance(self._metadata.storage_meta.checkpoint_id, os.PathLike)

    @property
    def folder(self) -> Path:
        """The folder of a checkpoint in a folder."""
        return Path(self._metadata.storage_meta.checkpoint_id)

    def files(self) -> set[Path]:
        """Returns the files of a checkpoint in a folder that this rank needs something of."""
        stored, folder = self._metadata.storage_data, self.folder
        wanted = {MetadataIndex(part.key, torch.Size(part.chunk)) for part in self.parts}
        wanted |= {item.storage_index for item in self.objects.values()}
        return {folder / stored[index].container for index in wanted}

    def clear(self) -> None:
        """Zeroes the data of leaves with ``allow_shape_mismatch``, of which the checkpoint may have a part only."""
        for number, shard in self.tensors.items():
            if shard.allow_shape_mismatch:
                self._targets[number].zero_()

    def read(self, items: list[ReadItem]) -> None:
        """Reads items into their targets.

        Raises:
            TensorferryError: as for :meth:`SliceReader.read_data`
        """
        if items:
            self.reader.read_data(LoadPlan(items), self)

    def leaf(self, number: int) -> torch.Tensor:
        """Returns the data of a leaf, with its prepended axes."""
        return self._targets[number]

    def stored_dtype(self, number: int) -> torch.dtype:
        """Returns the dtype that the checkpoint has of a leaf."""
        return self._metadata.state_dict_metadata[self.tensors[number].key].properties.dtype

    @contextlib.contextmanager
    def aimed(self, number: int, memory: torch.Tensor) -> Iterator[None]:
        """While the block runs, reads of a leaf go to ``memory``, a tensor like it, instead."""
        kept, self._targets[number] = self._targets[number], memory
        try:
            yield
        finally:
            self._targets[number] = kept

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
    held.read([held.item(part) for part in held.parts])
    return bytes(shard.data.numpy())
