"""Which of the snapshots that a keeper knows a load takes, so that all ranks of a job take the same."""

from __future__ import annotations

from collections.abc import Iterable

from ...storage.folder import Index
from .snapshot import Snapshot


def choose(
    known: Iterable[Snapshot], index: Index | None, world_size: int, agreed: str | None = None
) -> Snapshot | None:
    """Returns the snapshot with which a rank loads the checkpoint at a path, ``None`` if it has to load from disk.

    What is committed on the disk decides, since all ranks see it: a snapshot of that very save is as good. A newer one
    is taken only where there is one rank, or where nothing is committed and the snapshots of all ranks are known.

    Args:
        known: the snapshots of this path and rank
        index: the checkpoint on the disk, ``None`` if there is none
        world_size: how many ranks load
        agreed: the id of the save that all ranks have agreed to load, if they have
    """
    newest = sorted((one for one in known if one.world_size == world_size), key=lambda one: (one.began, not one.remote))
    for one in reversed(newest):
        if agreed is not None:
            if one.save_id == agreed:
                return one
        elif index is None:
            if one.complete:
                return one
        elif one.save_id == index.save_id or (world_size == 1 and one.began > index.began):
            return one
    return None
