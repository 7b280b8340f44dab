"""A name server that never answers, in a namespace of the calling process's own: nothing of it is left behind."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import tempfile
from pathlib import Path

from .scenarios import LeftOut

__all__ = ["NAME", "SilentNameServer"]

NAME = "a-source.somewhere.test"
"""A name that only the name server could know: ``test`` is nobody's domain."""

_NEW_MOUNTS, _NEW_USER, _NEW_NETWORK = 0x20000, 0x10000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1

# One question is waited for longer than any cell lasts: what comes earlier is the transport's doing.
_FILES = {
    "resolv.conf": "nameserver 127.0.0.1\noptions timeout:30 attempts:5\n",
    "nsswitch.conf": "hosts: files dns\n",
    "hosts": f"127.0.0.1 localhost {socket.gethostname()}\n",
}


class SilentNameServer:
    """Moves this process to a network of its own, in which the only name server is silent.

    It is to be made before the process has a second thread, which would stay where it was.

    Raises:
        LeftOut: the system does not allow it
    """

    def __init__(self) -> None:
        try:
            _leave()
            _link_up()
            _replace_files()
            self._server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._server.bind(("127.0.0.1", 53))
        except OSError as e:
            raise LeftOut(f"no network namespace for a silent name server: {e}") from e
        self._server.setblocking(False)

    def asked(self) -> int:
        """How many questions have come."""
        count = 0
        try:
            while self._server.recv(512):
                count += 1
        except BlockingIOError:
            return count


def _call(what: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, what)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _leave() -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _NEW_MOUNTS | _NEW_NETWORK)
    except OSError:
        _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_NETWORK)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    # What is mounted from here on is seen by nobody else.
    _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)


def _link_up() -> None:
    """The loopback interface, which a new network has switched off: a name server that is not there is no silent one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _replace_files() -> None:
    for name, text in _FILES.items():
        if not Path(f"/etc/{name}").exists():
            continue
        with tempfile.NamedTemporaryFile("w", prefix="tensorferry-names-") as file:
            file.write(text)
            file.flush()
            # A bound file lives on for as long as it is mounted, though its name is gone.
            _call("mount", file.name.encode(), f"/etc/{name}".encode(), None, _BIND, None)
