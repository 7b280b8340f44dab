"""What killed saves have left in a store, and its removal; ``commits.py`` has the rules.

An object whose writer ran on this machine is left if that writer is dead (``writers.py``); any other one a day after it
was written, by the clock of the store. The parts of uploads that were not completed are for a lifecycle rule of the
bucket.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator

from ...errors import IncompleteCheckpoint, TensorferryError
from ..names import may_be_left, writer_of
from . import writers
from .place import ObjectPlace

logger = logging.getLogger("tensorferry")


@contextlib.contextmanager
def holding(folder: ObjectPlace, names: Iterable[str]) -> Iterator[None]:
    """While the block runs, keeps other saves of this machine from removing these objects.

    Raises:
        IncompleteCheckpoint: one of them is gone
        TensorferryError: the store does not answer, or refuses
    """
    names = sorted(names)
    with writers.holding(map(writer_of, names)):
        there = folder.entries() if names else {}
        for name in names:
            if name not in there:
                raise IncompleteCheckpoint(
                    f"{folder}: {name}, which this save has written, was removed by another process"
                )
        yield


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
        needed: returns the names of those that the current index names; called once no writer of a candidate is alive
        abandoned: seconds after which the writer of an object counts as dead, wherever it ran
    """
    try:
        there = folder.entries()
    except TensorferryError as e:
        logger.warning("cannot look for leftovers in %s: %s", folder, e)
        return
    left = {name: about for name, about in there.items() if name not in kept and may_be_left(name, rank)}
    with contextlib.ExitStack() as stack:
        known: dict[str, bool | None] = {}

        def is_dead(name: str, written: float) -> bool:
            id_ = writer_of(name)
            if id_ not in known:
                known[id_] = writers.is_dead(id_, stack)
            return now - written > abandoned if known[id_] is None else bool(known[id_])

        dead = [name for name, about in left.items() if is_dead(name, about.st_mtime)]
        if not dead:
            return
        try:
            # Read only now: a writer that has ended may have written its index just before.
            spared = needed()
        except TensorferryError as e:
            logger.warning("the objects that killed saves have left in %s are not removed: %s", folder, e)
            return
        remove(folder, [name for name in dead if name not in spared])
