"""The fault proxy, with plain sockets on both sides and every byte compared."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from exchange import Listener
from tensorferry.testing import (
    Answer,
    Delay,
    Divert,
    Drip,
    Duplicate,
    FaultProxy,
    FlipByte,
    HalfOpen,
    ReplaceHead,
    Reset,
    Truncate,
)
from tensorferry.testing.proxy.http_framing import ResponseSplitter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.nightly


BODY = bytes(range(256)) * 800
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX: Body\r\n\r\n" % len(BODY)
REQUEST = b"GET /1/full HTTP/1.1\r\nHost: a\r\n\r\n"


class Source(Listener):
    """Answers every request with the same body, keeps connections open and records the requests."""

    def __init__(self, body: bytes = BODY) -> None:
        self.answer = HEAD + body
        self.asked: list[bytes] = []
        super().__init__(self._serve_all)

    def _serve_all(self, connection: socket.socket) -> None:
        request = b""
        while data := connection.recv(65536):
            request += data
            if request.endswith(b"\r\n\r\n"):
                self.asked.append(request)
                request = b""
                connection.sendall(self.answer)


@pytest.fixture
def source() -> Iterator[Source]:
    opened = Source()
    yield opened
    opened.close()


@pytest.fixture
def ask(source: Source) -> Iterator[Callable[..., bytes]]:
    """Makes a request through a proxy with faults, on connection 0 or the given one; returns what came in time."""
    with contextlib.ExitStack() as stack:

        def ask_once(*faults, wait: float = 5, wanted: int = len(HEAD + BODY), before: int = 0) -> bytes:
            proxy = stack.enter_context(FaultProxy.before(source.metadata, faults))
            ask_once.proxy = proxy
            for _ in range(before):
                assert exchange(proxy, wait, wanted) == HEAD + BODY
            return exchange(proxy, wait, wanted)

        yield ask_once


def exchange(proxy: FaultProxy, wait: float = 5, wanted: int = len(HEAD + BODY)) -> bytes:
    with socket.create_connection(proxy.address, timeout=wait) as reader:
        reader.sendall(REQUEST)
        return read(reader, wanted)


def read(reader: socket.socket, wanted: int) -> bytes:
    got = b""
    with contextlib.suppress(TimeoutError):
        while len(got) < wanted and (data := reader.recv(65536)):
            got += data
    return got


def test_without_faults_it_only_forwards(ask, source):
    assert ask() == HEAD + BODY
    assert source.asked == [REQUEST]
    counters = ask.proxy.counters
    assert (counters.connections, counters.request_bytes, counters.response_bytes, counters.body_bytes) == (
        1, len(REQUEST), len(HEAD + BODY), len(BODY)
    )  # fmt: skip


def test_a_flipped_byte_is_the_one_at_the_offset_of_the_body(ask):
    got = ask(FlipByte(at=100_000, mask=0x80))
    want = bytearray(HEAD + BODY)
    want[len(HEAD) + 100_000] ^= 0x80
    assert got == want
    assert ask.proxy.fired == {"FlipByte": 1}


def test_offsets_of_the_stream_count_heads(ask):
    assert ask(FlipByte(at=0, of="stream", mask=0x20)) == b"h" + (HEAD + BODY)[1:]


def test_offsets_count_on_over_several_answers_of_a_connection(source):
    with FaultProxy.before(source.metadata, [FlipByte(at=len(BODY) + 5)]) as proxy:
        with socket.create_connection(proxy.address, timeout=5) as reader:
            reader.sendall(REQUEST)
            assert read(reader, len(HEAD + BODY)) == HEAD + BODY
            reader.sendall(REQUEST)
            second = read(reader, len(HEAD + BODY))
        assert [i for i, (a, b) in enumerate(zip(second, HEAD + BODY, strict=True)) if a != b] == [len(HEAD) + 5]


@pytest.mark.parametrize("at", [0, 1, 70_000])
def test_truncate_closes_after_exactly_so_many_bytes(ask, at):
    assert ask(Truncate(at=at), wanted=1 << 30) == HEAD + BODY[:at]


def test_reset_is_a_reset(ask):
    with pytest.raises(ConnectionResetError):
        ask(Reset(at=1000), wanted=1 << 30)


@pytest.mark.waits
def test_half_open_is_silent_and_stays_open(ask):
    started = time.monotonic()
    assert ask(HalfOpen(at=1000), wait=1) == HEAD + BODY[:1000]
    assert time.monotonic() - started > 0.9


def test_drip_sends_all_in_small_pieces(ask):
    started = time.monotonic()
    assert ask(Drip(at=len(BODY) - 10, size=2, interval=0.1)) == HEAD + BODY
    assert time.monotonic() - started > 0.45


def test_delay_waits_once(ask):
    started = time.monotonic()
    assert ask(Delay(at=10, seconds=0.4)) == HEAD + BODY
    assert time.monotonic() - started > 0.35


def test_duplicated_bytes_come_twice(ask):
    got = ask(Duplicate(at=1000, count=64), wanted=len(HEAD + BODY) + 64)
    assert got == HEAD + BODY[:1064] + BODY[1000:]


def test_an_answer_in_place_of_the_sources(ask, source):
    assert ask(Answer(data=b"one", repeat=b"two", interval=0.01), wanted=9)[:9] == b"onetwotwo"
    assert source.asked == []


@pytest.mark.waits
def test_an_answer_that_ends_closes_or_not(ask):
    assert ask(Answer(data=b"one"), wanted=1 << 30) == b"one"
    started = time.monotonic()
    assert ask(Answer(data=b"one", close=False), wanted=1 << 30, wait=1) == b"one"
    assert time.monotonic() - started > 0.9


def test_heads_alone_are_rewritten(ask):
    lie = ReplaceHead(old=b"content-length: ", new=b"Content-Length: 9")
    assert ask(lie) == HEAD.replace(b"Length: ", b"Length: 9") + BODY


def test_diverted_connections_reach_another_source_with_their_requests_changed(source):
    other = Source(bytes(len(BODY)))
    divert = Divert(connections=1, host="127.0.0.1", port=other.port, old=b"/1/full", new=b"/2/full")
    with FaultProxy.before(source.metadata, [divert]) as proxy:
        assert exchange(proxy) == HEAD + BODY
        assert exchange(proxy) == other.answer
    other.close()
    assert other.asked == [REQUEST.replace(b"/1/", b"/2/")]


def test_only_the_nth_connection_is_hit(ask):
    want = bytearray(HEAD + BODY)
    want[len(HEAD)] ^= 1
    assert ask(FlipByte(connections=2), before=2) == want
    assert exchange(ask.proxy) == HEAD + BODY


def test_connections_can_be_counted_by_how_far_they_come(source):
    script = [Truncate(connections=0, at=10), FlipByte(connections=0, at=1000, order="reaching")]
    with FaultProxy.before(source.metadata, script) as proxy:
        assert exchange(proxy, wanted=1 << 30) == HEAD + BODY[:10]
        assert exchange(proxy) != HEAD + BODY  # the second one, and the first to come so far
        assert exchange(proxy) == HEAD + BODY
        assert proxy.fired == {"Truncate": 1, "FlipByte": 1}


def test_requests_can_be_hit_too(ask, source):
    assert ask(FlipByte(at=0, of="stream", direction="request")) == HEAD + BODY
    assert source.asked[0][0] == REQUEST[0] ^ 1


def test_hold_stops_all_bytes_until_it_is_released(source):
    with FaultProxy.before(source.metadata) as proxy:
        proxy.hold(1000)
        got = []
        reading = threading.Thread(target=lambda: got.append(exchange(proxy)))
        reading.start()
        assert proxy.wait_held(5)
        reading.join(0.3)
        assert not got
        proxy.release()
        reading.join(5)
        assert got == [HEAD + BODY]


def test_pace_keeps_a_connection_from_being_done_before_a_fault_has_struck(source):
    with FaultProxy.before(source.metadata, [FlipByte(at=3, connections=1)]) as proxy:
        proxy.pace(100_000, 60)
        got = []
        reading = threading.Thread(target=lambda: got.append(exchange(proxy, wait=20)))
        reading.start()
        reading.join(0.3)
        assert not got
        assert proxy.counters.body_bytes <= 100_000
        changed = exchange(proxy, wait=20)
        reading.join(20)
    assert got == [HEAD + BODY]
    assert len(changed) == len(HEAD + BODY)
    assert changed != HEAD + BODY


def test_pace_is_given_up_when_no_fault_strikes(source):
    with FaultProxy.before(source.metadata, [FlipByte(at=3, connections=9)]) as proxy:
        proxy.pace(1000, 0.1)
        assert exchange(proxy, wait=20) == HEAD + BODY
    assert not proxy.fired


def test_retarget_leads_new_connections_elsewhere(source):
    other = Source(bytes(len(BODY)))
    with FaultProxy.before(source.metadata) as proxy:
        assert exchange(proxy) == HEAD + BODY
        proxy.retarget("127.0.0.1", other.port)
        assert exchange(proxy) == other.answer
    other.close()


def test_a_source_that_is_not_there_is_a_reset():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with FaultProxy("127.0.0.1", port) as proxy, pytest.raises(ConnectionResetError):
        exchange(proxy)


def test_through_rewrites_every_address_of_the_source_and_nothing_else():
    with FaultProxy("node-7", 4000) as proxy:
        host, port = proxy.address
        assert proxy.through("http://node-7:4000/0f/checkpoint/") == f"http://{host}:{port}/0f/checkpoint/"
        assert proxy.through("http://[::1]:4000/") == f"http://{host}:{port}/"
        assert proxy.through("http://a:40001/ http://b:4000/") == f"http://a:40001/ http://{host}:{port}/"
        with pytest.raises(ValueError, match="does not name port 4000"):
            proxy.through("http://node-7:4001/")
    with pytest.raises(ValueError, match="is not a URL"):
        FaultProxy.before("<n/a>")


@pytest.mark.process
def test_the_package_needs_neither_torchft_nor_pytest():
    block = "import sys; sys.modules.update(dict.fromkeys(['torchft', 'pytest'])); import tensorferry.testing.__main__"
    subprocess.run([sys.executable, "-c", block], check=True, timeout=90)


def test_arguments_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="offset"):
        Truncate(at=-1)
    with pytest.raises(ValueError, match="stream"):
        Truncate(direction="request")


NO_BODY = b"HTTP/1.1 304 No\r\nContent-Length: 5\r\n\r\n"
STREAMS = [
    (HEAD + BODY[:10], HEAD, BODY[:10]),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + BODY, b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD, BODY),
    (b"HTTP/1.0 200 OK\r\n\r\nto the end", b"HTTP/1.0 200 OK\r\n\r\n", b"to the end"),
    (NO_BODY + HEAD, NO_BODY + HEAD, b""),
    (b"no HTTP at all\r\n\r\n", b"", b"no HTTP at all\r\n\r\n"),
]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize(("stream", "heads", "bodies"), STREAMS, ids=range(len(STREAMS)))
def test_heads_and_bodies_are_separated_however_they_are_cut(stream, heads, bodies, size):
    splitter = ResponseSplitter()
    parts = [part for i in range(0, len(stream), size) for part in splitter.split(stream[i : i + size])]
    assert b"".join(data for _, data in parts) + splitter.rest() == stream
    assert b"".join(data for body, data in parts if not body) == heads
    assert b"".join(data for body, data in parts if body) == bodies
