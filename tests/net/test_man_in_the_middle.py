"""Somebody with another certificate at the address of a source is told nothing: not a byte of the path, by nobody."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from middle import ManInTheMiddle

from exchange import figures
from secured import SECRET, send
from tensorferry import HTTPTransport, Network, cli
from tensorferry._native import HttpAnswer
from tensorferry.cli import exits
from tensorferry.dcp import PeerReader
from tensorferry.errors import InvalidArgument, UnprovenSource
from tensorferry.storage.peers import publication_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(120), pytest.mark.beyond_torchft]

SHORT = timedelta(seconds=20)


@pytest.fixture
def source() -> Iterator[HTTPTransport]:
    transport = HTTPTransport(SHORT, network=Network(tls=True, same_host=False, advertise="127.0.0.1"))
    send(transport)
    yield transport
    transport.shutdown()


@pytest.fixture
def middle(tmp_path: Path) -> Iterator[ManInTheMiddle]:
    with ManInTheMiddle(tmp_path) as listening:
        yield listening


def receive(metadata: str, **options: Any) -> Any:
    transport = HTTPTransport(SHORT, **options)
    try:
        return transport.recv_checkpoint(0, metadata, 3, SHORT)
    finally:
        transport.shutdown()


def run(*arguments: str) -> None:
    """Runs a verb, which prints its error."""
    assert cli.main(list(arguments)) not in (exits.OK, exits.BUG)
    raise UnprovenSource("fingerprint")


def read(*metadata: str) -> Any:
    return PeerReader(publication_metadata(3, list(metadata)), timeout=SHORT).read_metadata()


#: Each way by which a program connects to a source, with the metadata of the man in the middle and of the source.
DOORS: dict[str, Callable[[str, str], Any]] = {
    "recv_checkpoint": lambda middle, _: receive(middle),
    "recv_checkpoint with a secret": lambda middle, _: receive(middle, secret=SECRET),
    "recv_checkpoint of several": lambda middle, _: receive(f"{middle} {middle}"),
    "PeerReader": lambda middle, _: read(middle),
    "PeerReader of two": lambda middle, _: read(middle, middle),
    "one answer": lambda middle, _: HttpAnswer.open(middle, "3/full", timeout=20),
    "top": lambda middle, _: run("top", middle, "--once"),
    "inspect": lambda middle, _: run("inspect", middle, "--digests"),
    "pull": lambda middle, _: run("pull", middle, "-o", "/nowhere/out"),
    "diff": lambda middle, source: run("diff", source, middle),
    "doctor": lambda middle, _: run("doctor", middle),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_door_tells_him_anything(door: str, source: HTTPTransport, middle: ManInTheMiddle) -> None:
    with pytest.raises(UnprovenSource, match="fingerprint"):
        DOORS[door](middle.instead_of(source.metadata()), source.metadata())
    assert middle.connections
    assert (middle.told, middle.clear) == (b"", b"")


def test_a_proxy_in_the_environment_is_not_asked(
    source: HTTPTransport, middle: ManInTheMiddle, monkeypatch: pytest.MonkeyPatch, open_stock: Any
) -> None:
    proxy = middle.instead_of(source.metadata()).partition("@")[2].partition("/")[0]
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{proxy}")
    plain = HTTPTransport(SHORT, network=Network(same_host=False, advertise="127.0.0.1"))
    for one in (source, plain, open_stock()):
        assert receive(send(one))["w"].shape == (700_000,)
    for transport in (source, plain):
        assert cli.main(["top", transport.metadata(), "--once"]) == exits.OK
    plain.shutdown()
    assert middle.connections == 0


def test_encryption_that_was_promised_is_not_done_without(source: HTTPTransport) -> None:
    """Neither does https:// lead to plain HTTP, nor does a URL without a fingerprint lead anywhere."""
    plain = HTTPTransport(SHORT, network=Network(same_host=False, advertise="127.0.0.1"))
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
    assert "answers_total{" not in figures(plain)
    plain.shutdown()
    bare = source.metadata().replace(f"{pin}@", "")
    assert cli.main(["top", bare, "--once"]) == exits.USAGE
    with pytest.raises(InvalidArgument, match="without the fingerprint"):
        HttpAnswer.open(bare, "metrics", timeout=5)
