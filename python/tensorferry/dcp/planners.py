"""Planners for ``dcp.save`` and ``dcp.load`` of many ranks: what they plan travels packed, or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from .._gc import gc_paused
from .._native import Index
from ..errors import InvalidArgument, ProtocolError
from ..pickles.allowlist import Allowed
from .index import ELEMENTS, OBJECT, StoredMetadata, StoredTensor, add_tensor, checked_key, described_item


class SavePlanner(DefaultSavePlanner):  # type: ignore[misc]  # mypy does not follow torch
    """Plans a save as torch's default planner does, for any storage writer, at a fraction of its cost.

    A rank hands over its plan in a few bytes for each tensor, and the coordinator checks and merges those of all ranks
    without making an object for each item. Give it to every rank.

    Args:
        flatten_state_dict: as for torch's ``DefaultSavePlanner``
        flatten_sharded_tensors: likewise
        dedup_save_to_lowest_rank: likewise
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_save_to_lowest_rank: bool = False,
    ) -> None:
        super().__init__(
            flatten_state_dict, flatten_sharded_tensors, dedup_save_to_lowest_rank=dedup_save_to_lowest_rank
        )

    @gc_paused()
    def create_local_plan(self) -> SavePlan:
        """Returns this rank's plan, packed.

        Raises:
            InvalidArgument: a key is not a string, or the parts of one tensor contradict each other
        """
        plan = super().create_local_plan()
        packed = PackedItems.of(plan.items, plan.planner_data or {})
        self.plan = dataclasses.replace(plan, items=packed, planner_data=None)
        self._items = packed.items
        return self.plan

    @gc_paused()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Chooses who writes what several ranks have, and shows that the parts of each tensor make it up.

        Raises:
            InvalidArgument: they do not, ranks contradict each other, or a rank has another planner
        """
        packed = [plan.items for plan in all_plans]
        for rank, items in enumerate(packed):
            if not isinstance(items, PackedItems):
                raise InvalidArgument(
                    f"rank {rank} plans with another class: give every rank a tensorferry.dcp.SavePlanner"
                )
        index, kept = Index.plan([zlib.decompress(items.part) for items in packed], self.dedup_save_to_lowest_rank)
        self.metadata = StoredMetadata.of(index, "the plan", Allowed((), True), unusual=_unusual(index, packed, kept))
        self.global_plan = [
            dataclasses.replace(plan, items=PackedItems(plan.items.part, plan.items.unusual, of_rank))
            for plan, of_rank in zip(all_plans, kept, strict=True)
        ]
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns the plan of this rank, with the items that it writes."""
        if isinstance(new_plan.items, PackedItems):
            new_plan = dataclasses.replace(new_plan, items=new_plan.items.chosen_of(self._items))
        return super().finish_plan(new_plan)


class PackedItems(Sequence[WriteItem]):
    """The items of a rank's plan, which are unpacked when somebody looks at them.

    Args:
        part: what the rank has, an encoded ``Index``, compressed
        unusual: by number, items of which that does not tell all
        kept: which items the rank writes, a byte for each; ``None`` before that is planned

    A copy that is sent to the rank afterwards has ``kept`` alone: the rank has its items.
    """

    def __init__(self, part: bytes, unusual: Mapping[int, WriteItem], kept: bytes | None = None) -> None:
        self.part, self.unusual, self.kept = part, unusual, kept

    @classmethod
    def of(cls, items: Sequence[WriteItem], paths: Mapping[str, Sequence[str | int]]) -> PackedItems:
        """Packs items; ``paths`` says where keys belong in a nested state.

        Raises:
            InvalidArgument: a key is not a string, or parts of one tensor contradict each other
        """
        index, by_key = Index(), defaultdict(list)
        for item in items:
            by_key[item.index.fqn].append(item)
        for fqn, of_key in by_key.items():
            path = json.dumps(paths[fqn], separators=(",", ":")) if fqn in paths else ""
            data = of_key[0].tensor_data
            if data is None:
                index.add(checked_key(fqn), None, (), path=path)
            else:
                add_tensor(index, fqn, data.properties, data.size, path, of_key[0].type == WriteItemType.SHARD)
            for item in of_key:
                chunk = ChunkStorageMetadata((), ()) if item.tensor_data is None else item.tensor_data.chunk
                kind = OBJECT if item.tensor_data is None else ELEMENTS
                index.add_chunk(chunk.offsets, chunk.sizes, 0, item.tensor_storage_size() or 0, kind)
        packed = cls(zlib.compress(index.encode(), 1), {})
        items = [item for of_key in by_key.values() for item in of_key]
        packed.unusual = {at: item for at, (item, told) in enumerate(zip(items, packed, strict=True)) if item != told}
        packed.items = items
        return packed

    @cached_property
    def items(self) -> list[WriteItem]:
        """The items."""
        index, items = Index.decode(zlib.decompress(self.part), 1), []
        for number, fqn in enumerate(index.keys):
            about, is_spread = described_item(index, number), index.item(number)[-1]
            for offsets, sizes, *_ in index.chunks(number):
                if not isinstance(about, TensorStorageMetadata):
                    items.append(WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO))
                    continue
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(chunk, about.properties, about.size)
                kind = WriteItemType.SHARD if is_spread else WriteItemType.TENSOR
                items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), kind, tensor_data=data))
        return self.chosen_of([self.unusual.get(at, item) for at, item in enumerate(items)])

    def chosen_of(self, items: list[WriteItem]) -> list[WriteItem]:
        """Returns those of all items of the rank that it writes."""
        if self.kept is None:
            return items
        return [item for item, is_kept in zip(items, self.kept, strict=True) if is_kept]

    def __getitem__(self, at: Any) -> Any:
        return self.items[at]

    def __len__(self) -> int:
        return len(self.items)

    def __reduce__(self) -> Any:
        """Returns what travels: the items to the coordinator, and back which of them are to be written."""
        return PackedItems, (self.part, self.unusual) if self.kept is None else (b"", {}, self.kept)


def _unusual(index: Index, packed: Sequence[PackedItems], kept: Sequence[bytes]) -> dict[str, TensorWriteData]:
    """Returns by key what the first item that is written says of a tensor, where the index does not tell it all."""
    first: dict[str, TensorWriteData] = {}
    for items, of_rank in zip(packed, kept, strict=True):
        for at, item in items.unusual.items():
            data, number = item.tensor_data, index.find(item.index.fqn)
            if not of_rank[at] or data is None or number is None:
                continue
            if index.chunks(number)[0][0] == tuple(data.chunk.offsets):
                first.setdefault(item.index.fqn, data)
    return first


class LoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]  # mypy does not follow torch
    """Plans a load as torch's default planner does; the items stay in the rank's process, since nobody else needs them.

    Args:
        flatten_state_dict, flatten_sharded_tensors, allow_partial_load: as for torch's ``DefaultLoadPlanner``
    """

    metadata: Metadata | None

    def create_local_plan(self) -> LoadPlan:
        """Returns this rank's plan, of which other processes see no items."""
        metadata = self.metadata
        if isinstance(metadata, StoredMetadata):
            self.metadata = Metadata(_Needed(metadata.state_dict_metadata, self), metadata.planner_data)
        try:
            plan = super().create_local_plan()
        finally:
            self.metadata = metadata
        self._items = OwnItems(plan.items)
        return dataclasses.replace(plan, items=self._items)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Returns the plan of this rank, with its items."""
        if isinstance(new_plan.items, OwnItems):
            new_plan = dataclasses.replace(new_plan, items=self._items)
        return super().finish_plan(new_plan)


class _Needed(Mapping[str, Any]):
    """What a checkpoint says of each key; of a tensor, only the chunks that a rank needs, as torch looks at each."""

    def __init__(self, stored: Mapping[str, Any], planner: DefaultLoadPlanner) -> None:
        self._stored, self._planner = stored, planner

    def __getitem__(self, key: str) -> Any:
        about, value = self._stored[key], self._planner.state_dict.get(key)
        if isinstance(about, StoredTensor):
            # Otherwise the reader says what is missing, or torch that this is no tensor.
            with contextlib.suppress(ProtocolError, ValueError):
                return TensorStorageMetadata(about.properties, about.size, about.chunks_for(_create_chunk_list(value)))
        return about

    def __contains__(self, key: object) -> bool:
        return key in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class OwnItems(list[ReadItem]):
    """Items of a plan; a copy that another process gets is empty."""

    def __reduce__(self) -> Any:
        """Returns what makes an empty one."""
        return OwnItems, ()
