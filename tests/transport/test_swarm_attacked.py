"""A hostile tracker: a man in the middle changes what the source of a swarm tells its receivers."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import threading
import urllib.parse
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from nights import mostly_at_night

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
BLOCKS = 24
SLOW = 16 * MIB
TIMEOUT = timedelta(seconds=60)
OPTIONS: dict[str, Any] = {"interface": "127.0.0.1", "same_host": False, "relay": True}
TOKEN = "0" * 32

pytestmark = [pytest.mark.timeout(120), pytest.mark.beyond_torchft]


class Middle(BaseHTTPRequestHandler):
    """Passes requests on to the source and answers back, those of the tracker and its digests changed."""

    protocol_version = "HTTP/1.1"
    source: ClassVar[str]
    changes: ClassVar[dict[str, Callable[[bytes], bytes]]]
    asked: ClassVar[list[str]]

    def do_GET(self) -> None:
        upstream = http.client.HTTPConnection(self.source, timeout=60)
        with contextlib.closing(upstream):
            upstream.request("GET", self.path, headers=dict(self.headers.items()))
            answer = upstream.getresponse()
            body = answer.read()
        for name, change in self.changes.items():
            if name in self.path:
                self.asked.append(self.path)
                body = change(body)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() != "content-length":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        # A receiver that has heard enough goes.
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Is silent."""


@contextlib.contextmanager
def between(metadata: str, **changes: Callable[[bytes], bytes]) -> Iterator[tuple[str, list[str]]]:
    """Yields the metadata of a man in the middle, who changes answers, and what he was asked of that."""
    url, asked = urllib.parse.urlsplit(metadata), list[str]()
    names = {"tracker": "/swarm?", "digests": "digests?long=1"}
    told = {"source": url.netloc, "changes": {names[name]: how for name, how in changes.items()}, "asked": asked}
    with ThreadingHTTPServer(("127.0.0.1", 0), type("ThisMiddle", (Middle,), told)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield url._replace(netloc=f"127.0.0.1:{server.server_port}").geturl(), asked
        finally:
            server.shutdown()


def saying(*lines: str, instead_of: str = "none") -> Callable[[bytes], bytes]:
    """Returns a change that adds lines to an answer, and leaves out those that begin with the words `instead_of`."""

    def change(body: bytes) -> bytes:
        kept = [line for line in body.decode().splitlines() if not re.match(instead_of, line)]
        return "\n".join([*kept, *lines, ""]).encode()

    return change


@contextlib.contextmanager
def member(metadata: str, count: int = 1) -> Iterator[None]:
    """Has so many members in the swarm, at a port at which nobody listens, while their connections are open."""
    url = urllib.parse.urlsplit(metadata)
    with contextlib.ExitStack() as open_ones:
        for number in range(count):
            connection = open_ones.enter_context(contextlib.closing(http.client.HTTPConnection(url.netloc, timeout=10)))
            connection.request("GET", f"{url.path}7/swarm?port=1&token={number:032x}")
            assert connection.getresponse().read()
        yield


LARGEST = 2**64 - 1
#: What the man in the middle changes.
LIES: dict[str, dict[str, Callable[[bytes], bytes]]] = {
    "a wait of ages": {"tracker": saying(f"wait {LARGEST}", instead_of="wait|grant|peer")},
    "nothing granted": {"tracker": saying(instead_of="grant")},
    "everything granted": {"tracker": saying(f"grant 0-{BLOCKS}", instead_of="grant")},
    "other digests": {"tracker": saying("table 1"), "digests": lambda body: body[:-16] + os.urandom(16)},
    "a wait below zero": {"tracker": saying("wait -1")},
    "a grant behind the end": {"tracker": saying("grant 9-3", f"grant 0-{BLOCKS + 1000}")},
    "a share of nothing": {"tracker": saying(f"place 2 7/4294967295 7/4294967295 {LARGEST} {LARGEST}")},
    "a source that goes": {"tracker": saying("free 1", "table 1")},
    "no text": {"tracker": lambda _: os.urandom(3000)},
    "far too much": {"tracker": lambda body: body + b"x y\n" * 1_000_000},
    "too many peers": {"tracker": saying(*(f"peer http://127.0.0.1:1/{n:032x}/checkpoint/" for n in range(65)))},
    "peers that are none": {"tracker": saying("peer ftp://x/", "peer http://[::1", f"peer https://h/{TOKEN}/")},
    "huge digests": {"tracker": saying("table 1"), "digests": lambda _: bytes(64 * MIB)},
    "short digests": {"tracker": saying("table 1"), "digests": lambda body: body[:50]},
}


@pytest.mark.waits
@pytest.mark.parametrize("lie", mostly_at_night(LIES, by_day=4))
def test_what_a_hostile_tracker_says_does_no_harm(lie: str, open_transport: Any) -> None:
    source, healing = open_transport(max_bandwidth=SLOW, **OPTIONS), open_transport(**OPTIONS)
    values = {"w": torch.arange(BLOCKS * MIB // 8)}
    source.send_checkpoint([1], 7, values, TIMEOUT)
    with member(source.metadata(), 2), between(source.metadata(), **LIES[lie]) as (metadata, asked):
        received = healing.recv_checkpoint(0, metadata, 7, TIMEOUT)
    assert any(("long=1" if "digests" in LIES[lie] else "/swarm?") in path for path in asked)
    assert torch.equal(received["w"], values["w"])


@pytest.mark.waits
def test_a_tracker_leads_nobody_to_what_is_no_relay(open_transport: Any) -> None:
    source, healing = open_transport(max_bandwidth=SLOW, **OPTIONS), open_transport(**OPTIONS)
    values = {"w": torch.arange(BLOCKS * MIB // 8)}
    source.send_checkpoint([1], 7, values, TIMEOUT)
    with socket.create_server(("127.0.0.1", 0)) as trap:
        there = f"http://127.0.0.1:{trap.getsockname()[1]}"
        paths = ["", "admin/delete/", "..", f"{TOKEN[1:]}", f"{TOKEN}~127.0.0.5", f"x/{TOKEN}"]
        peers = saying(*(f"peer {there}/{path}/checkpoint/" for path in paths))
        with between(source.metadata(), tracker=peers) as (metadata, asked):
            received = healing.recv_checkpoint(0, metadata, 7, TIMEOUT)
        assert asked
        trap.setblocking(False)
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert torch.equal(received["w"], values["w"])
