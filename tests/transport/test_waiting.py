"""What a receiver is promised while it waits: steps, timeouts, one deadline, and sources that are not there."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.error
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from equality import assert_same_state
from exchange import (
    TIMED_OUT,
    TIMEOUT,
    Listener,
    SlowRelay,
    big_state,
    connect,
    in_background,
    path,
    receive,
    small_state,
)
from nights import mostly_at_night

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.waits, pytest.mark.timeout(90)]


@pytest.mark.parametrize("num_chunks", mostly_at_night([0, 3]))
def test_starts_disallowed(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    transport = open_transport(num_chunks)
    with pytest.raises(Exception, match=TIMED_OUT):
        receive(transport, transport, 1, seconds=0.5)


@pytest.mark.parametrize("num_chunks", mostly_at_night([0, 3]))
def test_receive_before_the_first_send_waits_for_it(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(num_chunks), open_transport(num_chunks)
    with in_background(receive, target, source, 3) as received:
        time.sleep(0.5)
        assert not received.done()
        source.send_checkpoint([1], 3, small_state(), TIMEOUT)
        assert_same_state(received.result(20), small_state())


@pytest.mark.parametrize("num_chunks", mostly_at_night([0, 3]))
def test_receive_waits_while_disallowed_again(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(num_chunks), open_transport(num_chunks)
    source.send_checkpoint([1], 1, small_state(), TIMEOUT)
    source.disallow_checkpoint()
    with in_background(receive, target, source, 2) as received:
        time.sleep(0.3)
        assert not received.done()
        source.send_checkpoint([1], 2, {"new": torch.ones(2)}, TIMEOUT)
        assert_same_state(received.result(20), {"new": torch.ones(2)})


@pytest.mark.parametrize("num_chunks", mostly_at_night([0, 3]))
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


@pytest.mark.parametrize("num_chunks", mostly_at_night([0, 3]))
def test_source_moves_on_while_a_receiver_waits(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(num_chunks), open_transport(num_chunks)
    with in_background(receive, target, source, 2) as received:
        time.sleep(0.3)
        source.send_checkpoint([1], 3, small_state(), TIMEOUT)
        with pytest.raises(urllib.error.HTTPError, match=r"Error 400.*serving 3 but got step=2") as caught:
            received.result(20)
        caught.value.close()


@pytest.mark.parametrize("num_chunks", mostly_at_night([0, 3]))
def test_zero_timeout(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    transport = open_transport(num_chunks)
    transport.send_checkpoint([1], 1, small_state(), TIMEOUT)
    with pytest.raises(urllib.error.URLError, match="urlopen error"):
        receive(transport, transport, 1, seconds=0)
    assert_same_state(receive(transport, transport, 1), small_state())


@pytest.mark.parametrize("num_chunks", mostly_at_night([0, 3]))
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
def test_abandoned_requests_delay_no_other_request(open_transport: Callable[..., Any]) -> None:
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
@pytest.mark.parametrize("num_chunks", mostly_at_night([0, 3]))
@pytest.mark.parametrize("drip", mostly_at_night([True, False]))
@pytest.mark.parametrize("budget", [0, 20, 600, 3 << 20], ids=["status", "head", "manifest", "payload"])
def test_one_deadline_for_the_whole_receive(
    num_chunks: int, drip: bool, budget: int, open_transport: Callable[..., Any]
) -> None:
    """With a timeout per read, a source that sends a byte now and then would never be out of time."""
    import tensorferry

    # The relay affects only the network, so shared memory is switched off.
    source, target = (open_transport(num_chunks, same_host=False) for _ in range(2))
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


@pytest.mark.parametrize("num_chunks", mostly_at_night([0, 3]))
def test_a_port_without_a_listener(num_chunks: int, open_transport: Callable[..., Any], ours: bool) -> None:
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
# The text of a timeout


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Runs a source that sends `answer` to each request, and nothing else."""

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer)
        # The connection stays open.
        while connection.recv(4096):
            pass

    with Listener(serve) as listener:
        yield listener.metadata


def timeout_of(target: Any, metadata: str, step: int, seconds: float = 1) -> str:
    import tensorferry

    started = time.monotonic()
    with pytest.raises(tensorferry.FetchTimeout, match=TIMED_OUT) as caught:
        target.recv_checkpoint(0, metadata, step, timedelta(seconds=seconds))
    assert time.monotonic() - started < seconds + 1
    return str(caught.value)


def host(metadata: str) -> str:
    return metadata.split("/")[2].rpartition("@")[2]


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("options", [{}, {"secret": "0123456789abcdef"}, {"tls": True}], ids=["plain", "secret", "tls"])
def test_a_timeout_says_that_nothing_was_published_or_what_was_withdrawn(
    options: dict[str, Any], open_transport: Callable[..., Any]
) -> None:
    source, target = open_transport(**options), open_transport(**options)
    message = timeout_of(target, source.metadata(), 7)
    assert "step 7" in message
    assert f"{host(source.metadata())} was asked and has not begun to answer: it has never published" in message
    source.send_checkpoint([1], 5, small_state(), TIMEOUT)
    source.disallow_checkpoint()
    message = timeout_of(target, source.metadata(), 6)
    assert "step 6" in message
    assert f"{host(source.metadata())} was asked" in message
    assert "it has withdrawn what it published last, step 5" in message


@pytest.mark.beyond_torchft
def test_a_timeout_says_that_a_source_is_silent(open_transport: Callable[..., Any]) -> None:
    with answering(b"") as metadata:
        message = timeout_of(open_transport(), metadata, 7)
    assert "step 7" in message
    assert (
        f"{host(metadata)} was asked and has not begun to answer: it accepts connections and answers nothing" in message
    )
    with answering(b"") as metadata:
        stock = metadata.replace("0" * 32 + "/", "")
        message = timeout_of(open_transport(), stock, 7)
    assert f"step 7 from {host(metadata)}" in message
    assert f"{host(stock)} was asked and has not begun to answer" in message


@pytest.mark.beyond_torchft
def test_a_timeout_says_that_a_source_is_still_copying(open_transport: Callable[..., Any]) -> None:
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-1048575/9999999\r\nContent-Length: 1048576\r\n"
    with answering(head + b'ETag: "a"\r\nTensorferry-Filling: 1\r\n\r\n') as metadata:
        message = timeout_of(open_transport(), metadata, 7)
    assert f"{host(metadata)} was still copying its state" in message


@pytest.mark.beyond_torchft
def test_a_timeout_says_that_no_connection_attempt_was_answered(open_transport: Callable[..., Any]) -> None:
    import tensorferry

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    # A listener with a full queue drops connection attempts, as a host that is down does.
    filling = [socket.socket() for _ in range(4)]
    for one in filling:
        one.setblocking(False)
        one.connect_ex(listener.getsockname())
    time.sleep(0.2)
    try:
        for path, step in ((f"{'0' * 32}/checkpoint/", 7), ("checkpoint/", 8)):
            metadata = f"http://127.0.0.1:{listener.getsockname()[1]}/{path}"
            with pytest.raises((tensorferry.FetchTimeout, tensorferry.ConnectError), match=TIMED_OUT) as caught:
                open_transport().recv_checkpoint(0, metadata, step, timedelta(seconds=1))
            assert "has not answered a connection attempt" in str(caught.value)
            assert f"step {step} from {host(metadata)}" in str(caught.value)
    finally:
        for one in (*filling, listener):
            one.close()


@pytest.mark.beyond_torchft
def test_a_stock_source_that_drips_its_head(open_transport: Callable[..., Any]) -> None:
    def drip(connection: socket.socket) -> None:
        connection.recv(4096)
        for byte in b"HTTP/1.0 200 OK\r\nX: " + b"a" * 1000:
            if listener.closed.wait(0.1):
                return
            connection.sendall(bytes([byte]))

    with Listener(drip) as listener:
        message = timeout_of(open_transport(), f"http://127.0.0.1:{listener.port}/checkpoint/", 7)
    assert "step 7" in message
