"""What a transport promises to its caller: torchft's contract, the ways in which we go beyond it, and plain HTTP."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import http.client
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from equality import assert_same_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TIMEOUT = timedelta(seconds=30)
TIMED_OUT = r"Timed out|timed out|timeout|time out"  # as torchft's own transport tests look for it
CLEAN, POISON = 0x11, 0xEE

pytestmark = pytest.mark.timeout(90)


def small_state() -> dict[str, Any]:
    return {"user": {"w": torch.arange(10.0), "b": torch.ones(3, dtype=torch.bfloat16)}, "torchft": {"step": 3}}


def big_state(mib: int = 64) -> dict[str, Any]:
    return {"w": torch.full((mib << 20,), CLEAN, dtype=torch.uint8)}


def receive(transport: Any, source: Any, step: int, seconds: float = 30) -> Any:
    return transport.recv_checkpoint(0, source.metadata(), step, timedelta(seconds=seconds))


@contextlib.contextmanager
def in_background(function: Callable[..., Any], *arguments: Any) -> Iterator[concurrent.futures.Future]:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit(function, *arguments)


class Reader:
    """A receiver that reads as much as it is told to, and can stop in the middle of a transfer."""

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

    def read_rest(self, pause: float = 0) -> bytes:
        """Everything that still comes, up to the end or the cut of the connection."""
        with contextlib.suppress(ConnectionError):
            while part := self.socket.recv(1 << 20):
                self.data += part
                time.sleep(pause)
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


@pytest.fixture
def reader() -> Iterator[Callable[..., Reader]]:
    with contextlib.ExitStack() as stack:

        def open_one(*arguments: Any) -> Reader:
            made = Reader(*arguments)
            stack.enter_context(made.socket)
            return made

        yield open_one


class SlowRelay:
    """Stands before a source and passes its answers on: `budget` bytes at full speed, then one every 50 ms, or none."""

    def __init__(self, metadata: str, budget: int, *, drip: bool) -> None:
        parts = urllib.parse.urlsplit(metadata)
        self.source = ("127.0.0.1", parts.port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.metadata = parts._replace(netloc=f"127.0.0.1:{self.listener.getsockname()[1]}").geturl()
        self.budget = budget
        self.drip = drip
        self.closed = threading.Event()
        self.sockets = [self.listener]
        self.threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        self.threads.append(threading.Thread(target=function, args=arguments, daemon=True))
        self.threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                self.sockets.append(client)
                server = socket.create_connection(self.source)
                self.sockets.append(server)
                self._start(self._requests, client, server)
                self._start(self._answers, server, client)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := client.recv(1 << 16):
                server.sendall(part)
            server.shutdown(socket.SHUT_WR)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := server.recv(1 << 16):
                quick = max(0, min(len(part), self.budget))
                self.budget -= quick
                client.sendall(part[:quick])
                for byte in part[quick:]:
                    if self.closed.wait(0.05):
                        return
                    if self.drip:
                        client.sendall(bytes([byte]))
            client.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.closed.set()
        for one in self.sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self.threads:
            thread.join(10)


# ---------------------------------------------------------------------------------------------------------------------
# Waiting, steps, timeouts


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_starts_disallowed(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    transport = open_transport(num_chunks)
    with pytest.raises(Exception, match=TIMED_OUT):
        receive(transport, transport, 1, seconds=0.5)


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_receive_before_the_first_send_waits_for_it(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(num_chunks), open_transport(num_chunks)
    with in_background(receive, target, source, 3) as received:
        time.sleep(0.5)
        assert not received.done()
        source.send_checkpoint([1], 3, small_state(), TIMEOUT)
        assert_same_state(received.result(20), small_state())


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_receive_waits_while_disallowed_again(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(num_chunks), open_transport(num_chunks)
    source.send_checkpoint([1], 1, small_state(), TIMEOUT)
    source.disallow_checkpoint()
    with in_background(receive, target, source, 2) as received:
        time.sleep(0.3)
        assert not received.done()
        source.send_checkpoint([1], 2, {"new": torch.ones(2)}, TIMEOUT)
        assert_same_state(received.result(20), {"new": torch.ones(2)})


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_wrong_step(num_chunks: int, open_transport: Callable[..., Any], ours: bool) -> None:
    transport = open_transport(num_chunks)
    transport.send_checkpoint([1], 2345, small_state(), TIMEOUT)
    expected = r"HTTP Error 400.*invalid checkpoint requested, serving 2345 but got step=1234"
    with pytest.raises(urllib.error.HTTPError, match=expected) as caught:
        receive(transport, transport, 1234)
    assert caught.value.code == 400
    caught.value.close()
    if ours:
        import tensorferry

        assert isinstance(caught.value, tensorferry.WrongStep)
        assert isinstance(caught.value, tensorferry.TensorferryError)


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_source_moves_on_while_a_receiver_waits(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(num_chunks), open_transport(num_chunks)
    with in_background(receive, target, source, 2) as received:
        time.sleep(0.3)
        source.send_checkpoint([1], 3, small_state(), TIMEOUT)
        with pytest.raises(urllib.error.HTTPError, match=r"Error 400.*serving 3 but got step=2") as caught:
            received.result(20)
        caught.value.close()


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_zero_timeout(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    transport = open_transport(num_chunks)
    transport.send_checkpoint([1], 1, small_state(), TIMEOUT)
    with pytest.raises(urllib.error.URLError, match="urlopen error"):
        receive(transport, transport, 1, seconds=0)
    assert_same_state(receive(transport, transport, 1), small_state())


@pytest.mark.parametrize("num_chunks", [0, 3])
@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.3])
def test_timeout_while_disallowed(
    num_chunks: int, seconds: float, open_transport: Callable[..., Any], ours: bool
) -> None:
    source, target = open_transport(num_chunks), open_transport(num_chunks)
    started = time.monotonic()
    with pytest.raises(Exception, match=TIMED_OUT) as caught:
        receive(target, source, 3, seconds)
    assert time.monotonic() - started < seconds + 1
    if ours:
        import tensorferry

        assert isinstance(caught.value, tensorferry.FetchTimeout)
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, urllib.error.URLError)
    # torchft's chunked receiver makes one thread per chunk, and they end with it; the source is as good as before.
    source.send_checkpoint([1], 3, small_state(), TIMEOUT)
    assert_same_state(receive(target, source, 3), small_state())


@pytest.mark.beyond_torchft
def test_abandoned_requests_delay_nobody(open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(), open_transport()
    for _ in range(8):
        with pytest.raises(Exception, match=TIMED_OUT):
            receive(target, source, 3, 0.1)
    started = time.monotonic()
    source.send_checkpoint([1], 3, small_state(), TIMEOUT)
    assert_same_state(receive(target, source, 3), small_state())
    source.disallow_checkpoint()
    assert time.monotonic() - started < 5


@pytest.mark.beyond_torchft
def test_the_sources_own_timeout_ends_a_wait(open_transport: Callable[..., Any]) -> None:
    source = open_transport(timeout=timedelta(seconds=0.5))
    started = time.monotonic()
    with contextlib.closing(connect(source)) as connection:
        connection.request("GET", path(source, "1.safetensors"))
        response = connection.getresponse()
        assert response.status == 503
        response.read()
    assert 0.3 < time.monotonic() - started < 10
    with pytest.raises(urllib.error.URLError):
        receive(source, source, 1, seconds=3)
    assert time.monotonic() - started < 14


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("num_chunks", [0, 3])
@pytest.mark.parametrize("drip", [True, False], ids=["drip", "stall"])
@pytest.mark.parametrize("budget", [0, 20, 600, 3 << 20], ids=["status", "head", "manifest", "payload"])
def test_one_deadline_for_the_whole_receive(
    num_chunks: int, drip: bool, budget: int, open_transport: Callable[..., Any]
) -> None:
    """A source that sends a byte now and then is never out of time for a timeout per read."""
    import tensorferry

    source, target = open_transport(num_chunks), open_transport(num_chunks)
    source.send_checkpoint([1], 1, big_state(8), TIMEOUT)
    relay = SlowRelay(source.metadata(), budget, drip=drip)
    try:
        started = time.monotonic()
        with pytest.raises(tensorferry.FetchTimeout, match=TIMED_OUT):
            target.recv_checkpoint(0, relay.metadata, 1, timedelta(seconds=1))
        assert time.monotonic() - started < 2
    finally:
        relay.close()
    assert_same_state(receive(target, source, 1), big_state(8))


@pytest.mark.beyond_torchft
def test_a_source_that_never_accepts(open_transport: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        metadata = f"http://127.0.0.1:{listener.getsockname()[1]}/{'0' * 32}/checkpoint/"
        started = time.monotonic()
        with pytest.raises(urllib.error.URLError, match=TIMED_OUT):
            open_transport().recv_checkpoint(0, metadata, 1, timedelta(seconds=1))
        assert time.monotonic() - started < 2


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_nobody_listens(num_chunks: int, open_transport: Callable[..., Any], ours: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(urllib.error.URLError, match="refused") as caught:
        open_transport(num_chunks).recv_checkpoint(0, f"http://127.0.0.1:{port}/{'0' * 32}/checkpoint/", 1, TIMEOUT)
    assert time.monotonic() - started < 10
    if ours:
        import tensorferry

        assert isinstance(caught.value, tensorferry.ConnectError)
        assert isinstance(caught.value, ConnectionError)


def test_host_without_an_address(open_transport: Callable[..., Any]) -> None:
    with pytest.raises(urllib.error.URLError):
        open_transport().recv_checkpoint(0, "http://no-such-host.invalid:1/checkpoint/", 1, timedelta(seconds=10))


@pytest.mark.parametrize("metadata", ["", "nonsense", "http://", "http://127.0.0.1:99999/checkpoint/", "ftp://a/b/"])
def test_metadata_that_is_none(metadata: str, open_transport: Callable[..., Any]) -> None:
    with pytest.raises((ValueError, OSError)):
        open_transport().recv_checkpoint(0, metadata, 1, timedelta(seconds=5))


# ---------------------------------------------------------------------------------------------------------------------
# Sending, disallowing, and who holds what


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_many_rounds(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(num_chunks), open_transport(num_chunks)
    for step in range(1, 30):
        state = {"w": torch.full((100,), float(step)), "step": step}
        source.send_checkpoint([1], step, state, TIMEOUT)
        assert_same_state(receive(target, source, step), state)
        source.disallow_checkpoint()


def test_disallow_is_idempotent_and_quick(open_transport: Callable[..., Any]) -> None:
    transport = open_transport()
    transport.send_checkpoint([1], 1, small_state(), TIMEOUT)
    started = time.monotonic()
    for _ in range(1000):
        transport.disallow_checkpoint()
    assert time.monotonic() - started < 2


def test_the_same_step_again(open_transport: Callable[..., Any]) -> None:
    transport = open_transport()
    for value in (1.0, 2.0):
        transport.send_checkpoint([1], 5, {"w": torch.tensor(value)}, TIMEOUT)
        assert receive(transport, transport, 5)["w"] == value


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_send_without_disallow_in_between(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    transport = open_transport(num_chunks)
    transport.send_checkpoint([1], 1, small_state(), TIMEOUT)
    transport.send_checkpoint([1], 2, {"new": torch.ones(2)}, TIMEOUT)
    assert_same_state(receive(transport, transport, 2), {"new": torch.ones(2)})
    with pytest.raises(urllib.error.HTTPError, match="serving 2 but got step=1") as caught:
        receive(transport, transport, 1)
    caught.value.close()


def test_allow_checkpoint_renames_the_step(open_transport: Callable[..., Any]) -> None:
    transport = open_transport()
    transport.send_checkpoint([1], 1, small_state(), TIMEOUT)
    for _ in range(3):
        transport.allow_checkpoint(9)
    assert_same_state(receive(transport, transport, 9), small_state())


def test_transfer_begun_before_the_next_send_ends_with_the_old_state(
    open_transport: Callable[..., Any], reader: Callable[..., Reader], ours: bool
) -> None:
    source = open_transport()
    source.send_checkpoint([1], 1, big_state(), TIMEOUT)
    slow = reader(f"{source.metadata()}1" + (".safetensors" if ours else "/full"))
    slow.read_to(1 << 20)
    newer = {"w": torch.full((64 << 20,), POISON, dtype=torch.uint8)}
    source.send_checkpoint([1], 2, newer, TIMEOUT)
    body = slow.read_rest()
    assert body.count(bytes([CLEAN])) >= 64 << 20
    assert bytes([POISON]) * 64 not in body


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_several_receivers_at_once(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    source = open_transport(num_chunks)
    targets = [open_transport(num_chunks) for _ in range(4)]
    state = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(16)}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        received = [pool.submit(receive, target, source, 1) for target in targets * 2]
        time.sleep(0.1)
        source.send_checkpoint([1, 2, 3, 4], 1, state, TIMEOUT)
        for one in received:
            assert_same_state(one.result(30), state)


def test_ranks_do_not_matter(open_transport: Callable[..., Any]) -> None:
    source = open_transport()
    source.send_checkpoint([], 1, small_state(), TIMEOUT)
    assert_same_state(source.recv_checkpoint(77, source.metadata(), 1, TIMEOUT), small_state())


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_containers_are_those_of_the_send(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    transport = open_transport(num_chunks)
    state = small_state()
    transport.send_checkpoint([1], 1, state, TIMEOUT)
    state["user"]["later"] = torch.ones(3)
    state["torchft"]["step"] = 99
    del state["user"]["b"]
    assert_same_state(receive(transport, transport, 1), small_state())


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_borrowed_tensors_are_live(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    transport = open_transport(num_chunks)
    state = small_state()
    transport.send_checkpoint([1], 1, state, TIMEOUT)
    state["user"]["w"].fill_(5)
    assert_same_state(receive(transport, transport, 1), state)


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("num_chunks", [0, 3])
def test_copied_tensors_are_those_of_the_send(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    transport = open_transport(num_chunks, snapshot="copy")
    base = torch.arange(24.0)
    state = {**small_state(), "views": [base[::2], base.view(4, 6).t()], "sparse": torch.eye(3).to_sparse()}
    transport.send_checkpoint([1], 1, state, TIMEOUT)
    expected = {**small_state(), "sparse": torch.eye(3).to_sparse()}
    first = torch.arange(24.0)
    expected["views"] = [first[::2], first.view(4, 6).t()]
    expected = {key: expected[key] for key in state}
    for tensor in [base, state["user"]["w"], state["user"]["b"], state["sparse"]._values()]:
        tensor.fill_(5)
    assert_same_state(receive(transport, transport, 1), expected)
    # And once more from what is now the state.
    transport.send_checkpoint([1], 2, state, TIMEOUT)
    assert_same_state(receive(transport, transport, 2), state)


@pytest.mark.beyond_torchft
def test_disallow_waits_for_a_transfer_that_gets_on(
    open_transport: Callable[..., Any], reader: Callable[..., Reader]
) -> None:
    source = open_transport(timeout=timedelta(seconds=20))
    state = big_state()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    slow = reader(f"{source.metadata()}1.safetensors")
    slow.read_to(1 << 20)

    def resume() -> bytes:
        time.sleep(0.7)
        return slow.read_rest()

    with in_background(resume) as rest:
        source.disallow_checkpoint()
        state["w"].fill_(POISON)
        body = rest.result(30)
    assert len(body) == slow.content_length
    assert bytes([POISON]) not in body


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("resource", [".safetensors", "/full", "/1"])
@pytest.mark.parametrize("readers", [1, 5])
def test_a_stuck_reader_is_cut_and_never_reads_the_next_step(
    resource: str, readers: int, open_transport: Callable[..., Any], reader: Callable[..., Reader]
) -> None:
    """Once disallow has returned, the trainer writes to its tensors: none of that may reach a receiver."""
    source = open_transport(num_chunks=1 if resource == "/1" else 0, timeout=timedelta(seconds=2))
    resource = resource.replace("/1", "/0")
    state = big_state()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    stuck = [reader(f"{source.metadata()}1{resource}") for _ in range(readers)]
    for one in stuck:
        one.read_to(1 << 20)
    started = time.monotonic()
    source.disallow_checkpoint()
    assert time.monotonic() - started < 5
    state["w"].fill_(POISON)
    time.sleep(0.2)
    for one in stuck:
        body = one.read_rest()
        assert bytes([POISON]) not in body
        assert body.count(bytes([CLEAN])) < 64 << 20, "the reader was not stuck: the test shows nothing"
    # Nothing is left of the trouble.
    started = time.monotonic()
    source.disallow_checkpoint()
    source.send_checkpoint([1], 2, small_state(), TIMEOUT)
    assert_same_state(receive(open_transport(), source, 2), small_state())
    source.disallow_checkpoint()
    assert time.monotonic() - started < 5


@pytest.mark.beyond_torchft
def test_a_slow_reader_is_cut_when_the_time_is_over(
    open_transport: Callable[..., Any], reader: Callable[..., Reader]
) -> None:
    """It makes progress all the time, but the trainer cannot wait for it for ever."""
    source = open_transport(timeout=timedelta(seconds=1))
    state = big_state(256)
    source.send_checkpoint([1], 1, state, TIMEOUT)
    slow = reader(f"{source.metadata()}1.safetensors")
    slow.read_to(1 << 20)
    with in_background(slow.read_rest, 0.05) as rest:
        started = time.monotonic()
        source.disallow_checkpoint()
        assert time.monotonic() - started < 4
        state["w"].fill_(POISON)
        assert bytes([POISON]) not in rest.result(60)


@pytest.mark.beyond_torchft
def test_a_new_receive_does_not_hold_up_disallow(
    open_transport: Callable[..., Any], reader: Callable[..., Reader]
) -> None:
    """While disallow waits for one reader, others are not let in."""
    source = open_transport(timeout=timedelta(seconds=3))
    source.send_checkpoint([1], 1, big_state(), TIMEOUT)
    stuck = reader(f"{source.metadata()}1.safetensors")
    stuck.read_to(1 << 20)
    with in_background(source.disallow_checkpoint) as disallowed:
        time.sleep(0.5)
        late = reader(f"{source.metadata()}1.safetensors")
        late.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            late.read_to(1)
        disallowed.result(10)


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("resource", [".safetensors", "/full"])
def test_a_private_copy_goes_on_serving_what_had_begun(
    resource: str, open_transport: Callable[..., Any], reader: Callable[..., Reader]
) -> None:
    source = open_transport(snapshot="copy", timeout=timedelta(seconds=20))
    state = big_state()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    slow = reader(f"{source.metadata()}1{resource}")
    slow.read_to(1 << 20)
    started = time.monotonic()
    source.disallow_checkpoint()
    assert time.monotonic() - started < 2
    state["w"].fill_(POISON)
    body = slow.read_rest()
    assert len(body) == slow.content_length
    assert body.count(bytes([CLEAN])) >= 64 << 20
    assert bytes([POISON]) not in body


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("snapshot", ["borrow", "copy"])
def test_a_state_is_never_torn(snapshot: str, open_transport: Callable[..., Any]) -> None:
    """A trainer that writes as soon as disallow has returned, and receivers that ask all the time."""
    import tensorferry

    source = open_transport(timeout=timedelta(seconds=5), snapshot=snapshot)
    weights = [torch.zeros(1 << 18) for _ in range(16)]
    stop, current = threading.Event(), [0]

    def keep_receiving() -> int:
        target, whole = open_transport(num_chunks=2), 0
        while not stop.is_set():
            step = current[0]
            try:
                state = receive(target, source, step, seconds=5)
            except tensorferry.TensorferryError:
                continue
            assert state["step"] == step
            for weight in state["weights"]:
                assert float(weight.min()) == float(weight.max()) == step
            whole += 1
        return whole

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        receivers = [pool.submit(keep_receiving) for _ in range(3)]
        try:
            for step in range(1, 40):
                for weight in weights:
                    weight.fill_(step)
                current[0] = step
                source.send_checkpoint([1], step, {"weights": list(weights), "step": step}, TIMEOUT)
                time.sleep(0.02 if step % 3 else 0.1)
                source.disallow_checkpoint()
        finally:
            stop.set()
            # Whoever waits for a step now gets an answer.
            source.send_checkpoint([1], 1000, {}, TIMEOUT)
        assert sum(one.result(30) for one in receivers) > 0


def _is_freed(*references: weakref.ref) -> bool:
    """Owners may be dropped by another thread: give it a moment."""
    for _ in range(100):
        gc.collect()
        if all(reference() is None for reference in references):
            return True
        time.sleep(0.05)
    return False


class Anything:
    pass


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("snapshot", ["borrow", "copy"])
@pytest.mark.parametrize("end", ["disallow", "send", "shutdown"])
@pytest.mark.parametrize("received", [True, False])
def test_state_is_let_go(snapshot: str, end: str, received: bool, open_transport: Callable[..., Any]) -> None:
    transport = open_transport(num_chunks=2, snapshot=snapshot, trust_pickle=True)
    state = {
        "w": torch.ones(1 << 20),
        "p": torch.nn.Parameter(torch.ones(3)),
        "view": torch.ones(9)[::2],
        "o": Anything(),
    }
    held = [weakref.ref(value) for value in state.values()]
    transport.send_checkpoint([1], 1, state, TIMEOUT)
    if received:
        receive(transport, transport, 1)
    if end == "disallow":
        transport.disallow_checkpoint()
    elif end == "send":
        transport.send_checkpoint([1], 2, {}, TIMEOUT)
    else:
        transport.shutdown()
    del state
    assert _is_freed(*held), [reference() is None for reference in held]


@pytest.mark.beyond_torchft
def test_received_state_is_let_go(open_transport: Callable[..., Any]) -> None:
    transport = open_transport(num_chunks=2)
    transport.send_checkpoint([1], 1, {"w": torch.ones(1 << 20), "v": torch.ones(9)[::2]}, TIMEOUT)
    state = receive(transport, transport, 1)
    held = [weakref.ref(value) for value in state.values()]
    del state
    assert _is_freed(*held)


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("wait", [True, False])
def test_shutdown_stops_serving(wait: bool, open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(), open_transport()
    source.send_checkpoint([1], 1, small_state(), TIMEOUT)
    receive(target, source, 1)
    started = time.monotonic()
    source.shutdown(wait=wait)
    time.sleep(0 if wait else 0.5)
    with pytest.raises(urllib.error.URLError):
        receive(target, source, 1, seconds=3)
    source.disallow_checkpoint()
    source.shutdown(wait=wait)
    source.shutdown()
    assert time.monotonic() - started < 10
    assert source.metadata().startswith("http://")


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("wait", [True, False])
def test_shutdown_in_the_middle_of_a_transfer(
    wait: bool, open_transport: Callable[..., Any], reader: Callable[..., Reader]
) -> None:
    source = open_transport(timeout=timedelta(seconds=3))
    state = big_state()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    stuck = reader(f"{source.metadata()}1.safetensors")
    stuck.read_to(1 << 20)
    started = time.monotonic()
    source.shutdown(wait=wait)
    assert time.monotonic() - started < (8 if wait else 1)
    if wait:
        state["w"].fill_(POISON)
        assert bytes([POISON]) not in stuck.read_rest()


@pytest.mark.beyond_torchft
def test_shutdown_while_a_receiver_waits(open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(), open_transport()
    with in_background(receive, target, source, 1, 4) as received:
        time.sleep(0.3)
        source.shutdown()
        with pytest.raises(urllib.error.URLError):
            received.result(6)


# ---------------------------------------------------------------------------------------------------------------------
# The class


def test_metadata_is_a_constant_url(open_transport: Callable[..., Any]) -> None:
    transport = open_transport()
    metadata = transport.metadata()
    assert isinstance(metadata, str)
    assert metadata.startswith("http://")
    assert metadata.endswith("/checkpoint/")
    transport.send_checkpoint([1], 1, small_state(), TIMEOUT)
    transport.disallow_checkpoint()
    assert transport.metadata() == transport.address() == metadata


@pytest.mark.beyond_torchft
def test_metadata_is_a_capability(open_transport: Callable[..., Any]) -> None:
    tokens = set()
    for _ in range(4):
        parts = urllib.parse.urlsplit(open_transport().metadata())
        tokens.add(re.fullmatch(r"/([0-9a-f]{32})/checkpoint/", parts.path).group(1))
        assert parts.hostname == socket.gethostname().lower()
    assert len(tokens) == 4


def test_subscriptable(transport_class: Any) -> None:
    transport = transport_class[dict[str, int]](timeout=timedelta(seconds=10), num_chunks=0)
    try:
        transport.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
        assert receive(transport, transport, 1) == {"a": 1}
    finally:
        transport.shutdown()
        if hasattr(transport, "_server"):
            getattr(transport._server, "server_close", lambda: None)()


def test_is_a_checkpoint_transport(transport_class: Any, open_transport: Callable[..., Any]) -> None:
    base = pytest.importorskip("torchft.checkpointing").CheckpointTransport
    assert isinstance(open_transport(), base)
    assert issubclass(transport_class, base)


@pytest.mark.beyond_torchft
def test_constructor(transport_class: Any) -> None:
    for made in (transport_class(TIMEOUT), transport_class(TIMEOUT, 2), transport_class(timeout=TIMEOUT, num_chunks=2)):
        made.shutdown()
    with pytest.raises(TypeError):
        transport_class(TIMEOUT, 2, None)
    with pytest.raises(ValueError, match="snapshot"):
        transport_class(TIMEOUT, snapshot="later")
    with pytest.raises(ValueError, match="num_chunks"):
        transport_class(TIMEOUT, num_chunks=-1)


# ---------------------------------------------------------------------------------------------------------------------
# HTTP


def connect(transport: Any) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", urllib.parse.urlsplit(transport.metadata()).port, timeout=30)


def path(transport: Any, resource: str) -> str:
    return urllib.parse.urlsplit(transport.metadata()).path + resource


class Site:
    """One connection to one transport, kept alive over all requests."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.connection = connect(transport)

    def __call__(
        self, method: str, resource: str, headers: dict[str, str] | None = None, *, absolute: bool = False
    ) -> tuple[http.client.HTTPResponse, bytes]:
        self.connection.request(method, resource if absolute else path(self.transport, resource), headers=headers or {})
        response = self.connection.getresponse()
        return response, response.read()


@pytest.fixture
def site(open_transport: Callable[..., Any]) -> Iterator[Site]:
    transport = open_transport()
    transport.send_checkpoint([1], 1, {"w": torch.arange(1000.0), "o": {1, 2}}, TIMEOUT)
    made = Site(transport)
    with contextlib.closing(made.connection):
        yield made


@pytest.mark.beyond_torchft
class TestHTTP:
    RESOURCE = "1.safetensors"

    def test_get_and_head(self, site: Site) -> None:
        response, body = site("GET", self.RESOURCE)
        assert response.status == 200
        assert response.version == 11
        assert int(response.headers["Content-Length"]) == len(body) > 4000
        assert response.headers["Accept-Ranges"] == "bytes"
        assert re.fullmatch(r'"[^"]+"', response.headers["ETag"]), "a strong validator"
        assert response.headers["Content-Type"]
        head, nothing = site("HEAD", self.RESOURCE)
        assert (head.status, nothing) == (200, b"")
        for name in ("Content-Length", "Accept-Ranges", "ETag", "Content-Type"):
            assert head.headers[name] == response.headers[name]

    @pytest.mark.parametrize(
        ("spec", "first", "last"),
        [
            ("0-0", 0, 0),
            ("0-7", 0, 7),
            ("8-99", 8, 99),
            ("100-", 100, -1),
            ("-16", -16, -1),
            ("-1", -1, -1),
            ("-99999999", 0, -1),
            ("10-99999999", 10, -1),
            ("0-", 0, -1),
        ],
    )
    def test_range(self, site: Site, spec: str, first: int, last: int) -> None:
        _, whole = site("GET", self.RESOURCE)
        size = len(whole)
        first, last = first % size, last % size
        response, body = site("GET", self.RESOURCE, {"Range": f"bytes={spec}"})
        assert response.status == 206
        assert response.headers["Content-Range"] == f"bytes {first}-{last}/{size}"
        assert int(response.headers["Content-Length"]) == last - first + 1
        assert body == whole[first : last + 1]

    def test_every_byte_by_itself(self, site: Site) -> None:
        _, whole = site("GET", self.RESOURCE)
        for start in range(0, len(whole), 7):
            response, body = site("GET", self.RESOURCE, {"Range": f"bytes={start}-{start + 6}"})
            assert response.status == 206
            assert body == whole[start : start + 7]

    @pytest.mark.parametrize("spec", ["{size}-", "{size}-{size}", "99999999-999999999", "-0"])
    def test_range_not_satisfiable(self, site: Site, spec: str) -> None:
        size = len(site("GET", self.RESOURCE)[1])
        response, _ = site("GET", self.RESOURCE, {"Range": f"bytes={spec.format(size=size)}"})
        assert response.status == 416
        assert response.headers["Content-Range"] == f"bytes */{size}"

    @pytest.mark.parametrize("value", ["lines=0-1", "bytes", "bytes=", "bytes=a-b", "bytes=--1", "5-6"])
    def test_range_that_is_none_is_ignored_or_rejected(self, site: Site, value: str) -> None:
        _, whole = site("GET", self.RESOURCE)
        response, body = site("GET", self.RESOURCE, {"Range": value})
        assert response.status in (200, 400, 416)
        assert response.status != 200 or body == whole

    @pytest.mark.parametrize("value", ["bytes=7-5", "bytes=0-18446744073709551616", "bytes=18446744073709551616-"])
    def test_range_of_odd_numbers(self, site: Site, value: str) -> None:
        assert site("GET", self.RESOURCE, {"Range": value})[0].status in (200, 206, 400, 416)

    def test_several_ranges(self, site: Site) -> None:
        _, whole = site("GET", self.RESOURCE)
        response, body = site("GET", self.RESOURCE, {"Range": "bytes=0-1,4-5"})
        assert response.status in (200, 206)
        assert response.status != 200 or body == whole
        assert response.status != 206 or response.headers["Content-Type"].startswith("multipart/byteranges")

    def test_range_of_a_head_request_is_ignored(self, site: Site) -> None:
        """RFC 9110 14.2: Range is defined for GET only."""
        whole = site("HEAD", self.RESOURCE)[0]
        response, _ = site("HEAD", self.RESOURCE, {"Range": "bytes=0-7"})
        assert response.status == 200
        assert response.headers["Content-Length"] == whole.headers["Content-Length"]

    def test_if_match(self, site: Site) -> None:
        tag = site("HEAD", self.RESOURCE)[0].headers["ETag"]
        for good in (tag, "*", f'"other", {tag}'):
            assert site("GET", self.RESOURCE, {"If-Match": good})[0].status == 200
            assert site("GET", self.RESOURCE, {"If-Match": good, "Range": "bytes=0-3"})[0].status == 206
        for bad in ('"other"', f"W/{tag}", '"a", "b"'):
            response, body = site("GET", self.RESOURCE, {"If-Match": bad})
            assert response.status == 412
            assert len(body) < 1000
            assert site("GET", self.RESOURCE, {"If-Match": bad, "Range": "bytes=0-3"})[0].status == 412
            assert site("HEAD", self.RESOURCE, {"If-Match": bad})[0].status == 412

    def test_if_none_match(self, site: Site) -> None:
        tag = site("HEAD", self.RESOURCE)[0].headers["ETag"]
        for known in (tag, "*", f'"other", {tag}', f"W/{tag}"):
            response, body = site("GET", self.RESOURCE, {"If-None-Match": known})
            assert (response.status, body) == (304, b"")
            assert response.headers["ETag"] == tag
            assert site("HEAD", self.RESOURCE, {"If-None-Match": known})[0].status == 304
        assert site("GET", self.RESOURCE, {"If-None-Match": '"other"'})[0].status == 200
        both = {"If-Match": '"other"', "If-None-Match": tag}
        assert site("GET", self.RESOURCE, both)[0].status == 412, "If-Match comes first"

    def test_if_range(self, site: Site) -> None:
        tag = site("HEAD", self.RESOURCE)[0].headers["ETag"]
        assert site("GET", self.RESOURCE, {"If-Range": tag, "Range": "bytes=0-3"})[0].status == 206
        for stale in ('"other"', f"W/{tag}", "Sat, 21 Nov 2026 08:00:00 GMT"):
            response, body = site("GET", self.RESOURCE, {"If-Range": stale, "Range": "bytes=0-3"})
            assert response.status == 200
            assert len(body) == int(response.headers["Content-Length"]) > 4000

    def test_etag_names_the_snapshot(self, site: Site, open_transport: Callable[..., Any]) -> None:
        other = open_transport()
        other.send_checkpoint([1], 1, {"w": torch.arange(1000.0), "o": {1, 2}}, TIMEOUT)
        tags = []
        for transport in (site.transport, site.transport, site.transport, other):
            transport.send_checkpoint([1], 1, {"w": torch.arange(1000.0), "o": {1, 2}}, TIMEOUT)
            with contextlib.closing(connect(transport)) as connection:
                connection.request("HEAD", path(transport, self.RESOURCE))
                response = connection.getresponse()
                response.read()
                tags.append(response.headers["ETag"])
        assert len(set(tags)) == 4

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
    def test_method_not_allowed(self, site: Site, method: str) -> None:
        response, _ = site(method, self.RESOURCE)
        assert response.status == 405
        assert {"GET", "HEAD"} <= {name.strip() for name in response.headers["Allow"].split(",")}

    def test_header_resource(self, site: Site) -> None:
        _, whole = site("GET", self.RESOURCE)
        response, header = site("GET", "1/header")
        assert response.status == 200
        assert int(response.headers["Content-Length"]) == len(header)
        size = 8 + int.from_bytes(whole[:8], "little")
        assert whole[:size].endswith(header)
        assert len(header) in (size, size - 8)
        assert site("HEAD", "1/header")[0].headers["Content-Length"] == str(len(header))

    def test_digests_resource(self, site: Site) -> None:
        response, digests = site("GET", "1/digests")
        assert response.status == 200
        assert int(response.headers["Content-Length"]) == len(digests) > 0
        assert site("HEAD", "1/digests")[0].headers["Content-Length"] == str(len(digests))

    @pytest.mark.parametrize("resource", ["2.safetensors", "2/header", "2/digests", "2/full", "2/metadata", "2/0"])
    def test_wrong_step(self, site: Site, resource: str) -> None:
        response, _ = site("GET", resource)
        assert response.status == 400
        assert response.reason == "invalid checkpoint requested, serving 1 but got step=2"

    @pytest.mark.parametrize(
        "resource",
        [
            "", "1", "1/", "1/nothing", "x.safetensors", "x/full", "1/full/more", "1/-1", "1/99", "1.safetensors/",
            "99999999999999999999999.safetensors", "-1.safetensors", "1/..%2f..%2f", "%00", "1.safetensors%00", "../",
        ],
    )  # fmt: skip
    def test_no_such_resource(self, site: Site, resource: str) -> None:
        assert 400 <= site("GET", resource)[0].status < 500
        assert 400 <= site("HEAD", resource)[0].status < 500

    @pytest.mark.parametrize("method", ["GET", "HEAD"])
    def test_without_the_random_part_all_is_404(self, site: Site, method: str) -> None:
        token = path(site.transport, "").split("/")[1]
        wrong = [token[:-1], token.upper() + "0", "0" * 32, token[1:] + token[0], f"{token}0", "", f"./{token}x"]
        paths = [
            "/",
            "/checkpoint/1/full",
            "/checkpoint/1.safetensors",
            "/metrics",
            "/checkpoint/",
            "/favicon.ico",
            "*",
        ]
        paths += [f"/{one}/checkpoint/1.safetensors" for one in wrong] + [f"/{one}/metrics" for one in wrong]
        for one in paths:
            assert site(method, one, absolute=True)[0].status == 404, one
        site.transport.disallow_checkpoint()
        for one in paths:
            assert site(method, one, absolute=True)[0].status == 404, one

    def test_health_and_metrics(self, site: Site) -> None:
        assert site("GET", "/healthz", absolute=True)[0].status == 200
        token = path(site.transport, "").split("/")[1]
        response, body = site("GET", f"/{token}/metrics", absolute=True)
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain")
        assert re.search(rb"(?m)^# TYPE tensorferry_\w+ (counter|gauge|histogram)$", body)
        site.transport.disallow_checkpoint()
        assert site("GET", "/healthz", absolute=True)[0].status == 200
        assert site("GET", f"/{token}/metrics", absolute=True)[0].status == 200

    def test_http_1_0(self, site: Site) -> None:
        with socket.create_connection(("127.0.0.1", site.connection.port), timeout=30) as old:
            old.sendall(f"GET {path(site.transport, self.RESOURCE)} HTTP/1.0\r\n\r\n".encode())
            answer = b"".join(iter(lambda: old.recv(1 << 16), b""))
        assert re.match(rb"HTTP/1\.[01] 200 ", answer)
        assert answer.partition(b"\r\n\r\n")[2] == site("GET", self.RESOURCE)[1]

    @pytest.mark.parametrize(
        "request_bytes",
        [
            b"nonsense\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        ],
        ids=["nonsense", "version", "tls", "long path", "many headers"],
    )
    def test_a_bad_request_harms_nobody(self, site: Site, request_bytes: bytes) -> None:
        bad = socket.create_connection(("127.0.0.1", site.connection.port), timeout=10)
        with bad, contextlib.suppress(OSError):  # it may hang up before it has read all of it
            bad.sendall(request_bytes)
            bad.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: bad.recv(1 << 16), b""))
            assert not answer or re.match(rb"HTTP/1\.[01] [45]\d\d ", answer)
        assert_same_state(receive(site.transport, site.transport, 1), {"w": torch.arange(1000.0), "o": {1, 2}})

    def test_both_address_families(self, site: Site) -> None:
        for host in ("127.0.0.1", "::1"):
            try:
                connection = socket.create_connection((host, site.connection.port), timeout=10)
            except OSError as error:
                if host == "::1":
                    pytest.skip(f"no IPv6 here: {error}")
                raise
            connection.close()


@pytest.mark.beyond_torchft
@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
class TestCurl:
    @staticmethod
    def curl(*arguments: str) -> bytes:
        # A proxy in the environment is not what is tested here.
        return subprocess.run(
            ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "30", *arguments],
            check=True,
            capture_output=True,
            timeout=60,
        ).stdout

    def test_fetch_head_and_range(self, site: Site) -> None:
        url = f"{site.transport.metadata()}1.safetensors"
        whole = site("GET", "1.safetensors")[1]
        assert self.curl("--fail", url) == whole
        assert self.curl("--range", "8-15", url) == whole[8:16]
        assert self.curl("--range", "-4", url) == whole[-4:]
        head = self.curl("--head", url).decode().lower()
        assert head.startswith("http/1.1 200")
        assert f"content-length: {len(whole)}\r\n" in head

    def test_resume_a_download(self, site: Site, tmp_path: Path) -> None:
        whole = site("GET", "1.safetensors")[1]
        part = tmp_path / "1.safetensors"
        part.write_bytes(whole[:1234])
        self.curl("--continue-at", "-", "--output", str(part), f"{site.transport.metadata()}1.safetensors")
        assert part.read_bytes() == whole

    def test_etag_of_the_last_time(self, site: Site, tmp_path: Path) -> None:
        url, tag, out = f"{site.transport.metadata()}1.safetensors", str(tmp_path / "etag"), str(tmp_path / "out")
        self.curl("--etag-save", tag, "--output", out, url)
        code = self.curl("--etag-compare", tag, "--output", f"{out}.again", "--write-out", "%{http_code}", url)
        assert code == b"304"
