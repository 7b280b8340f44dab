"""Series of checkpoints: folders beside each other whose names differ in numbers only, such as ``step-100``."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from functools import partial
from pathlib import Path

from ..errors import CorruptCheckpoint, IncompleteCheckpoint, ProtocolError, TensorferryError
from . import commits, leftovers
from .folder import INDEX, Index, read_index
from .names import is_ours
from .objects.place import ObjectPlace
from .places import AnyPlace
from .whole_files import is_file, listed, remove_empty, subfolders, version_of, versions_of

logger = logging.getLogger("tensorferry")


def checkpoints(root: AnyPlace) -> list[tuple[AnyPlace, Index]]:
    """Returns the folders directly below ``root`` with the index of a checkpointer's checkpoint, the oldest first.

    Whether the files are there that an index names is not looked at. Folders whose index cannot be read are left out.

    Raises:
        SystemRefused: ``root`` cannot be listed
        TensorferryError: a store does not answer, or refuses
    """
    folders = [root / name for name in subfolders(root)]
    complete: list[tuple[AnyPlace, Index]] = []
    for folder in folders:
        try:
            complete.append((folder, read_index(folder)))
        except TensorferryError as e:
            if isinstance(folder, ObjectPlace) and commits.says_nothing(e):
                raise
    return sorted(complete, key=lambda checkpoint: (checkpoint[1].began, checkpoint[0].name))


def index_versions(root: AnyPlace) -> frozenset[tuple[object, ...]]:
    """Returns folder, inode (in a store, tag) and time of the index in each folder directly below ``root``.

    Two results differ if a checkpoint was committed or removed between them. The result is empty if a local ``root``
    cannot be listed.

    Raises:
        TensorferryError: a store does not answer, or refuses
    """
    if isinstance(root, ObjectPlace):
        names = subfolders(root)
    else:
        names = []
        with contextlib.suppress(OSError):
            names = listed(root)
    found = versions_of([root / name / INDEX for name in names])
    return frozenset((path.parent.name, *version) for path, version in found.items())


class KnownSaves:
    """The saves that a process knows of, after which a new one begins: its own, and those that it finds on the disk.

    It reads each index of a series once, and looks at every save whether another one has taken its place. So a new save
    costs a look for an index in its folder and, if that is of a series, in each of the series' folders. A store is
    asked for all of them at once, with one deadline, and for nothing more after a question that it does not answer.

    Args:
        patience: seconds that a store may take, if somebody waits for the answer; ``None`` for those of the place
    """

    def __init__(self, patience: float | None = None) -> None:
        self._patience = patience
        #: By folder, inode and time of the index that was read.
        self._seen: dict[AnyPlace, tuple[object, ...]] = {}
        self._newest = 0

    def beginnings(self, folder: AnyPlace) -> list[int]:
        """Returns when the newest of the saves began after which one into ``folder`` is to begin; it raises nothing.

        These are the save in the folder and those in the folders of its series, which is that of :func:`keep_last`, and
        all saves of this process.
        """
        if isinstance(folder, ObjectPlace):
            self._newest = max([*self._in_store(folder.begun(self._patience)), self._newest])
            return [self._newest]
        beginnings = commits.beginnings(folder / INDEX)
        series = _series(folder)
        beside: list[str] = []
        if series != folder.name:
            with contextlib.suppress(OSError):
                beside = os.listdir(folder.parent)
        for other in (folder.parent / name for name in beside if _series(Path(name)) == series):
            version = version_of(other / INDEX)
            if version is None or self._seen.get(other) == version:
                continue
            # One that cannot be read is read again for the next save.
            if found := commits.beginnings(other / INDEX):
                beginnings += found
                self._seen[other] = version
        self._newest = max([*beginnings, self._newest])
        return [self._newest]

    def _in_store(self, folder: ObjectPlace) -> list[int]:
        """As :meth:`beginnings`, without the saves that are known already."""
        found: list[int] = []
        try:
            versions = versions_of([one / INDEX for one in {folder, *_folders_in_series(folder)}])
            for index, version in versions.items():
                if self._seen.get(index.parent) == version:
                    continue
                with contextlib.suppress(CorruptCheckpoint, ProtocolError, IncompleteCheckpoint):
                    found.append(commits.files_of(index).began)
                self._seen[index.parent] = version
        except TensorferryError as e:
            logger.info("it is not known when the saves beside %s began: %s", folder, e)
        return found

    def add(self, began: int) -> None:
        """A save of this process has begun."""
        self._newest = max(self._newest, began)


def remove_checkpoint(folder: AnyPlace, index: Index) -> None:
    """Removes a checkpoint: first its index, so that a removal that is interrupted leaves no checkpoint behind.

    If another save has been committed in the folder since ``index`` was read, nothing is removed; in a store, see
    :func:`commits.remove_index`. Files of others stay, and the folder with them. What cannot be removed is logged.
    """
    try:
        is_removed = commits.remove_index(folder / INDEX, index.commit)
    except TensorferryError as e:
        logger.warning("the older checkpoint in %s is not removed: %s", folder, e)
        return
    if is_removed:
        leftovers.remove(folder, index.commit.files)
        remove_empty(folder)


def keep_last(count: int, newest: AnyPlace) -> None:
    """Removes the oldest checkpoints of a series but the last ``count``, and what killed saves and removals left of it.

    A series is the folders beside ``newest`` whose names differ from its name in numbers only, such as ``step-100`` and
    ``step-200``. A folder without a number in its name is a series of its own: what is beside it may be another job's.
    So may what a link leads to: links are no part of a series.

    The oldest are those whose saves began first. Step numbers do not decide: a job that has gone back to an earlier
    step goes on from what it saves then. Others may save into the series at the same time, such as the writer of a
    trainer that was killed: of two that remove, neither removes the newest, and none removes what began after its own.

    It raises nothing, since the checkpoint that was just saved is complete: what cannot be removed is logged.

    Args:
        count: how many stay
        newest: the folder of the checkpoint that was just saved; it stays
    """
    series = _series(newest)
    if series == newest.name:
        return
    try:
        beside = checkpoints(newest.parent)
        in_series = {
            folder: index
            for folder, index in beside
            if _series(folder) == series and not (isinstance(folder, Path) and folder.is_symlink())
        }
    except TensorferryError as e:
        logger.warning("older checkpoints are not removed: %s", e)
        return
    # The oldest first. Where the one that was just saved is older than others, it stays as one more; where another has
    # removed it meanwhile, that one has removed what is older, too.
    for folder in list(in_series)[:-count] if newest in in_series else ():
        if folder == newest:
            break
        remove_checkpoint(folder, in_series[folder])
    with contextlib.suppress(OSError, TensorferryError):
        now = (newest / INDEX).stat().st_mtime
        for folder in _folders_in_series(newest):
            if folder not in in_series:
                with contextlib.suppress(OSError, TensorferryError):
                    _remove_remains(folder, now)


def remains_beside(newest: Path) -> list[Path]:
    """Returns the other folders of the series of ``newest`` in which nothing is but files of saves without an index.

    It raises nothing: none are returned where they cannot be listed.
    """
    found = []
    with contextlib.suppress(OSError):
        for folder in _folders_in_series(newest):
            with contextlib.suppress(OSError):
                if folder != newest and isinstance(folder, Path) and _is_remains(os.listdir(folder)):
                    found.append(folder)
    return found


def _folders_in_series(newest: AnyPlace) -> list[AnyPlace]:
    """Returns the folders of the series of ``newest``, that one among them; none without a number in its name.

    Raises:
        OSError: they cannot be listed
        TensorferryError: a store does not answer, or refuses
    """
    series = _series(newest)
    if series == newest.name:
        return []
    if isinstance(newest, ObjectPlace):
        folders = [newest.parent / name for name in subfolders(newest.parent)]
        return [folder for folder in folders if _series(folder) == series]
    beside = [Path(entry.path) for entry in os.scandir(newest.parent) if entry.is_dir(follow_symlinks=False)]
    return [folder for folder in beside if _series(folder) == series]


def _series(folder: AnyPlace) -> str:
    return re.sub(r"[0-9]+", "#", folder.name)


def _remove_remains(folder: AnyPlace, now: float) -> None:
    """Removes a folder in which nothing is but files of saves that were killed."""
    if _is_remains(listed(folder)):
        leftovers.remove_leftovers(folder, now, None, set(), partial(needed, folder))
        remove_empty(folder)


def needed(folder: AnyPlace) -> set[str]:
    """Returns the names of the files that the indexes in ``folder`` name: that of all ranks, and those of single ones.

    Raises:
        TensorferryError: one cannot be read
    """
    indexes = [folder / name for name in listed(folder) if is_ours(name) and _is_index(name)]
    return {name for index in indexes if is_file(index) for name in commits.files_of(index).files}


def _is_index(name: str) -> bool:
    return name.startswith("index") and name.endswith(".safetensors")


def _is_remains(names: list[str]) -> bool:
    """Whether a folder holds nothing but files of saves, and no index, by the names in it.

    Ranks that saved with ``torch.distributed.checkpoint`` and without a coordinator have an index each.
    """
    return not any(map(_is_index, names)) and names != [] and all(is_ours(name) for name in names)
