"""What a rank saves: the items of its plan with their data, and the description of the whole checkpoint."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ..storage.boxes import Box
from . import common, shards
from .release import (
    COMMON,
    CheckpointingException,
    ShardedObject,
    is_main_replica,
)


class SaveData:
    """The data of the items of a plan: torch's planner, as far as a writer calls it.

    Attributes:
        values: tensors and serialized objects, in the order of the items
    """

    def __init__(self, values: Sequence[torch.Tensor | bytes] = ()) -> None:
        self.values: list[torch.Tensor | bytes] = list(values)
        self._numbers: dict[int, int] = {}

    def add_tensor(self, key: str, box: Box, shape: Any, data: torch.Tensor) -> WriteItem:
        """Adds a part of a tensor; returns its item. The item's index counts the items."""
        about = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)),
            properties=TensorProperties(dtype=data.dtype),
            size=torch.Size(shape),
        )
        self.values.append(data)
        index = MetadataIndex(key, torch.Size(box.offsets), len(self.values) - 1)
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=about)

    def add_object(self, key: str, data: bytes) -> WriteItem:
        """Adds a serialized object; returns its item."""
        self.values.append(data)
        index = MetadataIndex(key, None, len(self.values) - 1)
        return WriteItem(index=index, type=WriteItemType.BYTE_IO)

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Returns the data of an item."""
        value = self.values[item.index.index]
        return io.BytesIO(value) if isinstance(value, bytes) else value


def items_of(state: Any, data: SaveData) -> tuple[list[WriteItem], Any]:
    """Returns the items that this rank saves, and the common state if it is among the leaves, else ``None``.

    The data of the items is added to ``data``.

    Raises:
        CheckpointingException: there is something else than sharded leaves in the state, a leaf's fields do not fit
            together, a main replica has no data, or a tensor has the key of the common state
    """
    items: list[WriteItem] = []
    shared = None
    for path, leaf in shards.leaves(state):
        if isinstance(leaf, ShardedObject):
            if leaf.key == COMMON:
                shared = leaf.data
            elif is_main_replica(leaf.replica_id):
                items.append(data.add_object(leaf.unique_key, common.encoded(leaf.data)))
            continue
        if leaf.key == COMMON:
            raise CheckpointingException(f"{path}: the key {COMMON!r} is reserved for the common state")
        shards.check(leaf)
        if not is_main_replica(leaf.replica_id):
            continue
        if leaf.data is None:
            raise CheckpointingException(f"{leaf.key}: the main replica of a shard has no data to save (at {path})")
        box = shards.box_of(leaf)
        if box.numel or not all(leaf.global_shape):
            items.append(data.add_tensor(leaf.key, box, leaf.global_shape, shards.with_axes(leaf)))
    return items, shared


def metadata_of(plans: list[SavePlan]) -> Metadata:
    """Describes the checkpoint that the items of all ranks make up.

    Raises:
        CheckpointingException: they make up none; the key is named
    """
    found: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key = item.index.fqn
            known = found.get(key)
            if item.type == WriteItemType.BYTE_IO:
                if known is not None:
                    raise CheckpointingException(
                        f"Duplicate ShardedObject keys: {key} has two main replicas, one of them on rank {rank}: give "
                        "the others another replica_id than 0"
                    )
                found[key] = BytesStorageMetadata()
                continue
            about = item.tensor_data
            if known is None:
                known = found[key] = TensorStorageMetadata(properties=about.properties, size=about.size, chunks=[])
            if not isinstance(known, TensorStorageMetadata):
                raise CheckpointingException(f"{key} is a tensor on rank {rank} and an object on another one")
            if (known.size, known.properties.dtype) != (about.size, about.properties.dtype):
                raise CheckpointingException(
                    f"{key}: the ranks do not agree on it: it is {about.properties.dtype} {list(about.size)} on rank "
                    f"{rank}, and {known.properties.dtype} {list(known.size)} on another one"
                )
            if all(about.size) or not known.chunks:
                known.chunks.append(about.chunk)
    for key, about in found.items():
        if isinstance(about, TensorStorageMetadata):
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in about.chunks]
            shards.check_cover(key, tuple(about.size), boxes, "the main replicas of all ranks")
    return Metadata(found)
