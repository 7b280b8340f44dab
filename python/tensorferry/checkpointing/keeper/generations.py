"""Which snapshots a keeper holds, and which of them goes when another one comes; no sockets, no memory.

Each snapshot is in one of two states. What is *kept* can be asked for. What is *leaving* was evicted, and its memory
counts until its last reader is gone.

The rules of eviction, first those that apply first:

1. Of one job and rank, the oldest beyond the number of generations goes; copies from other keepers are counted apart.
2. What has a newer snapshot of the same job and rank goes before what has none; of either, copies from other keepers go
   before what trainers of this node gave, and of these the oldest goes first.
3. The newest snapshot of a rank whose trainer is connected goes only for a newer one of that rank.
4. A copy from another keeper displaces only such copies.

A snapshot for which that makes no room is refused, and nothing goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...errors import TensorferryError
from .limits import readable
from .snapshot import LOCAL, Key, Snapshot

T = TypeVar("T")


class KeeperFull(TensorferryError):
    """A keeper does not take a snapshot: it has no room for it, or has it already."""


@dataclass(eq=False)
class Kept(Generic[T]):
    """A snapshot, and what holds it.

    Attributes:
        about: what is known about it
        nbytes: the memory that it takes
        body: what holds it
        live: whether the trainer that gave it is still connected
        lent: how many processes of this node have its memory mapped; until none has, evicting it frees no memory
    """

    about: Snapshot
    nbytes: int
    body: T
    live: bool = True
    lent: int = 0


class Generations(Generic[T]):
    """The snapshots of a keeper.

    Args:
        limit: most bytes of memory of all snapshots
        most: most snapshots of one job and rank, and most copies from other keepers

    Attributes:
        leaving: the snapshots that were evicted and still have readers
        promised: bytes of memory of snapshots on their way, by who fetches them
    """

    def __init__(self, limit: int, most: int) -> None:
        self.limit = limit
        self.most = most
        self._kept: dict[Key, Kept[T]] = {}
        self.leaving: list[Kept[T]] = []
        self.promised: dict[object, int] = {}

    @property
    def used(self) -> int:
        """Bytes of memory that are held or promised."""
        held = sum(one.nbytes for one in (*self._kept.values(), *self.leaving))
        return held + sum(self.promised.values())

    def __iter__(self) -> Iterator[Kept[T]]:
        """Iterates over what is kept, the oldest first."""
        return iter(list(self._kept.values()))

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> Kept[T] | None:
        """Returns what is kept under ``key``."""
        return self._kept.get(key)

    def make_room(
        self, about: Snapshot, nbytes: int, evict: Callable[[Kept[T]], None], cut: Callable[[Kept[T]], None]
    ) -> None:
        """Evicts what has to go for ``about``.

        Args:
            about: the snapshot that comes
            nbytes: the memory that it takes
            evict: called for each that goes: what is left of it is ``leaving``
            cut: called for what is leaving and whose memory is needed at once: ends its readers

        Raises:
            KeeperFull: it is kept already, or there would not be enough memory; nothing was evicted
        """
        for one in self.evictions_for(about, nbytes):
            evict(one)
        for one in [one for one in self.leaving if not one.lent]:
            if self.used + nbytes <= self.limit:
                break
            cut(one)

    def evictions_for(self, about: Snapshot, nbytes: int) -> list[Kept[T]]:
        """Returns what is to be evicted so that ``about`` fits.

        These are a copy of the same snapshot from elsewhere, what its rank has above the number of generations, and
        then as many more, in :meth:`_eviction_order`, as it takes until there is memory.

        Raises:
            KeeperFull: it is kept already, or would not fit
        """
        if (known := self._kept.get(about.key)) and (known.about.origin == LOCAL or about.origin != LOCAL):
            raise KeeperFull(f"the snapshot {about.save_id} of rank {about.rank} is kept already")
        if nbytes > self.limit:
            raise KeeperFull(
                f"a snapshot of {readable(nbytes)} is larger than all the memory that the keeper may hold, "
                f"{readable(self.limit)}: give it more with --memory"
            )
        gone = [known] if known else []
        same = [one for one in self._by_age() if _counted_with(one.about) == _counted_with(about) and one not in gone]
        gone += same[: max(len(same) + 1 - self.most, 0)]
        excess = self.used + nbytes - self.limit
        excess -= sum(one.nbytes for one in (*gone, *self.leaving) if not one.lent)
        for one in self._eviction_order(about, gone):
            if excess <= 0:
                break
            gone.append(one)
            excess -= one.nbytes
        if excess > 0:
            raise KeeperFull(
                f"a snapshot of {readable(nbytes)} does not fit beside what the keeper may not evict for it: give it "
                f"more --memory than {readable(self.limit)}, or let it keep fewer --generations"
            )
        return gone

    def _eviction_order(self, about: Snapshot, chosen: list[Kept[T]]) -> list[Kept[T]]:
        """Returns what may be evicted for ``about`` besides what is ``chosen``, in the order in which it goes.

        Snapshots that have a newer one of the same job and rank go first. Among these, and then among the newest ones,
        copies of a buddy's snapshots go before those that trainers of this node gave, the oldest of each first. Never
        evicted are snapshots that processes of this node have mapped, this node's own for a copy of a buddy's, and the
        newest one of another rank whose trainer is connected.
        """
        newest = {_counted_with(kept.about): kept for kept in self._by_age()}
        ranked = []
        for kept in self._by_age():
            own, last = kept.about.origin == LOCAL, newest[_counted_with(kept.about)] is kept
            same = kept.about.series == about.series
            if kept in chosen or kept.lent or (own and (about.origin != LOCAL or (last and kept.live and not same))):
                continue
            ranked.append(((last, own), kept))
        return [kept for _, kept in sorted(ranked, key=lambda item: item[0])]

    def _by_age(self) -> list[Kept[T]]:
        """Returns what is kept, the oldest first: trainers give theirs in this order, and buddies are asked for any."""
        return sorted(self._kept.values(), key=lambda one: 0 if one.about.origin == LOCAL else one.about.began)

    def add(self, about: Snapshot, nbytes: int, body: T) -> Kept[T]:
        """Keeps a snapshot for which there is room."""
        kept = self._kept[about.key] = Kept(about, nbytes, body)
        return kept

    def leave(self, kept: Kept[T]) -> None:
        """Notes that ``kept`` is evicted and may have readers."""
        if self._kept.get(kept.about.key) is kept:
            del self._kept[kept.about.key]
            self.leaving.append(kept)

    def release(self, kept: Kept[T]) -> None:
        """Notes that nobody reads ``kept``, which was evicted, any more."""
        with contextlib.suppress(ValueError):
            self.leaving.remove(kept)


def _counted_with(about: Snapshot) -> tuple[bool, tuple[str, str, int]]:
    """Returns a key that is equal for snapshots that count against the same number of generations."""
    return about.origin == LOCAL, about.series
