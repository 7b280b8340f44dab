"""Which saves into stores are alive on this machine: each holds the lock of a file in a folder for temporary files.

A store has no locks. A save that was killed cannot be told from one at work by what is in the store, unless it ran
here: then the lock of its file tells. The ids of saves begin with digits for the machine and that folder, so that
nobody who sees another folder, as in another container, judges by this one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..names import machine

_RANDOM_DIGITS = 12


@functools.cache
def _folder() -> Path | None:
    """Returns the folder of the locks; ``None`` if there is none that only this user may write to."""
    folder = Path(tempfile.gettempdir()) / f"tensorferry-saves-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        about = folder.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
    return folder if private else None


@functools.cache
def home() -> str:
    """Returns 8 hexadecimal digits that identify the locks: those of the running kernel, in this folder."""
    folder = _folder()
    if folder is None:
        return secrets.token_hex(4)
    about = folder.lstat()
    return hashlib.sha256(f"{machine()} {about.st_dev} {about.st_ino}".encode()).hexdigest()[:8]


def new_id() -> str:
    """Returns a new unique id for the names of one save: 8 digits of :func:`home` and 12 random ones."""
    return home() + secrets.token_hex(_RANDOM_DIGITS // 2)


class Alive:
    """While it is open, the save ``id`` counts as alive. Several of one save may be open, in any processes here.

    It does nothing for a save of another machine, or where no folder for locks can be had.

    Args:
        id: the id of the save
    """

    def __init__(self, id: str) -> None:  # noqa: A002 - as everywhere
        self._path: Path | None = None
        self._file = -1
        folder = _folder()
        if folder is None or not id.startswith(home()):
            return
        path = folder / id
        with contextlib.suppress(OSError):
            while True:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                fcntl.flock(file, fcntl.LOCK_SH)
                if _is(file, path):
                    break
                # Somebody has found it without a lock, and removed it, just before.
                os.close(file)
            self._path, self._file = path, file

    def close(self) -> None:
        """The save is over, or this part of it."""
        file, self._file = self._file, -1
        if file < 0 or self._path is None:
            return
        with contextlib.suppress(OSError):
            # The last one removes the file.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink()
        os.close(file)

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def holding(ids: Iterable[str]) -> Iterator[None]:
    """While the block runs, nobody here takes these saves for dead."""
    held = [Alive(one) for one in sorted(set(ids))]
    try:
        yield
    finally:
        for one in held:
            one.close()


def is_dead(id: str, stack: contextlib.ExitStack) -> bool | None:  # noqa: A002
    """Whether the save ``id`` is dead; ``None`` if that cannot be known here. It stays so until ``stack`` is closed."""
    folder = _folder()
    if folder is None or not id.startswith(home()):
        return None
    path = folder / id
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    stack.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    if not _is(file, path):
        return None
    stack.callback(_remove, path)
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _is(file: int, path: Path) -> bool:
    """Whether an opened file is still the one at ``path``."""
    try:
        there = path.lstat()
    except OSError:
        return False
    mine = os.fstat(file)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
