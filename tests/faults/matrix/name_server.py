"""A name server that never answers, in network and mount namespaces that end with the calling process."""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import socket
import struct
import tempfile
import threading
from pathlib import Path

from .scenario import LeftOut

NAME = "a-source.somewhere.test"
"""A host name that only the name server could resolve; the domain ``test`` is reserved (RFC 2606)."""

_NEW_MOUNTS, _NEW_USER, _NEW_NETWORK = 0x20000, 0x10000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


class SilentNameServer:
    """Moves this process to a network namespace of its own, in which the only name server is silent.

    Create it before the process has a second thread: threads that exist already stay in the old namespace.

    Args:
        asked: a file that is created when the first query arrives
        seconds: how long the system's resolver waits for an answer, 30 at most

    Raises:
        LeftOut: the system does not allow it
    """

    def __init__(self, asked: Path, seconds: float) -> None:
        try:
            _enter_namespaces()
            _link_up()
            _replace_files(seconds)
            self._server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._server.bind(("127.0.0.1", 53))
        except OSError as e:
            raise LeftOut(f"no network namespace for a silent name server: {e}") from e
        threading.Thread(target=self._take_queries, args=(asked,), name="name-server", daemon=True).start()

    def _take_queries(self, asked: Path) -> None:
        while self._server.recv(512):
            asked.touch()


def _call(function: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")


def _enter_namespaces() -> None:
    """Moves this process into a network of its own without any interface, where its mounts are its own, too."""
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _NEW_MOUNTS | _NEW_NETWORK)
    except OSError:
        _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_NETWORK)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    # No other process sees what is mounted from here on.
    _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)


def _link_up() -> None:
    """Brings the loopback interface up: without it, queries fail at once instead of remaining unanswered."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _replace_files(seconds: float) -> None:
    files = {
        "resolv.conf": f"nameserver 127.0.0.1\noptions timeout:{min(math.ceil(seconds), 30)} attempts:1\n",
        "nsswitch.conf": "hosts: files dns\n",
        # Transports resolve the name of their own host when they are constructed.
        "hosts": f"127.0.0.1 localhost {socket.gethostname()}\n",
    }
    for name, text in files.items():
        if not Path(f"/etc/{name}").exists():
            continue
        with tempfile.NamedTemporaryFile("w", prefix="tensorferry-names-") as file:
            file.write(text)
            file.flush()
            # The file remains for as long as it is mounted, although its name is removed.
            _call("mount", file.name.encode(), f"/etc/{name}".encode(), None, _BIND, None)
