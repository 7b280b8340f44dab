"""Small files that are written and read whole, and what is at a place: in folders and in stores alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .folder_store import open_at_once as open_at_once
from .places import AnyPlace
from .stores import Stat, store_of

#: The most bytes of a file that says a few things about a checkpoint.
FEW = 1 << 20
#: The most bytes of an index that torch has pickled.
INDEX_BYTES = 1 << 30
#: How the engine writes the number of an error of the system into its message.
_CODE = re.compile(r"\(os error (\d{1,6})\)")


def is_file(path: AnyPlace) -> bool:
    """Whether ``path`` is a file, or an object in a store.

    Raises:
        SystemRefused: the system does not say, for example because a folder above it may not be entered
        TensorferryError: the store does not answer, or refuses
    """
    return store_of(path.parent).stat(path.name) is not None


def system_code(error: BaseException) -> int | None:
    """Returns the number of the system's error that ``error`` reports, one of ``errno``; ``None`` if it names none.

    The engine has it in the message only.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _CODE.search(str(error))
    return None if found is None else int(found[1])


def read_whole(path: AnyPlace, most: int | None) -> bytes:
    """Returns the content of a file that has at most ``most`` bytes; with ``None``, as many as there is memory for.

    A file may be sparse: its length says nothing about the disk, and all of it takes memory.

    Raises:
        OSError: it cannot be read
        ProtocolError: it is longer, grows or shrinks meanwhile, or is not a regular file
        SystemRefused: it is longer than the memory that this process can have
        TensorferryError: an object cannot be read
    """
    return store_of(path.parent).read(path.name, most)


def write_whole(
    path: AnyPlace, data: bytes, partial: AnyPlace, *, synced: bool = True, modified_ns: int | None = None
) -> None:
    """Writes ``data`` to ``partial`` and renames that to ``path``: readers find either all of it or what was there.

    An object is put there in one step, and the other arguments do not count.

    Args:
        path: the file
        data: its content
        partial: its name while it is being written, in the same folder; a file or link of that name is replaced
        synced: waits until the content is on the disk before the rename; the rename itself may still be lost
        modified_ns: sets its time of modification, in nanoseconds

    Raises:
        OSError: it cannot be written; what ``path`` was is still there, and ``partial`` is removed
        TensorferryError: a store does not answer, or refuses; the object may be written then
    """
    store_of(path.parent).write(path.name, data, partial.name, synced=synced, modified_ns=modified_ns)


def listed(folder: AnyPlace, *beginnings: str) -> list[str]:
    """Returns the names in ``folder``; in a store, those of the objects that begin with one of ``beginnings``, if any.

    Raises:
        SystemRefused: it cannot be listed
        TensorferryError: the store does not answer, or refuses
    """
    return sorted(store_of(folder).entries(*beginnings))


def missing(folder: AnyPlace, names: Sequence[str]) -> list[str]:
    """Returns which of the files ``names`` are not in ``folder``.

    Raises:
        SystemRefused: the system does not say what is
        TensorferryError: a store does not answer, or refuses
    """
    store = store_of(folder)
    if isinstance(folder, Path):
        # The folder may be gone by now, and what lies under a name may be no file.
        return [name for name in names if store.stat(name) is None]
    there = store.entries("rank")
    return [name for name in names if name not in there]


def version_of(about: Stat) -> tuple[object, ...]:
    """Returns what differs once a file or object has been replaced."""
    return getattr(about, "tag", None), getattr(about, "st_ino", None), about.st_mtime_ns


def subfolders(folder: AnyPlace) -> list[str]:
    """Returns the names of the folders directly in ``folder``; links to folders are among them.

    Raises:
        SystemRefused: it cannot be listed
        TensorferryError: the store does not answer, or refuses
    """
    return store_of(folder).subfolders()


def remove_empty(folder: AnyPlace) -> None:
    """Removes a folder if nothing is in it; a store has no folders."""
    store_of(folder).remove_if_empty()


def sync_folder(folder: AnyPlace) -> None:
    """Syncs the entries of ``folder`` to the disk, where the file system can sync folders at all.

    In a store, what was written is safe already.

    Raises:
        OSError: the system refuses
    """
    store_of(folder).sync()


def create_folder(folder: AnyPlace) -> bool:
    """Creates the folder and its missing parents, and syncs their directory entries to the disk.

    A store has no folders, and nothing is created there.

    Returns:
        Whether the folder was not there before.

    Raises:
        SystemRefused: it cannot be created or synchronised
    """
    return store_of(folder).create()
