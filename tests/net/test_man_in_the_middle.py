"""Somebody with another certificate at the address of a source is told nothing: not a byte of the path, by nobody."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from exchange import Listener
from hostile_servers import constant
from middle import ManInTheMiddle
from secured import SECRET, send
from tensorferry import HTTPTransport, InvalidArgument, UnprovenSource, cli
from tensorferry._native import HttpAnswer
from tensorferry.cli import exits
from tensorferry.dcp import PeerReader
from tensorferry.storage.peers import publication_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(120), pytest.mark.beyond_torchft]

SHORT = timedelta(seconds=20)
#: Every verb that takes the metadata of a peer, with that of the man in the middle as MIDDLE.
VERBS = {
    "top": ["top", "MIDDLE", "--once"],
    "top as JSON": ["top", "MIDDLE", "--once", "--json"],
    "inspect": ["inspect", "MIDDLE"],
    "inspect of a step": ["inspect", "MIDDLE", "--step", "3"],
    "digests": ["inspect", "MIDDLE", "--digests"],
    "pull": ["pull", "MIDDLE", "-o", "OUTPUT"],
    "pull of several": ["pull", "MIDDLE", "MIDDLE", "-o", "OUTPUT"],
    "pull with TLS": ["pull", "MIDDLE", "-o", "OUTPUT"],
    "diff": ["diff", "MIDDLE", "HONEST"],
    "diff the other way round": ["diff", "HONEST", "MIDDLE"],
    "doctor": ["doctor", "MIDDLE"],
    "convert": ["convert", "MIDDLE", "OUTPUT", "--to", "safetensors"],
    "verify": ["verify", "MIDDLE"],
    "serve": ["serve", "MIDDLE"],
}


@pytest.fixture
def source() -> Iterator[HTTPTransport]:
    transport = HTTPTransport(SHORT, tls=True, same_host=False, advertise="127.0.0.1")
    send(transport)
    yield transport
    transport.shutdown()


@pytest.fixture
def middle(tmp_path: Path) -> Iterator[ManInTheMiddle]:
    with ManInTheMiddle(tmp_path) as listening:
        yield listening


def took_notice(middle: ManInTheMiddle, source: HTTPTransport, *, connected: bool = True) -> None:
    """Makes sure that he was asked, and was told nothing."""
    assert not connected or middle.connections
    assert (middle.told, middle.clear) == (b"", b"")
    assert source.metadata().split("/")[3].encode() not in middle.told + middle.clear


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_tells_him_anything(
    verb: str, source: HTTPTransport, middle: ManInTheMiddle, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = {
        "MIDDLE": middle.instead_of(source.metadata()),
        "HONEST": source.metadata(),
        "OUTPUT": str(tmp_path / "out"),
    }
    status = cli.main([values.get(argument, argument) for argument in VERBS[verb]])
    said = capfd.readouterr()
    assert status not in (exits.OK, exits.BUG), said
    # These take no peers.
    asks = verb not in ("convert", "verify", "serve")
    assert not asks or "is not the source its URL names" in said.out + said.err, said
    took_notice(middle, source, connected=asks)
    assert not (tmp_path / "out").exists()


def receive(metadata: str, **options: Any) -> Any:
    transport = HTTPTransport(SHORT, **options)
    try:
        return transport.recv_checkpoint(0, metadata, 3, SHORT)
    finally:
        transport.shutdown()


DOORS: dict[str, Callable[[str], Any]] = {
    "recv_checkpoint": receive,
    "recv_checkpoint with a secret": lambda metadata: receive(metadata, secret=SECRET),
    "recv_checkpoint with TLS": lambda metadata: receive(metadata, tls=True),
    "recv_checkpoint of several": lambda metadata: receive(f"{metadata} {metadata}"),
    "PeerReader": lambda metadata: PeerReader(publication_metadata(3, [metadata]), timeout=SHORT).read_metadata(),
    "PeerReader of two": lambda metadata: PeerReader(
        publication_metadata(3, [metadata, metadata]), timeout=SHORT
    ).read_metadata(),
    "one answer": lambda metadata: HttpAnswer.open(metadata, "3/full", timeout=20),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_door_tells_him_anything(door: str, source: HTTPTransport, middle: ManInTheMiddle) -> None:
    with pytest.raises(UnprovenSource, match="fingerprint"):
        DOORS[door](middle.instead_of(source.metadata()))
    took_notice(middle, source)


def test_a_proxy_in_the_environment_is_not_asked(
    source: HTTPTransport, middle: ManInTheMiddle, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    proxy = middle.instead_of(source.metadata()).partition("@")[2].partition("/")[0]
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{proxy}")
    plain = HTTPTransport(SHORT, same_host=False, advertise="127.0.0.1")
    send(plain)
    for transport in (source, plain):
        assert cli.main(["top", transport.metadata(), "--once"]) == exits.OK, capfd.readouterr()
        assert cli.main(["inspect", transport.metadata()]) == exits.OK
    plain.shutdown()
    assert middle.connections == 0


def test_encryption_that_was_promised_is_not_done_without(source: HTTPTransport) -> None:
    """Neither does https:// lead to plain HTTP, nor does a URL without a fingerprint lead anywhere."""
    plain = HTTPTransport(SHORT, same_host=False, advertise="127.0.0.1")
    send(plain)
    pin = source.metadata().partition("//")[2].partition("@")[0]
    promised = plain.metadata().replace("http://", f"https://{pin}@")
    assert cli.main(["top", promised, "--once"]) == exits.NO
    with pytest.raises(Exception, match="does not speak TLS"):
        receive(promised)
    pinned = plain.metadata().replace("http://", f"http://{pin}@")
    assert cli.main(["top", pinned, "--once"]) == exits.USAGE
    with pytest.raises(InvalidArgument):
        receive(pinned)
    assert "answers_total{" not in counters(plain)
    plain.shutdown()
    bare = source.metadata().replace(f"{pin}@", "")
    assert cli.main(["top", bare, "--once"]) == exits.USAGE
    with pytest.raises(InvalidArgument, match="without the fingerprint"):
        HttpAnswer.open(bare, "metrics", timeout=5)


def counters(transport: HTTPTransport) -> str:
    answer = HttpAnswer.open(transport.metadata().removesuffix("checkpoint/"), "metrics", timeout=10)
    with contextlib.closing(answer):
        return answer.read(1 << 20).decode()


def test_a_redirect_is_not_followed(source: HTTPTransport, middle: ManInTheMiddle, listening: Any) -> None:
    place = middle.instead_of(source.metadata()).replace("https://", "http://").replace("sha256-", "x-")
    text = f"HTTP/1.1 307 Elsewhere\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n"
    listener = listening(text.encode())
    answer = HttpAnswer.open(f"http://127.0.0.1:{listener.port}/", "metrics", timeout=10)
    assert answer.status == 307
    assert cli.main(["top", f"127.0.0.1:{listener.port}", "--once"]) == exits.NO
    assert middle.connections == 0


@pytest.fixture
def listening() -> Iterator[Callable[[bytes], Any]]:
    """Opens listeners that answer each request with the same bytes."""
    with contextlib.ExitStack() as stack:
        yield lambda data: stack.enter_context(Listener(constant(data)))


def test_a_stock_source_is_received_from_without_a_proxy(
    open_stock: Any, middle: ManInTheMiddle, source: HTTPTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = middle.instead_of(source.metadata()).partition("@")[2].partition("/")[0]
    monkeypatch.setenv("http_proxy", f"http://{proxy}")
    stock = open_stock()
    state = {"w": torch.randn(3 << 18), "small": torch.ones(1), "none": torch.empty(0)}
    stock.send_checkpoint([1], 3, state, SHORT)
    got = receive(stock.metadata())
    assert all(torch.equal(got[name], value) for name, value in state.items())
    assert middle.connections == 0
