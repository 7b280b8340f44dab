"""Reads of a folder in which saves may replace the checkpoint, or remove it, at any moment.

A file that has gone says nothing by itself: a save has replaced the checkpoint, then the read begins again or ends with
``SourceChanged``; somebody has removed the checkpoint, then there is none; or the system refuses. The index tells.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    SourceChanged,
    StoreRefused,
    SystemRefused,
    TensorferryError,
)
from . import commits
from .commits import Commit
from .folder import INDEX
from .objects.answers import is_forbidden
from .objects.place import ObjectPlace
from .places import AnyPlace
from .whole_files import is_file, system_code

#: How often a read begins again because a save has replaced the checkpoint meanwhile.
ATTEMPTS = 5
#: How the system says that a file has gone; an error without a number may be one.
_GONE = frozenset({None, errno.ENOENT, errno.ESTALE})

_T = TypeVar("_T")


def is_outdated(folder: AnyPlace, seen: Commit | None, error: Exception) -> bool:
    """Whether a read of the checkpoint in ``folder`` has failed because a save has replaced the checkpoint meanwhile.

    Args:
        folder: the folder; or a single file, which is never replaced by a commit
        seen: the commit of the index as it was before; ``None`` if there was none
        error: how the read has failed

    Raises:
        IncompleteCheckpoint: files are gone because the checkpoint was removed meanwhile
        TensorferryError: the system or a store does not say whether they are
    """
    refused = isinstance(error, OSError) and not isinstance(error, IncompleteCheckpoint)
    if refused and system_code(error) not in _GONE:
        return False
    now = commit_of_index(folder)
    if now is not None and now != seen:
        return True
    if refused and _is_gone(folder, seen):
        raise IncompleteCheckpoint(f"{folder} was removed while it was read: {error}") from error
    return False


def commit_of_index(folder: AnyPlace) -> Commit | None:
    """Returns the commit of the index in ``folder``; ``None`` without a valid one, or if it cannot be read.

    Raises:
        StoreRefused: the store refuses, and not for lack of a permission: what is asked next would take as long
    """
    try:
        if is_file(folder / INDEX):
            return commits.files_of(folder / INDEX)
    except TensorferryError as e:
        # Not every store answers well to a question for what is below an object.
        if (
            isinstance(e, StoreRefused)
            and not is_forbidden(e)
            and not (isinstance(folder, ObjectPlace) and folder.may_be_file)
        ):
            raise
    return None


def read_settled(read: Callable[[], _T], *folders: AnyPlace, attempts: int = ATTEMPTS, still: bool = False) -> _T:
    """Reads checkpoints; begins again if a save has replaced one of them meanwhile.

    Args:
        read: reads them; it may be called several times
        folders: their folders, one at least; or single files
        attempts: how often it is called at most
        still: the read opens the index more than once, so that what it returns counts only if none was replaced

    Raises:
        SourceChanged: saves have replaced a checkpoint during each attempt
        IncompleteCheckpoint: one was removed meanwhile
        TensorferryError: whatever ``read`` raises
    """
    changed = folders[0]
    for _ in range(attempts):
        seen = {folder: commit_of_index(folder) for folder in folders}
        try:
            found = read()
        except (IncompleteCheckpoint, CorruptCheckpoint, SystemRefused, FileNotFoundError, SourceChanged) as e:
            outdated = [folder for folder in folders if is_outdated(folder, seen[folder], e)]
            if not outdated:
                raise
        else:
            outdated = [folder for folder in folders if still and commit_of_index(folder) != seen[folder]]
            if not outdated:
                return found
        changed = outdated[0]
    raise SourceChanged(f"{changed}: a save has replaced the checkpoint while it was being read: try again")


def _is_gone(folder: AnyPlace, seen: Commit | None) -> bool:
    if seen is None:
        return isinstance(folder, Path) and not os.path.lexists(folder)
    return not is_file(folder / INDEX) or any(not is_file(folder / name) for name in seen.files)
