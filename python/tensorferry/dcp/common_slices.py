"""Finds the containers of which several ranks of a load need the same slices, and who reads them with whom."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

from ..storage.divided import LEAST_BYTES, MOST, Partners
from .index import EntryRef


@dataclass(frozen=True)
class Alone:
    """What the plan of a rank carries that has nothing to do with other ranks.

    Attributes:
        digest: identifies what it reads from
    """

    digest: str | None


@dataclass(frozen=True)
class Needs:
    """What one rank needs, as its plan carries it to the coordinator.

    Attributes:
        digests: for each container of which it needs much, what stands for the slices that it needs
        digest: identifies what it reads from
    """

    digests: Mapping[str, bytes]
    digest: str | None = None


@dataclass(frozen=True)
class Common:
    """What one rank needs in common with others, as its plan carries it back from the coordinator.

    Attributes:
        containers: those of which other ranks need the same slices
        digest: identifies what it reads from; ``None`` if it has not told
    """

    containers: frozenset[str]
    digest: str | None = None


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
    shared = [frozenset(name for name, digest in rank.items() if count[name, digest] > 1) for rank in told]
    return [Common(of_rank, getattr(rank, "digest", None)) for of_rank, rank in zip(shared, needs, strict=True)]


@dataclass(frozen=True)
class Offer:
    """What one rank of a load from a store tells the coordinator.

    Attributes:
        digest: that of the index that it has read
        needs: what it needs
        url: of the server at which it gives others what it has read
    """

    digest: str
    needs: Needs
    url: str


@dataclass(frozen=True)
class Divided:
    """What one rank of a load from a store is told by the coordinator.

    Attributes:
        digest: that of the index that all have read
        partners: for each container of which others need the same slices
    """

    digest: str
    partners: Mapping[str, Partners]


def divided(offers: Sequence[Any]) -> list[dict[str, Partners]]:
    """Returns for each rank with whom it divides the read of which container.

    Args:
        offers: of each rank; what is no :class:`Offer` stands for a rank that reads for itself
    """
    groups: dict[tuple[str, bytes], list[int]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        if isinstance(offer, Offer):
            for need in offer.needs.digests.items():
                groups[need].append(rank)
    found: list[dict[str, Partners]] = [{} for _ in offers]
    for (container, _), ranks in groups.items():
        for group in _in_groups(ranks):
            urls = tuple(offers[rank].url for rank in group)
            for number, rank in enumerate(group if len(group) > 1 else ()):
                found[rank][container] = Partners(urls, number)
    return found


def _in_groups(ranks: list[int]) -> Iterator[list[int]]:
    """Yields groups of at most ``MOST`` ranks, of about the same size."""
    count = -(-len(ranks) // MOST)
    for number in range(count):
        yield ranks[len(ranks) * number // count : len(ranks) * (number + 1) // count]
