"""The checkpoints directly below a folder, and what saves that have not finished have left there."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import IncompleteCheckpoint, TensorferryError
from ..storage import commits
from ..storage.folder import INDEX, missing_files, read_index, unfinished
from ..storage.objects.place import ObjectPlace
from ..storage.places import any_place, is_store_url
from ..storage.whole_files import is_file
from . import places
from .output import console
from .places import CheckpointKind, Place


@dataclass(frozen=True)
class Below:
    """What stands below a folder under one name.

    Attributes:
        name: of the folder or file
        kind: of the checkpoint; empty if it holds none
        saved: nanoseconds since the epoch at which the save began, or else was written
        bytes: of the file, or of all files directly in the folder
        step: the step, where it is known
        ranks: how many ranks have saved it, where that is known
        problem: why it cannot be loaded; empty if nothing is known of that
    """

    name: str
    kind: str
    saved: int
    bytes: int
    step: int | None = None
    ranks: int | None = None
    problem: str = ""

    def fields(self) -> dict[str, Any]:
        """Returns it for JSON."""
        return {**self.__dict__, "saved": self._date()}

    def row(self) -> list[object]:
        """Returns it for a table."""
        step, ranks = ("" if number is None else number for number in (self.step, self.ranks))
        return [self.name, step, console.amount(self.bytes), ranks, self._date(), self.problem or self.kind]

    def _date(self) -> str:
        try:
            return datetime.fromtimestamp(self.saved / 1e9).astimezone().isoformat(" ", "seconds")
        except (OverflowError, ValueError, OSError):  # An index may say anything.
            return ""


def checkpoints_below(text: str) -> list[Below]:
    """Returns what is directly below the folder ``text``, the newest first.

    That is nothing if it is a checkpoint itself, or none is below it. Of a folder of this machine, what cannot be read
    is left out.

    Raises:
        TensorferryError: it cannot be read
    """
    if is_store_url(text):
        return _below_in_store(text)
    folder = Path(text)
    try:
        places.settled(lambda: places.find(text), text)
        return []
    except IncompleteCheckpoint:
        if not folder.is_dir() or unfinished(folder) is not None:
            return []
    found = []
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(folder)):
            with contextlib.suppress(OSError):
                if not entry.startswith(".") and (one := _below(folder / entry)) is not None:
                    found.append(one)
    if not any(one.kind for one in found):
        return []
    return sorted(found, key=lambda one: (one.saved, one.name), reverse=True)


def _below_in_store(text: str) -> list[Below]:
    """As :func:`checkpoints_below`, for a URL: only folders are looked at."""
    folder = any_place(text)
    assert isinstance(folder, ObjectPlace)
    try:
        places.find(text)
        return []
    except IncompleteCheckpoint:
        pass
    found = []
    for name in folder.folders():
        path = folder / name
        entries = path.entries()
        nbytes = sum(about.st_size for about in entries.values())
        newest = max((about.st_mtime_ns for about in entries.values()), default=0)
        try:
            found.append(_of_folder(places.find(str(path)), name, nbytes, newest))
        except TensorferryError as e:
            if (left := unfinished(path)) is not None or places.has_signs(path):
                found.append(Below(name, "", newest, nbytes, problem=str(left or e)))
    if not any(one.kind for one in found):
        return []
    return sorted(found, key=lambda one: (one.saved, one.name), reverse=True)


def _below(path: Path) -> Below | None:
    """Returns what ``path`` is; ``None`` if it is neither a checkpoint nor what a save has left."""
    if not path.is_dir():
        if not path.name.endswith(places.FILES):
            return None
        about = path.stat()
        return Below(path.name, places.kind_of_file(path), about.st_mtime_ns, about.st_size)
    nbytes, newest = _size(path)
    try:
        place = places.find(str(path))
        return _of_folder(place, path.name, nbytes, newest)
    except TensorferryError as e:
        left = unfinished(path)
        if left is None and not places.has_signs(path):
            return None
        return Below(path.name, "", newest, nbytes, problem=str(left or e))


def _of_folder(place: Place, name: str, nbytes: int, newest: int) -> Below:
    path, kind = place.path, place.kind.value
    if place.layout is CheckpointKind.CHECKPOINT:
        index = read_index(path)
        missing = missing_files(path, index)
        problem = f"incomplete: {', '.join(missing)} is missing" if missing else ""
        return Below(name, kind, index.began, nbytes, index.step, index.world_size, problem)
    if place.layout is CheckpointKind.DISTRIBUTED:
        commit = commits.files_of(path / INDEX)
        missing = [file for file in commit.files if not is_file(path / file)]
        problem = f"incomplete: {', '.join(missing)} is missing" if missing else ""
        return Below(name, kind, commit.began or newest, nbytes, None, len(commit.files), problem)
    return Below(name, kind, newest, nbytes)


def _size(folder: Path) -> tuple[int, int]:
    """Returns how many bytes the files directly in a folder have, and when the last of them was written."""
    nbytes, newest = 0, folder.stat().st_mtime_ns
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):
            if entry.is_file():
                about = entry.stat()
                nbytes, newest = nbytes + about.st_size, max(newest, about.st_mtime_ns)
    return nbytes, newest
