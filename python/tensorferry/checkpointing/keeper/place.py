"""Where a keeper and its clients meet: the folder of its socket, the lock that makes a name unique, and connections.

The folder belongs to one user and lets nobody else in. The lock is held for as long as the keeper lives, so the system
releases it however the keeper ends, and a socket without a locked file beside it is a leftover.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
import weakref
from pathlib import Path

from ... import _validate
from ..._settings import KEEPER_DIR, setting
from ...errors import ConnectError, InvalidArgument, SystemRefused

#: The keeper that is meant where no name is given.
DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
#: The longest path of a socket that the system takes.
_LONGEST = 107
#: Seconds that the keeper has to take an offer, which holds the trainer up: it does at once unless it is stopped.
OFFER_S = 2.0


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
        with contextlib.suppress(FileNotFoundError):
            _check_private(folder)
            if (path := folder / _socket(name)).exists():
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
        self._file = _locked(folder / f"keeper-{name}.lock", name)
        # Nobody else has the lock: what lies there was left by a keeper that was killed.
        self.socket.unlink(missing_ok=True)

    def leave(self) -> None:
        """Removes the socket and releases the name. Calling it again does nothing."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self.socket.unlink()
            os.close(self._file)
            self._file = -1


def not_at_work(name: str) -> ConnectError:
    """Returns the error for a keeper that does not answer."""
    return ConnectError(f"the keeper {name} does not answer: it may be stopped, or the machine overloaded")


#: All connections to keepers. They are closed in a forked child: while it had them, a keeper would take a trainer that
#: is gone for one that is connected.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for inherited in list(_sockets):
        if (descriptor := inherited.detach()) >= 0:
            os.close(descriptor)


os.register_at_fork(after_in_child=_close_in_child)


def connect(name: str) -> socket.socket:
    """Returns a connection to the keeper called ``name``.

    Raises:
        ConnectError: there is none, or it does not accept the connection in time
        SystemRefused: its folder is not this user's alone, or it is another user's, or no socket can be opened
    """
    path = find_socket(name)
    if path is None:
        raise ConnectError(f"no keeper called {name!r} runs on this node: start one with tensorferry keeper")
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as e:
        raise SystemRefused(f"the keeper {name!r} cannot be reached, no socket can be opened: {e}") from e
    _sockets.add(sock)
    try:
        sock.settimeout(OFFER_S)
        sock.connect(os.fspath(path))
        _, uid = peer_of(sock)
    except OSError as e:
        sock.close()
        raise ConnectError(f"no keeper called {name!r} answers at {path}: {e}") from e
    if uid != os.geteuid():
        sock.close()
        raise SystemRefused(f"the keeper at {path} is user {uid}'s, not this user's")
    return sock


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Returns the process and the user at the other end of a connection, as the kernel says."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def _socket(name: str) -> str:
    return f"keeper-{name}.sock"


def _locked(path: Path, name: str) -> int:
    """Returns the open file ``path``, which this process alone has locked, with its number in it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as e:
        raise SystemRefused(f"{path} cannot be opened: {e}") from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(file, 20, 0).decode(errors="replace").strip()
        os.close(file)
        raise SystemRefused(
            f"a keeper called {name!r} runs already, process {text}: use it, end it, or choose another --name"
        ) from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file


def _check_private(folder: Path) -> None:
    """Checks that nobody but this user can reach what lies in ``folder``."""
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise SystemRefused(f"{folder} cannot be examined: {e}") from e
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SystemRefused(
            f"{folder} must be a folder of this user that nobody else can enter (mode 0700): sockets of keepers lie in "
            f"it. Set {KEEPER_DIR} to a folder of its own below one of yours, which the keeper makes"
        )
