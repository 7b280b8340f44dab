"""Running transports and their counters, as `tensorferry top` asks for them."""

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
_FAILURES = "receive_failures_total"
#: How the engine begins to say that its deadline has passed. What is asked for here is no state.
_TIMED_OUT = re.compile(r"^timed out: the whole receive was given [0-9.]+ s(?:: |$)")
_SCHEME = re.compile(r"http://|https://")

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
        error: the class of the error that kept it from answering; empty if it has answered
        trouble: why it did not answer, without its address
    """

    shown: str
    url: str
    values: _Values = field(default_factory=dict)
    rates: tuple[float, float] = (0.0, 0.0)
    at: float = 0.0
    error: str = ""
    trouble: str = ""

    def value(self, name: str, label: str = "") -> float:
        """Returns a counter; 0 if the transport has not told it."""
        return self.values.get((name, label), 0.0)

    def labelled(self, name: str) -> dict[str, float]:
        """Returns the counters called ``name`` by their labels; none if the transport has not told any."""
        return {label: value for (found, label), value in self.values.items() if found == name}

    @property
    def is_keeper(self) -> bool:
        """Whether it is a keeper's."""
        return ("keeper_memory_limit_bytes", "") in self.values

    @property
    def failures(self) -> dict[str, int]:
        """How many of its receives failed, by the class of the error: the most frequent first."""
        found = {label: int(count) for (name, label), count in self.values.items() if name == _FAILURES and count > 0}
        return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))


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
    url = word if _SCHEME.match(word) else f"http://{word}"
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
        peer.error, peer.trouble = class_of(e), _short_error(message_of(e), peer.shown)
        return
    values: _Values = {}
    for name, labels, number in _LINE.findall(text):
        label = re.sub(r'\w+="([^"]*)"', r"\1", labels)
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value):
            values[name, label] = value
    if ("allowed", "") not in values:
        peer.error, peer.trouble = ProtocolError.__name__, "these are not the counters of tensorferry"
        return
    before, took = peer.values, max(now - peer.at, 1e-9)
    peer.error = peer.trouble = ""
    if before:
        received = _received(values) - _received(before)
        sent = values.get(("sent_bytes_total", ""), 0.0) - before.get(("sent_bytes_total", ""), 0.0)
        peer.rates = (max(sent, 0.0) / took, max(received, 0.0) / took)
    peer.values, peer.at = values, now


def _short_error(message: str, shown: str) -> str:
    """Returns an error's message without the address, which the table has beside it."""
    what, late = _TIMED_OUT.subn("", message)
    what = what.removeprefix(f"{shown}: ").removeprefix(f"{shown} ")
    return ": ".join(filter(None, [f"no answer within {_PATIENCE_S:g} s" if late else "", what]))


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
