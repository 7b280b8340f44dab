"""Running transports and their counters, as `tensorferry top` and `doctor` ask for them."""

from __future__ import annotations

import contextlib
import http
import math
import re
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from .._native import HttpAnswer
from ..errors import InvalidArgument, ProtocolError, TensorferryError, class_of, message_of
from ..net.metadata import check_fingerprint
from ..storage import peers as publications

#: Seconds that a transport has to answer, and the longest answer that is read.
_PATIENCE_S = 3.0
_LONGEST = 1 << 20
#: A counter, on a line of its own: without the beginning of the line, hostile text would be searched from each place.
_LINE = re.compile(r"^tensorferry_(\w++)(?:\{([^{}\n]*+)\})? ([0-9.e+-]{1,40})$", re.ASCII | re.MULTILINE)

_Values = dict[tuple[str, str], float]


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
    if words[:1] == [publications.SCHEME]:
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
