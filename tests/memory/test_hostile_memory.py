"""How much memory a hostile peer can make a process allocate: peaks of resident memory, each in its own process."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import socket
import struct
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import torch
from torch.distributed._serialization import _Entry as Entry

import tensorferry
from exchange import Listener
from hostile_pickles import again, build, global_, new, whole
from nights import mostly_at_night
from tensorferry.pickles.allowlist import Allowed
from tensorferry.torchft import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from child import Child

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(200), pytest.mark.beyond_torchft]

MIB = 1 << 20

PEAK = """
def peak():
    '''MiB this process ever had resident at once, since the last call of reset.'''
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10

def reset():
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
"""

RECEIVE = (
    PEAK
    + """
target = HTTPTransport(LONG, 4)
for way in ({}, {"state_dict": lambda: {"w": torch.zeros(3)}}):
    target = HTTPTransport(LONG, 4, **way)
    reset()
    before = peak()
    try:
        target.recv_checkpoint(0, METADATA, 1, timedelta(seconds=3))
        ended = "healed"
    except tensorferry.TensorferryError as error:
        ended = f"{type(error).__name__}: {error}"
    print(peak() - before, ended[:300], flush=True)
"""
)


def container(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


def entry(nbytes: int) -> bytes:
    text = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (nbytes, nbytes)
    return text + b" " * (-len(text) % 8)


def part(body: bytes, total: int, length: int | None = None) -> bytes:
    """Returns the answer to the first request: as much of a container of ``total`` bytes as was requested."""
    length = min(total, MIB) if length is None else length
    head = (
        f"HTTP/1.1 206 Partial Content\r\nContent-Length: {length}\r\n"
        f'Content-Range: bytes 0-{length - 1}/{total}\r\nETag: "a"\r\n\r\n'
    )
    return head.encode() + body


def forever(piece: bytes) -> Iterator[bytes]:
    while True:
        yield piece


def then(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


HUGE = 1 << 46
ANSWERS: dict[str, Callable[[], Iterator[bytes]]] = {
    "a head without end": lambda: then(b"HTTP/1.1 200 OK\r\n", forever(b"X: " + b"a" * 60_000 + b"\r\n")),
    "a header longer than memory": lambda: then(part(container(b"{", 1 << 62), HUGE), forever(bytes(60_000))),
    "a header of the longest kind": lambda: then(part(container(b"{", 99_000_000), HUGE), forever(bytes(60_000))),
    "a payload longer than memory": lambda: then(part(container(entry(HUGE)), HUGE), forever(bytes(60_000))),
    "a body longer than asked for": lambda: then(part(container(entry(10)), 10, HUGE), forever(bytes(60_000))),
    "an error that is long": lambda: then(
        b"HTTP/1.1 400 No\r\nContent-Length: 9999999999999\r\n\r\n", forever(b"no" * 30_000)
    ),
}


def say(connection: socket.socket, answer: Iterator[bytes]) -> None:
    connection.settimeout(5)
    connection.recv(1 << 16)
    for piece in answer:
        connection.sendall(piece)


@pytest.mark.parametrize("name", mostly_at_night(ANSWERS, by_day=3))
def test_a_receiver_allocates_for_what_came_not_for_what_is_announced(name: str, forked_child: Child) -> None:
    with Listener(lambda connection: say(connection, ANSWERS[name]())) as listener:
        lines = forked_child.run(RECEIVE.replace("METADATA", repr(listener.metadata)), within=60).splitlines()
    for line in lines:
        grown, ended = line.split(" ", 1)
        assert not ended.startswith("healed")
        # A header may have 100 MB, and is in memory twice while it is read.
        assert int(grown) < (400 if "longest kind" in name else 24), line


@pytest.mark.parametrize(
    ("storages", "ending"),
    [
        ([], "healed"),
        ([[2_500_000_000, []]], "healed"),
        ([[20_000_000_000, []]] * 50, "SystemRefused: the memory that the source's views look into"),
        ([[2**62, []], [2**62 - 1, []]], "SystemRefused"),
    ],
)
def test_storages_that_are_only_announced_take_no_memory(
    storages: list[Any], ending: str, forked_child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorferry.state import snapshot
    from tensorferry.storage import reserved

    def control(packed: Any) -> list[tuple[str, bytes]]:
        manifest = json.loads(packed.manifest())
        return [(reserved.MANIFEST, snapshot._padded(json.dumps(manifest | {"storages": storages}).encode(), b" "))]

    monkeypatch.setattr(snapshot.StateSnapshot, "_control", control)
    source = tensorferry.HTTPTransport(timedelta(seconds=60))
    source.send_checkpoint([1], 1, {"w": torch.ones(3)}, timedelta(seconds=60))
    try:
        for line in forked_child.run(RECEIVE.replace("METADATA", repr(source.metadata())), within=60).splitlines():
            grown, ended = line.split(" ", 1)
            assert ended.startswith(ending)
            assert int(grown) < 24, line
    finally:
        source.shutdown()


class Announced:
    """An entry of torchft's format."""

    def __init__(self, length: Any, key: str = "data.pkl") -> None:
        self.key, self.is_storage, self.length = key, False, length

    def __reduce__(self) -> Any:
        return Entry, (self.key, self.is_storage, self.length)


STOCK = {
    "a record without end": [Announced(1 << 50)],
    "records that are too long together": [Announced(1 << 62), Announced(1 << 62)],
}


@pytest.mark.parametrize("name", [*STOCK, "a name without end"])
def test_a_stock_source_is_not_read_beyond_what_can_be(name: str, forked_child: Child) -> None:
    body = pickle.dumps(STOCK[name], 2) if name in STOCK else b"\x80\x02c" + b"a" * 100_000
    endless = forever(bytes(1 << 20) if name in STOCK else b"a" * (1 << 20))
    answer = then(b"HTTP/1.0 200 OK\r\n\r\n" + body, endless)
    with Listener(lambda connection: say(connection, answer)) as listener:
        script = (
            PEAK
            + f"""
from tensorferry.torchft import compat
from tensorferry.pickles.allowlist import Allowed
reset()
before = peak()
try:
    compat.receive("{listener.metadata}", 1, timedelta(seconds=20), Allowed())
except (tensorferry.errors.ProtocolError, tensorferry.errors.SystemRefused) as error:
    print(peak() - before)
"""
        )
        assert int(forked_child.run(script)) < 24


def test_a_source_holds_little_for_thousands_of_slow_connections(forked_child: Child) -> None:
    state = {"w": torch.arange(float(4 * MIB))}
    process = forked_child.start(
        PEAK
        + """
source, target = open_pair()
state = {"w": torch.arange(float(4 << 20))}
send_and_receive(source, target, 1, state)
reset()
before = peak()
print(source.metadata(), flush=True)
sys.stdin.readline()
print(peak() - before, flush=True)
source.disallow_checkpoint()
""",
        listens=True,
    )
    assert process.stdin
    assert process.stdout
    metadata = process.stdout.readline().strip()
    url = urlsplit(metadata)
    sent = f"GET {url.path}1.safetensors HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    target = tensorferry.HTTPTransport(timedelta(seconds=60))
    # The crowd that fits beside the good receiver: 384 connections that have made a request.
    let_in = 380
    with contextlib.ExitStack() as crowd_of:
        for number in range(2000):
            one = crowd_of.enter_context(socket.socket())
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with contextlib.suppress(BlockingIOError):
                one.connect((url.hostname, url.port))
            if number < let_in:
                one.setblocking(True)
                one.settimeout(10)
                with contextlib.suppress(OSError):
                    one.sendall(sent)
            if number == let_in - 1:
                received = target.recv_checkpoint(0, metadata, 1, timedelta(seconds=30))
                assert torch.equal(received["w"], state["w"])
        process.stdin.write("\n")
        process.stdin.flush()
        grown = int(process.stdout.readline())
    target.shutdown()
    forked_child.finish(within=60)
    assert grown < 128, f"{grown} MiB"


@pytest.mark.parametrize("field", ["key", "is_storage", "length"])
def test_what_a_stock_source_sent_is_looked_at_before_it_is_shown(field: str) -> None:
    """There is a tuple that takes for ever to print, traverse or hash."""
    fields = {"key": "k", "is_storage": False, "length": 0, field: again((1,), 40, b"2\x86")}
    hostile = build(new(global_("torch.distributed._serialization", "_Entry")), fields)
    with pytest.raises(tensorferry.TensorferryError):
        compat._load(compat._Exact(io.BytesIO(whole(hostile)), 1 << 20), Allowed())
