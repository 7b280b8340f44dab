"""Running peers, as the command line names them: their metadata, an opened container, and their counters."""

from __future__ import annotations

import contextlib
import http
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from .. import _validate
from .._native import HttpAnswer, Remote, Server
from ..errors import (
    InvalidArgument,
    ProtocolError,
    SourceChanged,
    TensorferryError,
    WrongStep,
    class_of,
    message_of,
)
from ..net.metadata import (
    check_fingerprint,
    encrypted,
    is_stock,
    join_metadata,
    require_encrypted,
)
from ..net.network import Network
from ..storage import peers

#: Seconds that a receive may take, unless ``--timeout`` says otherwise.
TIMEOUT = 600.0
#: A refusal because of the step, by a source that has gone on to another one.
_SERVED = re.compile(r"serving -?\d{1,19} but got")
#: How often a source may go on to another step between two requests.
_ATTEMPTS = 3
#: Seconds that a transport has to answer, and the longest answer that is read.
_PATIENCE_S = 3.0
_LONGEST = 1 << 20
#: A counter, on a line of its own: without the beginning of the line, hostile text would be searched from each place.
_LINE = re.compile(r"^tensorferry_(\w++)(?:\{([^{}\n]*+)\})? ([0-9.e+-]{1,40})$", re.ASCII | re.MULTILINE)

_Values = dict[tuple[str, str], float]


def is_metadata(text: str) -> bool:
    """Whether an argument names running peers, and not a file."""
    return text.startswith(("http://", "https://", f"{peers.SCHEME} "))


def refuse_without_peers(texts: Sequence[str], step: int | None, timeout: float) -> None:
    """Refuses the options for peers where none is named.

    Raises:
        InvalidArgument: one was given
    """
    if not any(map(is_metadata, texts)) and (step, timeout) != (None, TIMEOUT):
        raise InvalidArgument("--step and --timeout are for running peers")


@dataclass(frozen=True)
class Peers:
    """The peers that the metadata names.

    Attributes:
        urls: of all sources of a state; or of all ranks of a publication, the one with the index first
        step: the step that the metadata names, if it names one
        are_ranks: whether the peers are the ranks of a ``PeerWriter``'s publication
    """

    urls: list[str]
    step: int | None = None
    are_ranks: bool = False

    @classmethod
    def of(cls, metadata: Sequence[str]) -> Peers:
        """Returns the peers that arguments of the command line name.

        Raises:
            InvalidArgument: they are not the metadata of tensorferry's peers
            UnprovenSource: the environment asks for encryption, and no source encrypts, or one of the ranks does not
        """
        text = " ".join(metadata)
        ranks = peers.parse_publication(text)
        if ranks is not None:
            found = cls(ranks[1], _validate.step_number(ranks[0]), True)
        elif is_stock(text.strip()):
            raise InvalidArgument(
                "this is the metadata of torchft's own transport, which serves no container: receive from it with "
                "an HTTPTransport of tensorferry"
            )
        else:
            found = cls(join_metadata(metadata).split())
        if not Network().tls:
            return found
        if found.are_ranks:
            require_encrypted(found.urls)
        return replace(found, urls=encrypted(found.urls))


def open_source(
    urls: list[str],
    step: int | None,
    timeout: float,
    progress: Callable[[int, int], object] | None = None,
    relay: Server | None = None,
) -> tuple[Remote, int]:
    """Opens what the sources of a state serve.

    Args:
        urls: the sources
        step: the step to open; ``None`` takes the one that is served
        timeout: seconds for the whole receive
        progress: called with the number of bytes that have arrived and the number of all bytes
        relay: serves on what has come, where the source offers that

    Returns:
        What was opened, for the caller to close, and its step.

    Raises:
        InvalidArgument: ``step`` or the secret cannot be used
        SourceChanged: without ``step``, the source has gone on to another one again and again
        TensorferryError: as for ``HTTPTransport.recv_checkpoint``
    """
    if step is not None:
        step = _validate.step_number(step)
    network, deadline = Network(), time.monotonic() + timeout
    for _ in range(_ATTEMPTS):
        try:
            remote = Remote.open(
                urls,
                step,
                timeout=max(deadline - time.monotonic(), 0.0),
                lanes=None,
                progress=progress,
                relay=relay,
                **network.receive_options(),
            )
        except WrongStep as e:
            if step is not None or not _SERVED.search(str(e)):
                raise
            # It has gone on between saying which step it serves and the request for that.
            continue
        return remote, remote.step
    raise SourceChanged("the source goes on to other steps faster than one can be opened: name one with --step")


@dataclass
class Peer:
    """A transport, and what was last heard from it.

    Attributes:
        shown: its host and port
        url: that of its counters without their name; with the fingerprint of the certificate that it must show, if it
            encrypts
        values: its counters by name and label
        rates: bytes per second since the answer before, sent and received
        at: when it answered last, by the monotonic clock
        trouble: why it did not answer, by class and cause; empty if it has answered
    """

    shown: str
    url: str
    values: _Values = field(default_factory=dict)
    rates: tuple[float, float] = (0.0, 0.0)
    at: float = 0.0
    trouble: str = ""

    def value(self, name: str, label: str = "") -> float:
        """Returns a counter; 0 if the transport has not told it."""
        return self.values.get((name, label), 0.0)

    def labelled(self, name: str) -> dict[str, float]:
        """Returns the counters called ``name`` by their labels; none if the transport has not told any."""
        return {label: value for (found, label), value in self.values.items() if found == name}


def peers_of(given: str) -> list[Peer]:
    """Returns the transports that one argument names: metadata of one or several, or the address of a port.

    Raises:
        InvalidArgument: it names none, or comes without the fingerprint that it must have
    """
    words = given.split()
    if words[:1] == [peers.SCHEME]:
        # The metadata of a publication begins with its scheme and the step.
        words = words[2:]
    if not words:
        raise InvalidArgument(f"{given!r} names no transport")
    return [_peer(word) for word in words]


def _peer(word: str) -> Peer:
    """Returns the transport that a URL of its metadata, or ``host:port``, names."""
    url = word if word.startswith(("http://", "https://")) else f"http://{word}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or re.search(r"[^\x21-\x7e]", word):
        raise InvalidArgument(f"{word!r} is neither the metadata of a transport nor host:port")
    path = parts.path.removesuffix("metrics").removesuffix("checkpoint/").rstrip("/")
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    check_fingerprint(url)
    if parts.scheme == "http":
        return Peer(shown, f"http://{shown}{path}/")
    return Peer(shown, f"https://{parts.username}@{shown}{path}/")


def ask(peer: Peer) -> None:
    """Asks for the counters of ``peer``; what goes wrong is noted there."""
    try:
        text, now = _fetch(peer), time.monotonic()
    except TensorferryError as e:
        peer.trouble = f"{class_of(e)}: {message_of(e)}"
        return
    values: _Values = {}
    for name, labels, number in _LINE.findall(text):
        with contextlib.suppress(ValueError):
            if math.isfinite(value := float(number)):
                values[name, re.sub(r'\w+="([^"]*)"', r"\1", labels)] = value
    if ("allowed", "") not in values:
        peer.trouble = f"{ProtocolError.__name__}: these are not the counters of tensorferry"
        return
    before, took = peer.values, max(now - peer.at, 1e-9)
    peer.trouble, peer.values, peer.at = "", values, now
    if before:
        sent, received = (total(peer.values) - total(before) for total in (_sent, _received))
        peer.rates = (max(sent, 0.0) / took, max(received, 0.0) / took)


def _sent(values: _Values) -> float:
    return values.get(("sent_bytes_total", ""), 0.0)


def _received(values: _Values) -> float:
    return values.get(("received_bytes_total", ""), 0.0) + values.get(("receiving_bytes", ""), 0.0)


def _fetch(peer: Peer) -> str:
    """Asks ``peer`` for its counters and returns the beginning of the answer, at most ``_LONGEST`` bytes.

    It asks nothing if the certificate of ``peer`` is not the URL's.

    Raises:
        ProtocolError: the answer has another status than 200
        TensorferryError: it is not the peer, there is nobody, or not all of its answer has come in time
    """
    with contextlib.closing(HttpAnswer.open(peer.url, "metrics", timeout=_PATIENCE_S)) as answer:
        if answer.status != http.HTTPStatus.OK:
            raise ProtocolError(f"it answers {answer.status} to a request for its counters")
        return answer.read(_LONGEST).decode("utf-8", "replace")
