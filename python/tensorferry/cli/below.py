"""The checkpoints directly below a folder, and what saves that have not finished have left there."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .._validate import readable
from ..errors import IncompleteCheckpoint, TensorferryError
from ..storage import commits
from ..storage.folder import INDEX, missing_files, read_index, unfinished
from ..storage.objects.place import ObjectPlace
from ..storage.places import AnyPlace, any_place, is_store_url
from ..storage.whole_files import is_file
from . import places
from .places import CheckpointKind


@dataclass(frozen=True)
class Below:
    """What stands below a folder under one name.

    Attributes:
        name: of the folder or file
        bytes: of the file, or of all files directly in the folder
        saved: nanoseconds since the epoch at which the save began, or else was written
        kind: of the checkpoint; empty if it holds none
        step: the step, where it is known
        ranks: how many ranks have saved it, where that is known
        problem: why it cannot be loaded; empty if nothing is known of that
    """

    name: str
    bytes: int
    saved: int
    kind: str = ""
    step: int | None = None
    ranks: int | None = None
    problem: str = ""

    def fields(self) -> dict[str, Any]:
        """Returns it for JSON."""
        return {**self.__dict__, "saved": self._date()}

    def row(self) -> list[object]:
        """Returns it for a table."""
        step, ranks = ("" if number is None else number for number in (self.step, self.ranks))
        return [self.name, step, readable(self.bytes), ranks, self._date(), self.problem or self.kind]

    def _date(self) -> str:
        try:
            return datetime.fromtimestamp(self.saved / 1e9).astimezone().isoformat(" ", "seconds")
        except (OverflowError, ValueError, OSError):  # An index may say anything.
            return ""


def checkpoints_below(text: str) -> list[Below]:
    """Returns what is directly below the folder ``text``, the newest first.

    That is nothing if it is a checkpoint itself, or none is below it. Of a folder of this machine, what cannot be read
    is left out; in a store, only folders are looked at.

    Raises:
        TensorferryError: it cannot be read
    """
    folder = any_place(text) if is_store_url(text) else Path(text)
    try:
        places.settled(lambda: places.find(text), text)
        return []
    except IncompleteCheckpoint:
        if isinstance(folder, Path) and (not folder.is_dir() or unfinished(folder) is not None):
            return []
    found = []
    if isinstance(folder, ObjectPlace):
        for name in folder.folders():
            entries = (folder / name).entries().values()
            newest = max((about.st_mtime_ns for about in entries), default=0)
            found.append(_below(folder / name, sum(about.st_size for about in entries), newest))
    else:
        with contextlib.suppress(OSError):
            for entry in sorted(os.listdir(folder)):
                path = folder / entry
                if not entry.startswith(".") and (path.is_dir() or path.name.endswith(places.FILES)):
                    with contextlib.suppress(OSError):
                        found.append(_below(path, *_size(path)))
    listed = [one for one in found if one is not None]
    if not any(one.kind for one in listed):
        return []
    return sorted(listed, key=lambda one: (one.saved, one.name), reverse=True)


def _below(path: AnyPlace, nbytes: int, newest: int) -> Below | None:
    """Returns what ``path`` is; ``None`` if it is neither a checkpoint nor what a save has left."""
    try:
        place = places.find(str(path))
        kind = place.kind.value
        if place.layout is CheckpointKind.CHECKPOINT:
            index = read_index(path)
            missing, began, ranks = missing_files(path, index), index.began, index.world_size
        elif place.layout is CheckpointKind.DISTRIBUTED:
            commit = commits.files_of(path / INDEX)
            missing = [file for file in commit.files if not is_file(path / file)]
            began, ranks = commit.began or newest, len(commit.files)
        else:
            return Below(path.name, nbytes, newest, kind)
    except TensorferryError as e:
        if isinstance(path, Path) and path.is_file():
            return Below(path.name, nbytes, newest)
        left = unfinished(path)
        if left is None and not places.has_signs(path):
            return None
        return Below(path.name, nbytes, newest, problem=str(left or e))
    step = index.step if place.layout is CheckpointKind.CHECKPOINT else None
    problem = f"incomplete: {', '.join(missing)} is missing" if missing else ""
    return Below(path.name, nbytes, began, kind, step, ranks, problem)


def _size(path: Path) -> tuple[int, int]:
    """Returns how many bytes a file has, or the files directly in a folder, and when the last of them was written."""
    about = path.stat()
    if not path.is_dir():
        return about.st_size, about.st_mtime_ns
    files = [about]
    for entry in os.scandir(path):
        with contextlib.suppress(OSError):
            if entry.is_file():
                files.append(entry.stat())
    return sum(one.st_size for one in files[1:]), max(one.st_mtime_ns for one in files)
