"""Where a keeper and its clients meet: the folder of its socket, and the lock that makes a name unique on a node.

The folder belongs to one user and lets nobody else in. The lock is held for as long as the keeper lives, so the system
releases it however the keeper ends, and a socket without a locked file beside it is a leftover.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from pathlib import Path

from ... import _validate
from ..._settings import KEEPER_DIR, setting
from ...errors import InvalidArgument, SystemRefused

#: The keeper that is meant where no name is given.
DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
#: The longest path of a socket that the system takes.
_LONGEST = 107


def keeper_name(name: str) -> str:
    """Returns ``name`` after checking that a keeper can have it.

    Raises:
        InvalidArgument: it cannot
    """
    if not _NAME.fullmatch(_validate.string("name", name)):
        raise InvalidArgument(
            f"name must be 1 to 64 letters, digits, '.', '_' or '-', and not begin with '.' or '-'; it is "
            f"{_validate.brief(name)}"
        )
    return name


def folders() -> list[Path]:
    """Returns the folders in which sockets of keepers may lie, the one that a new keeper takes first.

    It is the one that ``TENSORFERRY_KEEPER_DIR`` names, alone, if that is set. Otherwise the user's own
    ``$XDG_RUNTIME_DIR/tensorferry``, which a service or a container may not have, and ``/tmp/tensorferry-<uid>``.
    """
    if chosen := setting(KEEPER_DIR):
        return [Path(chosen).absolute()]
    session = os.environ.get("XDG_RUNTIME_DIR")
    at_session = [Path(session, "tensorferry")] if session and Path(session).is_dir() else []
    return [*at_session, Path(f"/tmp/tensorferry-{os.geteuid()}")]


def find_socket(name: str) -> Path | None:
    """Returns the socket of the keeper called ``name``, ``None`` if there is none. It may be a leftover.

    Raises:
        SystemRefused: a folder in which it may lie is not this user's alone, or cannot be examined
    """
    for folder in folders():
        path = folder / _socket(name)
        try:
            is_there = path.exists()
        except OSError as e:
            _check_private(folder)
            raise SystemRefused(f"{path} cannot be examined: {e}") from e
        if is_there:
            _check_private(folder)
            return path
    return None


class SocketPlace:
    """The socket's path and the lock of a keeper that runs in this process.

    Args:
        name: the keeper's name

    Attributes:
        socket: where to listen; nothing is there

    Raises:
        SystemRefused: a keeper with this name runs on this node, or the folder is not this user's alone or cannot be
            made
        InvalidArgument: the path is too long for a socket
        OSError: a file in the folder cannot be written
    """

    def __init__(self, name: str) -> None:
        folder = folders()[0]
        self.socket = folder / _socket(name)
        self._lock = folder / f"keeper-{name}.lock"
        if len(os.fsencode(self.socket)) > _LONGEST:
            raise InvalidArgument(
                f"{self.socket} is too long for a socket, which may have {_LONGEST} bytes: choose another folder with "
                f"{KEEPER_DIR}"
            )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise SystemRefused(f"no folder for the keeper's socket: {e}. Choose one with {KEEPER_DIR}") from e
        _check_private(folder)
        self._file = _locked(self._lock, name)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        # Nobody else has the lock: what lies there was left by a keeper that was killed.
        self.socket.unlink(missing_ok=True)

    def leave(self) -> None:
        """Removes the socket and releases the name. Calling it again does nothing."""
        if self._file < 0:
            return
        for path in (self.socket, self._lock):
            with contextlib.suppress(OSError):
                path.unlink()
        os.close(self._file)
        self._file = -1


def _socket(name: str) -> str:
    return f"keeper-{name}.sock"


def _locked(path: Path, name: str) -> int:
    """Returns the open file ``path``, which this process alone has locked."""
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise SystemRefused(f"{path} cannot be opened: {e}") from e
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            text = os.pread(file, 20, 0).decode(errors="replace").strip()
            os.close(file)
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise SystemRefused(f"{path} cannot be locked: {e}") from e
            who = f", process {text}" if text.isdigit() else ""
            raise SystemRefused(
                f"a keeper called {name!r} runs already{who}: use it, end it, or choose another --name"
            ) from None
        # The keeper before may have removed the file between open and lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        os.close(file)


def _check_private(folder: Path) -> None:
    """Checks that nobody but this user can reach what lies in ``folder``."""
    try:
        found = os.lstat(folder)
    except OSError as e:
        raise SystemRefused(f"{folder} cannot be examined: {e}") from e
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SystemRefused(
            f"{folder} must be a folder of this user that nobody else can enter (mode 0700): sockets of keepers lie in "
            f"it. Set {KEEPER_DIR} to a folder of its own below one of yours, which the keeper makes"
        )
