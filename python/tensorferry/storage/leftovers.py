"""Which files of a checkpoint folder can be removed, and their removal; ``commits.py`` has the rules."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..errors import IncompleteCheckpoint, SystemRefused, TensorferryError
from .folder_lock import lock
from .names import machine, may_be_left, parts_of_name, writer_of
from .objects.place import ObjectPlace
from .places import AnyPlace
from .whole_files import is_file

logger = logging.getLogger("tensorferry")

#: Seconds since the last write within which a writer may still be about to lock its file.
_GRACE_S = 60.0
#: Seconds without a write after which the writer of a file counts as dead, wherever it ran.
_ABANDONED_S = 24 * 3600.0
#: How many files are locked at a time.
_BATCH = 64


@contextlib.contextmanager
def holding(folder: AnyPlace, names: Iterable[str]) -> Iterator[None]:
    """While the block runs, keeps other saves from removing these files, even if their writer is dead already.

    It locks those of the files that were written on this machine; of one that another save is about to remove, it waits
    to see whether it goes.

    Args:
        folder: the folder of the files
        names: their names

    Raises:
        IncompleteCheckpoint: one of the files is gone
        SystemRefused: the system does not say whether it is, or another process keeps a file locked
        TensorferryError: a store does not answer, or refuses
    """
    if isinstance(folder, ObjectPlace):
        from .objects import leftovers as in_store

        in_store.check(folder, names)
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in sorted(names):
            found = parts_of_name(name)
            if found and (found["id"] or "").startswith(machine()):
                _hold(folder / name, stack)
        for name in sorted(names):
            if not is_file(folder / name):
                raise IncompleteCheckpoint(
                    f"{folder}: {name}, which this save has written, was removed by another process"
                )
        yield


def _hold(path: Path, stack: contextlib.ExitStack) -> None:
    """Locks a file until ``stack`` is closed; one that is gone, or a link, which nobody takes for left, is not."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ELOOP):
            return
        raise SystemRefused(e.errno, f"{path} cannot be opened: {e.strerror}") from e
    stack.callback(os.close, file)
    lock(file, fcntl.LOCK_SH, str(path), "it removes what killed saves have left")


def remove(folder: AnyPlace, names: Iterable[str]) -> None:
    """Removes files that are no longer needed; logs those that cannot be removed.

    A link is removed, and what it leads to stays.
    """
    if isinstance(folder, ObjectPlace):
        from .objects import leftovers as in_store

        in_store.remove(folder, names)
        return
    for name in names:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as e:
            # Only a warning: the new checkpoint is complete all the same.
            logger.warning("cannot remove %s, which is no longer needed: %s", folder / name, e)


def remove_leftovers(
    folder: AnyPlace, now: float, rank: int | None, kept: set[str], needed: Callable[[], set[str]]
) -> None:
    """Removes the files that killed saves have left; logs what is in the way, and raises nothing.

    Args:
        folder: the checkpoint folder
        now: the current time in seconds, by the clock of the file system
        rank: removes files of this rank only, where ranks save without a coordinator; ``None`` removes those of all
        kept: names of files that are not removed
        needed: returns the names of the files that the current index names; called for each batch of candidates, with
            these locked. If it raises a :class:`TensorferryError`, they stay
    """
    if isinstance(folder, ObjectPlace):
        from .objects import leftovers as in_store

        in_store.remove_leftovers(folder, now, rank, kept, needed, _ABANDONED_S)
        return
    try:
        entries = sorted(os.listdir(folder))
    except OSError as e:
        logger.warning("cannot look for leftovers in %s: %s", folder, e)
        return
    left = [name for name in entries if name not in kept and may_be_left(name, rank)]
    for first in range(0, len(left), _BATCH):
        with contextlib.ExitStack() as stack:
            dead = [name for name in left[first : first + _BATCH] if _is_dead(folder / name, now, stack)]
            if not dead:
                continue
            try:
                # Read only after locking: a writer that has released its locks may have written its index just before.
                spared = needed()
            except TensorferryError as e:
                logger.warning("the files that killed saves have left in %s are not removed: %s", folder, e)
                return
            remove(folder, [name for name in dead if name not in spared])


def _is_dead(path: Path, now: float, stack: contextlib.ExitStack) -> bool:
    """Whether the file's writer is dead. The file stays locked until ``stack`` is closed."""
    try:
        about = path.lstat()
        age = now - about.st_mtime
        if not stat.S_ISREG(about.st_mode) or age < _GRACE_S:
            return False
        # Opened for writing, because NFS grants an exclusive lock only then.
        file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    stack.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return e.errno not in (errno.EWOULDBLOCK, errno.EACCES) and age > _ABANDONED_S
    return writer_of(path.name).startswith(machine()) or age > _ABANDONED_S
