"""Sends and receives states in tests, and misbehaves: readers that stop midway, a slow relay, plain HTTP requests."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import re
import socket
import threading
import time
import urllib.parse
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT = timedelta(seconds=30)
TIMED_OUT = r"Timed out|timed out|timeout|time out"  # as torchft's own transport tests look for it
CLEAN, POISON = 0x11, 0xEE


def small_state() -> dict[str, Any]:
    return {"user": {"w": torch.arange(10.0), "b": torch.ones(3, dtype=torch.bfloat16)}, "torchft": {"step": 3}}


def big_state(mib: int = 64) -> dict[str, Any]:
    return {"w": torch.full((mib << 20,), CLEAN, dtype=torch.uint8)}


def send_and_receive(sender: Any, receiver: Any, state: Any, step: int = 1) -> Any:
    sender.send_checkpoint([1], step, state, TIMEOUT)
    return receive(receiver, sender, step)


def receive(transport: Any, source: Any, step: int, seconds: float = 30) -> Any:
    return transport.recv_checkpoint(0, source.metadata(), step, timedelta(seconds=seconds))


def until(condition: Callable[[], bool], what: str) -> None:
    """Polls until ``condition()`` holds; fails after 20 seconds with ``what``."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"still not so: {what}"
        time.sleep(0.005)


def figures(transport: Any) -> str:
    """What a transport tells a scraper, also behind TLS."""
    from tensorferry._native import HttpAnswer

    answer = HttpAnswer.open(transport.metadata().removesuffix("checkpoint/"), "metrics", timeout=20)
    with contextlib.closing(answer):
        return answer.read(1 << 20).decode()


def figure(transport: Any, name: str) -> float:
    found = re.search(rf"^tensorferry_{name} ([\d.]+)$", figures(transport), re.MULTILINE)
    assert found, name
    return float(found[1])


@contextlib.contextmanager
def in_background(function: Callable[..., Any], *arguments: Any) -> Iterator[concurrent.futures.Future]:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit(function, *arguments)


class Reader:
    """An HTTP client that reads only as many bytes as a test wants, and so can stop in the middle of a transfer."""

    def __init__(self, url: str, headers: str = "") -> None:
        parts = urllib.parse.urlsplit(url)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        self.socket.settimeout(30)
        self.socket.connect(("127.0.0.1", parts.port))
        request = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n{headers}\r\n"
        self.socket.sendall(request.encode())
        self.data = bytearray()

    def read_to(self, count: int) -> None:
        while len(self.data) < count:
            part = self.socket.recv(64 << 10)
            assert part, f"the connection ended after {len(self.data)} bytes: {bytes(self.data[:300])!r}"
            self.data += part

    def read_rest(self) -> bytes:
        """Reads until the connection ends or is cut, and returns the whole body."""
        with contextlib.suppress(ConnectionError):
            while part := self.socket.recv(1 << 20):
                self.data += part
        return self.body

    @property
    def head(self) -> str:
        return bytes(self.data).partition(b"\r\n\r\n")[0].decode("latin1")

    @property
    def body(self) -> bytes:
        return bytes(self.data).partition(b"\r\n\r\n")[2]

    @property
    def content_length(self) -> int:
        return int(re.search(r"(?i)^content-length: *(\d+)", self.head, re.MULTILINE).group(1))


class Listener:
    """Listens on a free port and calls `serve` with each connection, in a thread of its own.

    `close` ends all connections and threads. A socket that is left open would fail whichever test is running when it is
    garbage-collected.
    """

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.metadata = f"http://127.0.0.1:{self.port}/{'0' * 32}/checkpoint/"
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.start(self._accept)

    def start(self, function: Callable[..., None], *arguments: Any) -> None:
        """Runs `function` in a thread that `close` waits for."""
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def own(self, opened: socket.socket) -> socket.socket:
        """Registers a socket that `close` has to close, and returns it."""
        with self._lock:
            self._sockets.append(opened)
            if not self.closed.is_set():
                return opened
        opened.close()
        raise ConnectionAbortedError("the listener is closed")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.start(self._answer, self.own(self._listener.accept()[0]))

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            self._serve(connection)

    def close(self) -> None:
        with self._lock:
            self.closed.set()
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(transport: Any) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", urllib.parse.urlsplit(transport.metadata()).port, timeout=30)


def path(transport: Any, resource: str) -> str:
    return urllib.parse.urlsplit(transport.metadata()).path + resource
