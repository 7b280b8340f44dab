"""How processes of a node reach its keeper, and start one."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

from ...errors import ConnectError, SystemRefused
from .place import find_socket

#: Seconds that the keeper has to take an offer, which holds the trainer up: it does at once unless it is stopped.
OFFER_S = 2.0
#: Seconds that a keeper which was started has until it listens.
_START_S = 20.0


class KeeperSilent(ConnectError):
    """The keeper does not answer."""


def not_at_work(name: str) -> KeeperSilent:
    """Returns the error for a keeper that does not answer."""
    return KeeperSilent(f"the keeper {name} does not answer: it may be stopped, or the machine overloaded")


#: All connections to keepers. They are closed in a forked child: while it had them, a keeper would take a trainer that
#: is gone for one that is connected.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def watch(sock: socket.socket) -> None:
    """Has a connection to a keeper closed in forked children."""
    _sockets.add(sock)


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
    watch(sock)
    try:
        sock.settimeout(OFFER_S)
        _connect_in_time(sock, path)
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    except OSError as e:
        sock.close()
        raise ConnectError(f"no keeper called {name!r} answers at {path}: {e}") from e
    if uid != os.geteuid():
        sock.close()
        raise SystemRefused(f"the keeper at {path} is user {uid}'s, not this user's")
    return sock


def _connect_in_time(sock: socket.socket, path: Path) -> None:
    """Connects to the keeper's socket; tries again for ``OFFER_S`` while too many others wait to be accepted."""
    deadline = time.monotonic() + OFFER_S
    while True:
        try:
            sock.connect(os.fspath(path))
            return
        except BlockingIOError:
            # Many wait to be accepted, and a socket with a timeout is not queued behind them.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def is_running(name: str) -> bool:
    """Whether a keeper called ``name`` runs on this node and can be reached by this process."""
    try:
        connect(name).close()
    except (ConnectError, SystemRefused):
        return False
    return True


def start(name: str) -> None:
    """Starts a keeper called ``name`` unless one runs; it ends when nobody has used it for an hour.

    Raises:
        SystemRefused: it cannot be started
    """
    if is_running(name):
        return
    command = [sys.executable, "-m", __package__, "--name", name, "--idle", "3600", "--quiet"]
    try:
        # A session of its own: Ctrl-C at the trainer's terminal is not meant for it.
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, close_fds=True
        )
    except OSError as e:
        raise SystemRefused(f"a keeper could not be started: {e}") from e
    deadline = time.monotonic() + _START_S
    while not is_running(name):
        # One that another trainer has started at the same time does as well; ours ends then.
        if started.poll() not in (None, 1) or time.monotonic() > deadline:
            started.kill()
            raise SystemRefused(f"a keeper was started and does not answer: {' '.join(command)}")
        time.sleep(0.01)
    threading.Thread(target=started.wait, name="tensorferry-reap", daemon=True).start()
