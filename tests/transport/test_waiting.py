"""What a receiver is promised while it waits: steps, timeouts, one deadline, and sources that are not there."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.error
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from equality import assert_same_state
from exchange import (
    TIMED_OUT,
    TIMEOUT,
    Listener,
    connect,
    in_background,
    path,
    receive,
    small_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.waits, pytest.mark.timeout(90)]


def test_a_receive_waits_for_the_first_send_and_after_a_withdrawal(open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(3), open_transport(3)
    for step in (1, 2):
        with in_background(receive, target, source, step) as received:
            time.sleep(0.3)
            assert not received.done()
            source.send_checkpoint([1], step, small_state(), TIMEOUT)
            assert_same_state(received.result(20), small_state())
        source.disallow_checkpoint()
    # Once the source has moved on, the receive ends.
    with in_background(receive, target, source, 3) as received:
        time.sleep(0.3)
        source.send_checkpoint([1], 4, small_state(), TIMEOUT)
        with pytest.raises(urllib.error.HTTPError, match=r"Error 400.*serving 4 but got step=3") as caught:
            received.result(20)
        caught.value.close()


def test_wrong_step(open_transport: Callable[..., Any], ours: bool) -> None:
    transport = open_transport(3)
    transport.send_checkpoint([1], 2345, small_state(), TIMEOUT)
    expected = r"HTTP Error 400.*invalid checkpoint requested, serving 2345 but got step=1234"
    with pytest.raises(urllib.error.HTTPError, match=expected) as caught:
        receive(transport, transport, 1234)
    assert caught.value.code == 400
    caught.value.close()
    if ours:
        import tensorferry

        assert isinstance(caught.value, tensorferry.errors.WrongStep)
        assert isinstance(caught.value, tensorferry.TensorferryError)


def test_zero_timeout(open_transport: Callable[..., Any]) -> None:
    transport = open_transport(3)
    transport.send_checkpoint([1], 1, small_state(), TIMEOUT)
    with pytest.raises(urllib.error.URLError, match="urlopen error"):
        receive(transport, transport, 1, seconds=0)
    assert_same_state(receive(transport, transport, 1), small_state())


def test_timeout_while_disallowed(open_transport: Callable[..., Any], ours: bool) -> None:
    source, target = open_transport(3), open_transport(3)
    for seconds in (0.001, 0.1, 0.1, 0.3):
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
    started = time.monotonic()
    source.send_checkpoint([1], 3, small_state(), TIMEOUT)
    assert_same_state(receive(target, source, 3), small_state())
    assert time.monotonic() - started < 5


@pytest.mark.beyond_torchft
def test_a_timeout_that_is_not_given_is_the_transports_own(open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(), open_transport(timeout=timedelta(seconds=1))
    source.send_checkpoint([1], 1, small_state())
    assert_same_state(target.recv_checkpoint(0, source.metadata(), 1, timeout=None), small_state())
    source.disallow_checkpoint()
    with pytest.raises(urllib.error.URLError, match=r"was given 1\.000 s"):
        target.recv_checkpoint(0, source.metadata(), 1)


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


def test_a_port_without_a_listener(open_transport: Callable[..., Any], ours: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(urllib.error.URLError, match="refused") as caught:
        open_transport(3).recv_checkpoint(0, f"http://127.0.0.1:{port}/{'0' * 32}/checkpoint/", 1, TIMEOUT)
    assert time.monotonic() - started < 10
    if ours:
        import tensorferry

        assert isinstance(caught.value, tensorferry.ConnectError)
        assert isinstance(caught.value, ConnectionError)


# ---------------------------------------------------------------------------------------------------------------------
# The text of a timeout


FILLING = b"""HTTP/1.1 206 Partial Content\r
Content-Range: bytes 0-1048575/9999999\r
Content-Length: 1048576\r
ETag: "a"\r
Tensorferry-Filling: 1\r
\r
"""
SILENT = "was asked and has not begun to answer"


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


@contextlib.contextmanager
def full() -> Iterator[str]:
    """Has a listener with a full queue, which drops connection attempts as a host that is down does."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            one = opened.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        time.sleep(0.2)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/{'0' * 32}/checkpoint/"


def timeout_of(target: Any, metadata: str, step: int, seconds: float = 1) -> str:
    """Returns the message of a receive that is out of time, without its source."""
    import tensorferry

    started = time.monotonic()
    with pytest.raises((tensorferry.FetchTimeout, tensorferry.ConnectError), match=TIMED_OUT) as caught:
        target.recv_checkpoint(0, metadata, step, timedelta(seconds=seconds))
    assert time.monotonic() - started < seconds + 1
    assert f"step {step}" in str(caught.value)
    return str(caught.value).replace(metadata.split("/")[2].rpartition("@")[2], "HOST")


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("options", [{}, {"secret": "0123456789abcdef"}, {"tls": True}], ids=["plain", "secret", "tls"])
def test_a_timeout_says_that_nothing_was_published_or_what_was_withdrawn(
    options: dict[str, Any], open_transport: Callable[..., Any]
) -> None:
    source, target = open_transport(**options), open_transport(**options)
    assert f"HOST {SILENT}: it has never published" in timeout_of(target, source.metadata(), 7, 3)
    source.send_checkpoint([1], 5, small_state(), TIMEOUT)
    source.disallow_checkpoint()
    assert "it has withdrawn what it published last, step 5" in timeout_of(target, source.metadata(), 6, 3)


@pytest.mark.beyond_torchft
@pytest.mark.parametrize(
    ("source", "said", "of_stock"),
    [
        (answering(b""), f"HOST {SILENT}: it accepts connections and answers nothing", f"HOST {SILENT}"),
        (answering(FILLING), "HOST was still copying its state", None),
        (full(), "has not answered a connection attempt", "has not answered a connection attempt"),
    ],
    ids=["silent", "copies", "down"],
)
def test_a_timeout_says_what_the_source_does(
    source: Any, said: str, of_stock: str | None, open_transport: Callable[..., Any]
) -> None:
    with source as metadata:
        assert said in timeout_of(open_transport(), metadata, 7)
        if of_stock:
            assert of_stock in timeout_of(open_transport(), metadata.replace("0" * 32 + "/", ""), 8)
