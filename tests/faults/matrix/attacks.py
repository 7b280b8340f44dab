"""Attacks on a source by hostile or broken peers: each is a crowd of plain sockets in one thread."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit


@dataclass(frozen=True)
class Attack:
    """A crowd of connections to a source.

    Args:
        connections: how many are opened
        data: called with the source's URL for each connection; the pieces that it yields are sent one by one
        interval: seconds between two pieces on one connection
        reopen: whether a connection is opened again after the source has closed it, or after its last piece
    """

    connections: int
    data: Callable[[SplitResult], Iterator[bytes]]
    interval: float = 0.0
    reopen: bool = False


def _request(url: SplitResult) -> bytes:
    return f"GET {url.path}1/full HTTP/1.1\r\nHost: {url.netloc}\r\n".encode()


def _slowloris(url: SplitResult) -> Iterator[bytes]:
    for byte in _request(url):
        yield bytes([byte])
    while True:
        yield b"a"


def _garbage(url: SplitResult) -> Iterator[bytes]:
    noise = random.Random(url.netloc)
    for _ in range(8):
        yield noise.randbytes(4096)


def _huge_header(url: SplitResult) -> Iterator[bytes]:
    yield _request(url) + b"X-Huge: "
    for _ in range(128):
        yield b"a" * 65536
    yield b"\r\n\r\n"


def _endless_header(url: SplitResult) -> Iterator[bytes]:
    yield _request(url)
    while True:
        yield b"".join(b"X-%d: %s\r\n" % (i, b"a" * 100) for i in range(256))


def _silence(url: SplitResult) -> Iterator[bytes]:
    del url
    while True:
        yield b""


ATTACKS = {
    "slowloris": Attack(64, _slowloris, interval=0.5),
    "garbage": Attack(16, _garbage, interval=0.02, reopen=True),
    "huge-header": Attack(8, _huge_header, interval=0.01, reopen=True),
    "endless-header": Attack(8, _endless_header, interval=0.01),
    "silent-connections": Attack(256, _silence, interval=0.5),
}
"""The attacks by name."""


@contextlib.contextmanager
def attacking(metadata: str, attack: Attack) -> Iterator[Callable[[], int]]:
    """Attacks the source while the block runs; yields a callable that returns how many connections were opened so far.

    All connections are open when the block is entered, or as many as the source accepts within five seconds.
    """
    crowd = _RequestCrowd(urlsplit(metadata), attack)
    thread = threading.Thread(target=crowd.run, name="attack", daemon=True)
    thread.start()
    try:
        crowd.complete.wait(5)
        yield lambda: crowd.opened
    finally:
        crowd.over.set()
        thread.join(15)


class _RequestCrowd:
    def __init__(self, url: SplitResult, attack: Attack) -> None:
        self._url = url
        self._attack = attack
        self.opened = 0
        self.complete = threading.Event()
        self.over = threading.Event()

    def run(self) -> None:
        members: list[tuple[socket.socket, Iterator[bytes]] | None] = [None] * self._attack.connections
        tried = [False] * self._attack.connections
        try:
            while not self.over.is_set():
                began = time.monotonic()
                for i in range(len(members)):
                    if self.over.is_set():
                        return
                    if members[i] is None and (self._attack.reopen or not tried[i]):
                        tried[i] = True
                        members[i] = self._open()
                    members[i] = self._advance(members[i])
                self.complete.set()
                self.over.wait(max(0.001, self._attack.interval - (time.monotonic() - began)))
        finally:
            for member in members:
                if member:
                    member[0].close()

    def _open(self) -> tuple[socket.socket, Iterator[bytes]] | None:
        try:
            opened = socket.create_connection((self._url.hostname or "", self._url.port or 80), timeout=1)
        except OSError:
            return None
        opened.setblocking(False)
        self.opened += 1
        return opened, self._attack.data(self._url)

    @staticmethod
    def _advance(member: tuple[socket.socket, Iterator[bytes]] | None) -> tuple[socket.socket, Iterator[bytes]] | None:
        if member is None:
            return None
        opened, data = member
        try:
            piece = next(data)
            if piece:
                opened.send(piece)
        except BlockingIOError:
            return member
        except (OSError, StopIteration):
            opened.close()
            return None
        return member
