"""A crowd of idle connections, held open by a separate process.

This file is also the program of that process and needs only the standard library. The process of the tests could not
hold so many sockets: its limit of open files may be low, and the suite must not raise it.
"""

from __future__ import annotations

import contextlib
import re
import resource
import select
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_COMPLETE = 10.0
"""Seconds the crowd may take to open all its connections."""
_START = 30.0
"""Seconds the process may take to start on a busy machine."""
_AGAIN = 0.5
"""Seconds after which a connection that the source has closed is opened again."""
_SPARE = 64


@dataclass(frozen=True)
class IdleCrowd:
    """Connections to a source on which nothing is ever sent; one that the source closes is opened again.

    Args:
        connections: how many are held open
        local: half of them to the sockets the source has in the abstract Unix namespace; the others, or all of them
            without it, to its port
    """

    connections: int
    local: bool = False


@contextlib.contextmanager
def crowding(metadata: str, pid: int, crowd: IdleCrowd) -> Iterator[Callable[[], int]]:
    """Holds the connections open while the block runs.

    Args:
        metadata: of the source
        pid: of the source
        crowd: how many connections, and whether half of them avoid the network

    Yields:
        A callable that returns how many connections were open when the block was entered; 0 if the crowd has ended, or
        the source has no local sockets.
    """
    url = urlsplit(metadata)
    targets = [f"{url.hostname}:{url.port}"]
    if crowd.local:
        sockets = local_sockets(pid)
        if not sockets:
            yield lambda: 0
            return
        targets = targets * len(sockets) + sockets
    process = subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).resolve()), str(crowd.connections), *targets],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    try:
        # The line is empty if the process died.
        has_line = select.select([process.stdout], [], [], _COMPLETE + _START)[0]
        opened = int(process.stdout.readline() or 0) if has_line else 0
        yield lambda: opened if process.poll() is None else 0
    finally:
        process.stdin.close()  # asks the process to end
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def local_sockets(pid: int) -> list[str]:
    """Returns the abstract Unix socket names on which a process listens, each with its leading ``@``.

    Args:
        pid: of the process, which belongs to the same user
    """
    own = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                own.add(str(entry.readlink()))
    names = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            _, _, _, flags, _, _, inode, *name = line.split(maxsplit=7)
            listens = int(flags, 16) & 0x10000
            if listens and name and name[0].startswith("@") and f"socket:[{inode}]" in own:
                names.append(name[0])
    return names


class _ReopeningCrowd:
    """Connections that are opened without waiting for one another, and opened again when they are closed."""

    def __init__(self, count: int, targets: list[str]) -> None:
        self._selector = selectors.DefaultSelector()
        self._targets = targets
        self._connecting = 0
        self._due: list[tuple[float, int]] = [(0.0, i) for i in range(count)]
        self._open: set[int] = set()

    def run(self) -> None:
        """Runs until standard input ends; prints the number of open connections once all have been tried."""
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        end, printed = time.monotonic() + _COMPLETE, False
        while True:
            now = time.monotonic()
            ready = [i for due, i in self._due if due <= now]
            self._due = [(due, i) for due, i in self._due if due > now]
            for i in ready:
                self._connect(i)
            if not printed and (not self._connecting or now > end):
                print(len(self._open), flush=True)
                printed = True
            for key, _ in self._selector.select(_AGAIN / 5):
                if key.fileobj is sys.stdin:
                    return
                assert isinstance(key.fileobj, socket.socket)
                self._handle(key.fileobj, key.data)

    def _connect(self, i: int) -> None:
        target = self._targets[i % len(self._targets)]
        host, _, port = target.rpartition(":")
        try:
            if target.startswith("@"):
                opened = socket.socket(socket.AF_UNIX)
                opened.setblocking(False)
                opened.connect("\0" + target[1:])
            else:
                opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                opened.setblocking(False)
                opened.connect((host, int(port)))
        except BlockingIOError:
            self._connecting += 1
            self._selector.register(opened, selectors.EVENT_WRITE, i)
            return
        except OSError:
            self._due.append((time.monotonic() + _AGAIN, i))
            return
        self._keep(opened, i)

    def _handle(self, member: socket.socket, i: int) -> None:
        """Handles an event of connection ``i``: it was established, has received bytes, has failed, or was closed.

        After the first two it is watched further; after the others it is closed, and opened again after a pause.
        """
        self._selector.unregister(member)
        if i not in self._open:
            self._connecting -= 1
            if not member.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._keep(member, i)
                return
        else:
            try:
                if member.recv(4096):  # a greeting
                    self._selector.register(member, selectors.EVENT_READ, i)
                    return
            except OSError:
                pass
            self._open.discard(i)
        member.close()
        self._due.append((time.monotonic() + _AGAIN, i))

    def _keep(self, member: socket.socket, i: int) -> None:
        self._open.add(i)
        self._selector.register(member, selectors.EVENT_READ, i)


def _main(count: str, *targets: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = int(count) + _SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    # Resolved once, not for each connection.
    known = [t if t.startswith("@") else _resolve(t) for t in targets]
    _ReopeningCrowd(int(count), known).run()


def _resolve(target: str) -> str:
    host, _, port = target.rpartition(":")
    address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4]
    return re.sub(r"%.*", "", str(address[0])) + f":{port}"


if __name__ == "__main__":
    _main(*sys.argv[1:])
