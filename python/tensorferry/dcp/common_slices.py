"""Finds the containers of which several ranks of a load need the same slices."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

from ..storage.divided import LEAST_BYTES, MOST, Partners
from .index import EntryRef


@dataclass(frozen=True)
class PlanNote:
    """What the plan of a rank carries to the coordinator, and back.

    Attributes:
        digest: identifies what the rank reads from
        needs: for each container of which it needs much, a digest of the slices that it needs
        url: of the server at which it gives others what it has read; empty without one
        partners: set by the coordinator: for each container, the ranks that need the same slices of it
    """

    digest: str | None = None
    needs: Mapping[str, bytes] = field(default_factory=dict)
    url: str = ""
    partners: Mapping[str, Partners] = field(default_factory=dict)


def slice_digests(plan: LoadPlan, refs: Mapping[MetadataIndex, EntryRef]) -> dict[str, bytes]:
    """Returns the ``needs`` of a rank with ``plan``; ``refs`` says where each chunk and object is stored."""
    hashes: dict[str, Any] = defaultdict(lambda: hashlib.blake2b(digest_size=8))
    nbytes: dict[str, int] = defaultdict(int)
    for item in plan.items:
        ref = refs.get(item.storage_index)
        if ref is not None:  # Otherwise the read raises, and says why.
            hashes[ref.container].update(repr((ref.entry, *item.storage_offsets, *item.lengths)).encode())
            nbytes[ref.container] += ref.nbytes
    return {name: digest.digest() for name, digest in hashes.items() if nbytes[name] >= LEAST_BYTES}


def with_partners(plans: Sequence[LoadPlan]) -> list[LoadPlan]:
    """Returns the plans of all ranks, whose notes tell each rank with whom it has needs in common."""
    groups: dict[tuple[str, bytes], list[int]] = defaultdict(list)
    notes = [plan.storage_data for plan in plans]
    for rank, note in enumerate(notes):
        for need in note.needs.items() if isinstance(note, PlanNote) else ():
            groups[need].append(rank)
    partners: list[dict[str, Partners]] = [{} for _ in plans]
    for (container, _), ranks in groups.items():
        for group in _in_groups(ranks):
            urls = tuple(notes[rank].url for rank in group)
            for number, rank in enumerate(group if len(group) > 1 else ()):
                partners[rank][container] = Partners(urls, number)
    return [
        replace(plan, storage_data=PlanNote(note.digest, partners=own)) if isinstance(note, PlanNote) else plan
        for plan, note, own in zip(plans, notes, partners, strict=True)
    ]


def _in_groups(ranks: list[int]) -> Iterator[list[int]]:
    """Yields groups of at most ``MOST`` ranks, of about the same size."""
    count = -(-len(ranks) // MOST)
    for number in range(count):
        yield ranks[len(ranks) * number // count : len(ranks) * (number + 1) // count]
