"""What killed saves have left in a store, and its removal; ``commits.py`` has the rules.

An object that no index names is left a day after it was written, by the clock of the store. The parts of uploads that
were not completed are for a lifecycle rule of the bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ...errors import IncompleteCheckpoint, TensorferryError
from ..names import BEGINNINGS, may_be_left
from .place import ObjectPlace

logger = logging.getLogger("tensorferry")


def check(folder: ObjectPlace, names: Iterable[str]) -> None:
    """Checks that objects are there.

    Raises:
        IncompleteCheckpoint: one of them is gone
        TensorferryError: the store does not answer, or refuses
    """
    names = sorted(names)
    # A list may be some seconds behind.
    there = folder.stats([folder / name for name in names])
    for name in names:
        if folder / name not in there:
            raise IncompleteCheckpoint(f"{folder}: {name}, which this save has written, was removed by another process")


def remove(folder: ObjectPlace, names: Iterable[str]) -> None:
    """Removes objects that are no longer needed; logs that they cannot be removed."""
    listed = sorted(names)
    if not listed:
        return
    try:
        (folder / listed[0]).remove(listed)
    except TensorferryError as e:
        # Only a warning: the new checkpoint is complete all the same.
        logger.warning("cannot remove objects that are no longer needed: %s", e)


def remove_leftovers(
    folder: ObjectPlace,
    now: float,
    rank: int | None,
    kept: set[str],
    needed: Callable[[], set[str]],
    abandoned: float,
) -> None:
    """Removes objects that killed saves have left; logs what is in the way, and raises nothing.

    Args:
        folder: where
        now: the time by the clock of the store, in seconds
        rank: as for files
        kept: names of objects that stay
        needed: returns the names of those that the current index names
        abandoned: seconds after which the writer of an object counts as dead
    """
    try:
        there = folder.entries(*BEGINNINGS)
        dead = [
            name
            for name, about in there.items()
            if name not in kept and may_be_left(name, rank) and now - about.st_mtime > abandoned
        ]
        if dead:
            spared = needed()
            remove(folder, [name for name in dead if name not in spared])
    except TensorferryError as e:
        logger.warning("cannot look for leftovers in %s: %s", folder, e)
