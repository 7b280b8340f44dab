"""The removal of files that are no longer needed; ``commits.py`` has the rules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from ..errors import TensorferryError
from .names import BEGINNINGS, may_be_left
from .places import AnyPlace
from .stores import Stat, store_of

logger = logging.getLogger("tensorferry")

#: Seconds without a write after which the writer of a file counts as dead, wherever it ran.
_ABANDONED_S = 24 * 3600.0


def remove(folder: AnyPlace, names: Iterable[str]) -> None:
    """Removes files that are no longer needed; logs those that cannot be removed.

    A link is removed, and what it leads to stays.
    """
    try:
        store_of(folder).remove(names)
    except TensorferryError as e:
        # Only a warning: the new checkpoint is complete all the same.
        logger.warning("cannot remove what is no longer needed: %s", e)


def remove_leftovers(
    folder: AnyPlace,
    now: float,
    kept: set[str],
    needed: Callable[[], set[str]],
    listed: Mapping[str, Stat] | None = None,
) -> None:
    """Removes the files that killed saves have left; logs what is in the way, and raises nothing.

    Args:
        folder: the checkpoint folder
        now: the current time in seconds, by the clock of the file system or the store
        kept: names of files that are not removed
        needed: returns the names of the files that the current index names; called for each batch of candidates, with
            these locked. If it raises a :class:`TensorferryError`, they stay
        listed: what was in the folder, if it was just listed
    """
    store = store_of(folder)
    try:
        there = store.entries(*BEGINNINGS) if listed is None else listed
        left = {name: about for name, about in there.items() if name not in kept and may_be_left(name)}
        store.remove_dead(left, now, _ABANDONED_S, needed)
    except TensorferryError as e:
        logger.warning("what killed saves have left in %s is not removed: %s", folder, e)
