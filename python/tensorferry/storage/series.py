"""The checkpoints of checkpointers in the folders directly below one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ..errors import SystemRefused, TensorferryError
from . import commits
from .folder import INDEX, Index, read_index
from .places import AnyPlace
from .stores import store_of
from .whole_files import subfolders, version_of

#: How many requests are made to a store at a time, by threads.
_AT_ONCE = 32

_T = TypeVar("_T")


def at_once(places: Sequence[AnyPlace], work: Callable[[AnyPlace], _T]) -> list[_T]:
    """Calls ``work`` with each place; with several at a time in a store, which is slow to answer."""
    if len(places) < 2 or isinstance(places[0], Path):
        return [work(place) for place in places]
    with ThreadPoolExecutor(min(_AT_ONCE, len(places)), "tensorferry-look") as pool:
        return list(pool.map(work, places))


def index_versions(folders: Sequence[AnyPlace]) -> dict[AnyPlace, tuple[object, ...]]:
    """Returns those of ``folders`` that have an index, with what differs once another one has taken its place.

    Raises:
        TensorferryError: a store does not answer, or refuses
    """

    def version(folder: AnyPlace) -> tuple[object, ...] | None:
        try:
            about = store_of(folder).stat(INDEX)
        except SystemRefused:  # It may not be entered.
            return None
        return None if about is None else version_of(about)

    versions = zip(folders, at_once(folders, version), strict=True)
    return {folder: found for folder, found in versions if found is not None}


def read_indexes(folders: Iterable[AnyPlace], read: Callable[[AnyPlace], _T]) -> list[tuple[AnyPlace, _T]]:
    """Reads the index in each of ``folders`` with ``read``; those that cannot be read are left out.

    Raises:
        TensorferryError: a store does not answer, or refuses
    """

    def read_one(folder: AnyPlace) -> list[tuple[AnyPlace, _T]]:
        try:
            return [(folder, read(folder))]
        except TensorferryError as e:
            if store_of(folder).may_be_late and commits.says_nothing(e):
                raise
            return []

    return [one for found in at_once(list(folders), read_one) for one in found]


def checkpoints(root: AnyPlace) -> list[tuple[AnyPlace, Index]]:
    """Returns the folders directly below ``root`` with the index of a checkpointer's checkpoint, the oldest first.

    Whether the files are there that an index names is not looked at. Folders whose index cannot be read are left out.

    Raises:
        SystemRefused: ``root`` cannot be listed
        TensorferryError: a store does not answer, or refuses
    """
    found = read_indexes(index_versions([root / name for name in subfolders(root)]), read_index)
    return sorted(found, key=lambda checkpoint: (checkpoint[1].began, checkpoint[0].name))
