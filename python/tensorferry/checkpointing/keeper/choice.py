"""Which of the snapshots that a keeper knows a load takes, so that all ranks of a job take the same."""

from __future__ import annotations

from collections.abc import Iterable

from ...storage.folder import Index
from .snapshot import Snapshot, most_trusted


def choose(
    known: Iterable[Snapshot],
    index: Index | None,
    world_size: int,
    location: str,
    *,
    has_name: bool,
    agreed: str | None = None,
) -> Snapshot | None:
    """Returns the snapshot with which a rank loads the checkpoint at a path, ``None`` if it has to load from disk.

    What is committed on the disk decides, since all ranks see it: a snapshot of that very save is as good, wherever it
    comes from. Otherwise the path has to mean the same folder where the snapshot was saved. Then one that began later
    is taken where there is one rank; and where nothing is committed, one if the snapshots of all ranks are known. The
    latter is also taken from another folder of this path if the job was given a name: that names what is one job.
    Ranks that have agreed on a save take that one and no other.

    Args:
        known: the snapshots of this job, path and rank
        index: the checkpoint on the disk, ``None`` if there is none
        world_size: how many ranks load
        location: that of the path here, see ``location.location_of``
        has_name: whether the job was given a name
        agreed: the id of the save that all ranks have agreed to load, if they have
    """
    candidates = most_trusted(one for one in known if one.world_size == world_size)
    for one in sorted(candidates, key=lambda one: one.began, reverse=True):
        if agreed is not None:
            if one.save_id == agreed:
                return one
        elif index is None:
            if one.complete and (has_name or one.location == location):
                return one
        elif one.save_id == index.save_id or (world_size == 1 and one.location == location and one.began > index.began):
            return one
    return None
