"""What the tensors of a state need of a checkpoint, where torch's planner does not look, or sees it wrong."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .._gc import gc_paused
from ..errors import IncompleteCheckpoint, StateMismatch, UnsupportedLeaf
from ..state.local_parts import LocalPart, SpreadTensor, spread_tensor
from ..storage.boxes import Box, why_not_whole

#: The memory of parts of tensors, by their places in the state.
Targets: TypeAlias = dict[MetadataIndex, torch.Tensor]


@gc_paused()
def checked(plan: LoadPlan, state: Any, metadata: Metadata) -> tuple[LoadPlan, Targets]:
    """Checks that a plan fills each tensor of ``state``, or each part that this rank has of it.

    Args:
        plan: the plan of torch's planner
        state: the tensors that are loaded into, by key; anything else if the planner does not say
        metadata: the checkpoint

    Returns:
        The plan, in which each part of a DTensor is read to where it belongs: to torch's planner, a part with gaps is
        one box. And the memory of those parts that the planner does not know.

    Raises:
        StateMismatch: this rank's part of a tensor has no place in the whole
        IncompleteCheckpoint: the checkpoint lacks something that is needed
    """
    if not isinstance(state, Mapping):
        return plan, {}
    items: dict[str, list[ReadItem]] = defaultdict(list)
    for item in plan.items:
        items[item.dest_index.fqn].append(item)
    replaced: dict[str, list[ReadItem]] = {}
    targets: Targets = {}
    for fqn, value in state.items():
        planned = items.get(fqn, [])
        stored = metadata.state_dict_metadata.get(planned[0].storage_index.fqn if planned else fqn)
        if not isinstance(value, torch.Tensor) or not isinstance(stored, TensorStorageMetadata):
            continue
        try:
            spread = spread_tensor(value)
        except UnsupportedLeaf as e:
            raise StateMismatch(f"nothing was overwritten: {fqn}: {e}") from e
        if spread is not None and planned and _has_gaps(value, spread):
            planned = replaced[fqn] = _items(fqn, planned[0].storage_index.fqn, stored, spread.parts)
            targets |= {MetadataIndex(fqn, torch.Size(box.offsets)): tensor for box, tensor in spread.parts}
        wanted = value.numel() if spread is None else sum(part.box.numel for part in spread.parts)
        found = sum(item.lengths.numel() for item in planned)
        # A planner may choose less of a tensor that is there.
        if found != wanted and (why := _why_incomplete(stored)) is not None:
            raise IncompleteCheckpoint(
                f"nothing was overwritten: {fqn}: the checkpoint has {found} of the {wanted} elements that are needed "
                f"here ({why}). Of a save without collectives, each rank can load what it has saved, and no more"
            )
    if replaced:
        kept = [item for item in plan.items if item.dest_index.fqn not in replaced]
        plan = dataclasses.replace(plan, items=kept + [item for new in replaced.values() for item in new])
    return plan, targets


def _why_incomplete(stored: TensorStorageMetadata) -> str | None:
    """Returns why the chunks of a tensor do not have each of its elements exactly once; ``None`` if they do."""
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
    return why_not_whole(stored.size, boxes, [f"chunk {number}" for number in range(len(boxes))])


def _has_gaps(value: Any, spread: SpreadTensor) -> bool:
    """Whether torch's planner takes several parts of a DTensor for one."""
    return len(spread.parts) > 1 and hasattr(value, "_local_tensor") and len(value.__create_chunk_list__()) == 1


def _items(fqn: str, key: str, stored: TensorStorageMetadata, parts: list[LocalPart]) -> list[ReadItem]:
    """Returns what has to be read of the tensor ``key`` for parts of the tensor ``fqn``."""
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in parts]
    return [
        dataclasses.replace(item, dest_index=MetadataIndex(fqn, item.dest_index.offset))
        for item in create_read_items_for_chunk_list(key, stored, chunks)
    ]
