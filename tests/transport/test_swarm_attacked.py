"""A hostile tracker: a man in the middle changes what the source of a swarm tells its receivers."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import urllib.parse
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hostile_servers import Relay
from nights import mostly_at_night

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
BLOCKS = 24
TIMEOUT = timedelta(seconds=60)
OPTIONS: dict[str, Any] = {"interface": "127.0.0.1", "same_host": False, "relay": True}

pytestmark = [pytest.mark.timeout(120), pytest.mark.beyond_torchft]


def saying(*lines: str, instead_of: str = "none") -> Callable[[bytes], bytes]:
    """Returns a change that adds lines to an answer, and leaves out those that begin with the words `instead_of`."""

    def change(body: bytes) -> bytes:
        kept = [line for line in body.decode().splitlines() if not re.match(instead_of, line)]
        return "\n".join([*kept, *lines, ""]).encode()

    return change


@contextlib.contextmanager
def members(metadata: str) -> Iterator[None]:
    """Has two members in the swarm, at a port at which nobody listens, while their connections are open."""
    url = urllib.parse.urlsplit(metadata)
    with contextlib.ExitStack() as open_ones:
        for number in range(2):
            connection = open_ones.enter_context(contextlib.closing(http.client.HTTPConnection(url.netloc, timeout=10)))
            connection.request("GET", f"{url.path}7/swarm?port=1&token={number:032x}")
            assert connection.getresponse().read()
        yield


LARGEST = 2**64 - 1
#: What the man in the middle changes: what the tracker says, and the digests that it has said there are.
LIES: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes] | None]] = {
    "a wait of ages": (saying(f"wait {LARGEST}", instead_of="wait|grant|peer"), None),
    "everything granted": (saying(f"grant 0-{BLOCKS}", instead_of="grant"), None),
    "other digests": (saying("table 1"), lambda body: body[:-16] + os.urandom(16)),
    "a grant behind the end": (saying("grant 9-3", f"grant 0-{BLOCKS + 1000}"), None),
    "a share of nothing": (saying(f"place 2 7/4294967295 7/4294967295 {LARGEST} {LARGEST}"), None),
    "no text": (lambda _: os.urandom(3000), None),
    "far too much": (lambda body: body + b"x y\n" * 1_000_000, None),
    "too many peers": (saying(*(f"peer http://127.0.0.1:1/{n:032x}/checkpoint/" for n in range(65))), None),
    "huge digests": (saying("table 1"), lambda _: bytes(64 * MIB)),
}


@pytest.mark.waits
@pytest.mark.parametrize("lie", mostly_at_night(LIES, by_day=4))
def test_what_a_hostile_tracker_says_does_no_harm(lie: str, open_transport: Any) -> None:
    tracker, digests = LIES[lie]
    changed = {"/swarm?": tracker, **({"digests?long=1": digests} if digests else {})}
    asked = set()

    def change(path: str, _: int, said: bytes) -> bytes:
        for name, how in changed.items():
            if name in path:
                asked.add(name)
                head, _, body = said.partition(b"\r\n\r\n")
                body = how(body)
                said = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head) + b"\r\n\r\n" + body
        return said

    source, healing = open_transport(max_bandwidth=16 * MIB, **OPTIONS), open_transport(**OPTIONS)
    values = {"w": torch.arange(BLOCKS * MIB // 8)}
    source.send_checkpoint([1], 7, values, TIMEOUT)
    with members(source.metadata()), Relay(source.metadata(), change) as middle:
        received = healing.recv_checkpoint(0, middle.metadata, 7, TIMEOUT)
    assert asked == changed.keys()
    assert torch.equal(received["w"], values["w"])
