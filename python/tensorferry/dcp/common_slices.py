"""Finds the containers of which several ranks of a load need the same slices."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

from .index import EntryRef

#: Of fewer bytes of a container, ranks bring each other nothing: a receive would be over before others heard of it.
LEAST_BYTES = 8 << 20


@dataclass(frozen=True)
class Needs:
    """What one rank needs, as its plan carries it to the coordinator.

    Attributes:
        digests: for each container of which it needs much, what stands for the slices that it needs
    """

    digests: Mapping[str, bytes]


@dataclass(frozen=True)
class Common:
    """What one rank needs in common with others, as its plan carries it back from the coordinator.

    Attributes:
        containers: those of which other ranks need the same slices
    """

    containers: frozenset[str]


def needs(plan: LoadPlan, refs: Mapping[MetadataIndex, EntryRef]) -> Needs:
    """Returns what a rank with ``plan`` needs; ``refs`` says where each chunk and object is stored."""
    hashes: dict[str, Any] = defaultdict(lambda: hashlib.blake2b(digest_size=8))
    nbytes: dict[str, int] = defaultdict(int)
    for item in plan.items:
        ref = refs.get(item.storage_index)
        if ref is not None:  # Otherwise the read raises, and says why.
            hashes[ref.container].update(repr((ref.entry, *item.storage_offsets, *item.lengths)).encode())
            nbytes[ref.container] += ref.nbytes
    return Needs({name: found.digest() for name, found in hashes.items() if nbytes[name] >= LEAST_BYTES})


def in_common(needs: Sequence[Any]) -> list[Common]:
    """Returns for each rank what others need as well.

    Args:
        needs: what each rank needs; what is no :class:`Needs` stands for a rank that tells nothing
    """
    told = [rank.digests if isinstance(rank, Needs) else {} for rank in needs]
    count = Counter(need for rank in told for need in rank.items())
    return [Common(frozenset(name for name, digest in rank.items() if count[name, digest] > 1)) for rank in told]
