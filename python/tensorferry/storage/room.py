"""A disk that is full: a save that fails for it removes what killed saves have left, so that the next one has room.

Otherwise leftovers go only after a commit (``commits.py``), which a full disk does not see any more.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..errors import SystemRefused, TensorferryError, message_of
from . import leftovers, series
from .names import may_be_left
from .places import AnyPlace
from .whole_files import system_code

#: How the system says that there is no room: on the disk, or for this user.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextlib.contextmanager
def making_room(folder: AnyPlace, *, in_series: bool = False) -> Iterator[None]:
    """If the block fails because the disk is full, removes what killed saves have left, and says so in the error.

    Only files whose writers are dead go, by the rules of ``leftovers.py``, and none that an index names. Other errors,
    and those of a save into a store, pass unchanged.

    Args:
        folder: the folder of the save
        in_series: whether the save removes older checkpoints of its series; then what was left of others goes, too

    Raises:
        SystemRefused: the disk is full; with the number of the system's error, how many bytes were removed, and where
            there are more that may not be removed
    """
    try:
        yield
    except SystemRefused as e:
        code = system_code(e)
        if code not in _FULL or not isinstance(folder, Path):
            raise
        told = message_of(e) if e.strerror is None else e.strerror
        raise SystemRefused(code, f"{told}{_removed(folder, in_series=in_series)}") from e


def _removed(folder: Path, *, in_series: bool) -> str:
    """Removes leftovers; returns what a message says of that."""
    freed = 0
    left: dict[Path, int] = {}
    for one in (folder, *series.remains_beside(folder)):
        with contextlib.suppress(OSError, TensorferryError):
            if one == folder or in_series:
                # By the clock of the file system. It is that of the failed save or earlier: then less counts as dead.
                freed += leftovers.remove_leftovers(one, _now(folder), None, set(), partial(series.needed, one))
            if (nbytes := _leftover_bytes(one)) > 0:
                left[one] = nbytes
            elif one != folder and in_series:
                one.rmdir()
    text = f". {freed} bytes that killed saves had left were removed: save again" if freed else ""
    if left:
        text += (
            f". {sum(left.values())} bytes are taken by saves that have not finished, this one among them, in "
            f"{', '.join(map(str, left))}: if files of theirs are left when no save is running, remove them"
        )
    return text


def _now(folder: Path) -> float:
    """Returns the time of the last change of ``folder``, in which a save has just tried to make a file."""
    return (folder if folder.exists() else folder.parent).stat().st_mtime


def _leftover_bytes(folder: Path) -> int:
    """Returns how many bytes the files of saves in ``folder`` take that no index names."""
    needed = series.needed(folder)
    left = [
        entry.stat(follow_symlinks=False).st_blocks * leftovers.BLOCK
        for entry in os.scandir(folder)
        if may_be_left(entry.name, None) and entry.name not in needed
    ]
    return sum(left)
