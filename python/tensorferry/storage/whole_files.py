"""Small files that are written and read whole; what is at a place; folders that are made and synced."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from .._native import _check_machine_has
from ..errors import ProtocolError, SystemRefused, TensorferryError
from .objects.place import ObjectPlace, ObjectStat
from .places import AnyPlace

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
    if isinstance(path, ObjectPlace):
        return path.is_file()
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        raise SystemRefused(e.errno, f"{path} cannot be examined: {e.strerror}") from e


def system_code(error: BaseException) -> int | None:
    """Returns the number of the system's error that ``error`` reports, one of ``errno``; ``None`` if it names none.

    The engine has it in the message only.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _CODE.search(str(error))
    return None if found is None else int(found[1])


def open_at_once(path: str | os.PathLike[str], buffering: int = -1) -> IO[bytes]:
    """Opens a file to be read, as ``open`` does, without waiting for the other end of a pipe in its place.

    Raises:
        OSError: it cannot be opened, or is a folder
    """
    return open(path, "rb", buffering, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_whole(path: AnyPlace, most: int | None) -> bytes:
    """Returns the content of a file that has at most ``most`` bytes; with ``None``, as many as there is memory for.

    A file may be sparse: its length says nothing about the disk, and all of it takes memory.

    Raises:
        OSError: it cannot be read
        ProtocolError: it is longer, grows or shrinks meanwhile, or is not a regular file
        SystemRefused: it is longer than the memory that this process can have
        TensorferryError: an object cannot be read
    """
    if isinstance(path, ObjectPlace):
        opened = path.opened()
        _check_machine_has(opened.nbytes, str(path))
        return opened.whole(opened.nbytes if most is None else most)
    with open_at_once(path) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ProtocolError(f"{path} is not a regular file")
        if most is None or about.st_size <= most:
            _check_machine_has(about.st_size, str(path))
            # One more, should it grow meanwhile.
            data = file.read(about.st_size + 1)
            if len(data) == about.st_size:
                return data
            raise ProtocolError(f"{path} {'grew' if len(data) > about.st_size else 'was cut off'} while it was read")
    raise ProtocolError(f"{path} has {about.st_size} bytes, and such a file has at most {most}: it is damaged")


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
    if isinstance(path, ObjectPlace):
        path.write_bytes(data)
        return
    assert isinstance(partial, Path)
    partial.unlink(missing_ok=True)
    try:
        # Exclusively: what a link of that name leads to is not written.
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            if modified_ns is not None:
                os.utime(partial, ns=(modified_ns, modified_ns))
            if synced:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def listed(folder: AnyPlace, *beginnings: str) -> list[str]:
    """Returns the names in ``folder``; in a store, those of the objects that begin with one of ``beginnings``, if any.

    Raises:
        SystemRefused: it cannot be listed
        TensorferryError: the store does not answer, or refuses
    """
    if isinstance(folder, ObjectPlace):
        return sorted(folder.entries(*beginnings))
    try:
        return os.listdir(folder)
    except OSError as e:
        raise SystemRefused(e.errno, f"the folder {folder} cannot be listed: {e.strerror}") from e


def missing(folder: AnyPlace, names: Sequence[str]) -> list[str]:
    """Returns which of the files ``names`` are not in ``folder``.

    A store is asked for each of them: what it lists may be some seconds behind.

    Raises:
        SystemRefused: the system does not say whether one is
        TensorferryError: a store does not answer, or refuses
    """
    if isinstance(folder, ObjectPlace):
        there = ObjectPlace.stats([folder / name for name in names])
        return [name for name in names if folder / name not in there]
    return [name for name in names if not is_file(folder / name)]


def version_of(path: AnyPlace) -> tuple[object, ...] | None:
    """Returns what differs once a file or object has been replaced; ``None`` if there is none, or it cannot be seen."""
    try:
        about = path.stat()
    except (OSError, TensorferryError):
        return None
    return _version(about)


def versions_of(paths: Sequence[AnyPlace]) -> dict[AnyPlace, tuple[object, ...]]:
    """Returns :func:`version_of` of those of ``paths`` that are there; a store is asked for several at once.

    Places in stores are of one bucket.

    Raises:
        TensorferryError: a store does not answer, or refuses
    """
    stored = ObjectPlace.stats([path for path in paths if isinstance(path, ObjectPlace)])
    found: dict[AnyPlace, tuple[object, ...]] = {path: _version(about) for path, about in stored.items()}
    for path in paths:
        if isinstance(path, Path) and (version := version_of(path)) is not None:
            found[path] = version
    return found


def _version(about: os.stat_result | ObjectStat) -> tuple[object, ...]:
    return (about.tag, about.st_mtime_ns) if isinstance(about, ObjectStat) else (about.st_ino, about.st_mtime_ns)


def subfolders(folder: AnyPlace) -> list[str]:
    """Returns the names of the folders directly in ``folder``; links to folders are among them.

    Raises:
        SystemRefused: it cannot be listed
        TensorferryError: the store does not answer, or refuses
    """
    if isinstance(folder, ObjectPlace):
        return sorted(folder.folders())
    return [name for name in listed(folder) if os.path.isdir(folder / name)]


def remove_empty(folder: AnyPlace) -> None:
    """Removes a folder if nothing is in it; a store has no folders."""
    if isinstance(folder, Path):
        with contextlib.suppress(OSError):
            folder.rmdir()


def sync_folder(folder: AnyPlace) -> None:
    """Syncs the entries of ``folder`` to the disk, where the file system can sync folders at all.

    In a store, what was written is safe already.

    Raises:
        OSError: the system refuses
    """
    if isinstance(folder, ObjectPlace):
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    except OSError as e:
        # Some file systems of FUSE and of other machines have no such thing.
        if e.errno != errno.EINVAL:
            raise
    finally:
        os.close(opened)


def create_folder(folder: AnyPlace) -> bool:
    """Creates the folder and its missing parents, and syncs their directory entries to the disk.

    A store has no folders, and nothing is created there.

    Returns:
        Whether the folder was not there before.

    Raises:
        SystemRefused: it cannot be created or synchronised
    """
    if isinstance(folder, ObjectPlace):
        return False
    missing = []
    what = "created"
    try:
        for level in (folder, *folder.parents):
            if level.is_dir():
                break
            missing.append(level)
        folder.mkdir(parents=True, exist_ok=True)
        what = "synchronised"
        for level in reversed(missing):
            sync_folder(level.parent)
    except OSError as e:
        raise SystemRefused(e.errno, f"the folder {folder} cannot be {what}: {e.strerror}") from e
    return bool(missing)
