"""Running transports and their counters, as `tensorferry top` asks for them."""

from __future__ import annotations

import contextlib
import http.client
import math
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from .._native import _resolve
from ..errors import InvalidArgument, ProtocolError
from ..storage import peers as publications

#: Seconds that a transport has to answer, and the longest answer that is read.
_PATIENCE_S = 3.0
_LONGEST = 1 << 20
#: A counter, on a line of its own: without the beginning of the line, hostile text would be searched from each place.
_LINE = re.compile(r"^tensorferry_(\w++)(?:\{([^{}\n]*+)\})? ([0-9.e+-]{1,40})$", re.ASCII | re.MULTILINE)
_SCHEME = re.compile(r"https?://(?:sha256-[0-9a-f]+@)?")

_Values = dict[tuple[str, str], float]


@dataclass
class Peer:
    """A transport, and what was last heard from it.

    Attributes:
        shown: its host and port
        url: of its counters
        fingerprint: of the certificate that it must show; ``None`` without encryption
        values: its counters by name and label
        rates: bytes per second since the answer before, sent and received
        trouble: why it did not answer
    """

    shown: str
    url: str
    fingerprint: str | None = None
    values: _Values = field(default_factory=dict)
    rates: tuple[float, float] = (0.0, 0.0)
    at: float = 0.0
    trouble: str = ""

    def value(self, name: str, label: str = "") -> float:
        """Returns a counter; 0 if the transport has not told it."""
        return self.values.get((name, label), 0.0)


def peers_of(given: str) -> list[Peer]:
    """Returns the transports that one argument names: metadata of one or several, or the address of a port.

    Raises:
        InvalidArgument: it names none
    """
    words = given.split()
    if words[:1] == [publications.SCHEME]:
        # The metadata of a publication begins with its scheme and the step.
        words = words[2:]
    if not words:
        raise InvalidArgument(f"{given!r} names no transport")
    return [_peer(word) for word in words]


def _peer(word: str) -> Peer:
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
    fingerprint = (parts.username or "").removeprefix("sha256-") if parts.scheme == "https" else None
    return Peer(shown, f"{parts.scheme}://{shown}{path}/metrics", fingerprint)


def ask(peer: Peer) -> None:
    """Asks for the counters of ``peer``; what goes wrong is noted there."""
    try:
        text, now = _fetch(peer), time.monotonic()
    except Exception as e:
        peer.trouble = str(e) or type(e).__name__
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
        peer.trouble = "these are not the counters of tensorferry"
        return
    before, took = peer.values, max(now - peer.at, 1e-9)
    peer.trouble = ""
    if before:
        received = _received(values) - _received(before)
        sent = values.get(("sent_bytes_total", ""), 0.0) - before.get(("sent_bytes_total", ""), 0.0)
        peer.rates = (max(sent, 0.0) / took, max(received, 0.0) / took)
    peer.values, peer.at = values, now


def _received(values: _Values) -> float:
    return values.get(("received_bytes_total", ""), 0.0) + values.get(("receiving_bytes", ""), 0.0)


def _fetch(peer: Peer) -> str:
    """Returns the answer of ``peer``, without following redirects, and without a proxy.

    Raises:
        TimeoutError: not all of it has come in time, however slowly it comes
        OSError: there is nobody, or the connection was lost
        Exception: the answer is no HTTP, or no counters
    """
    parts = urlsplit(peer.url)
    assert parts.hostname is not None
    late = threading.Event()
    addresses = _resolve(parts.hostname, timeout=_PATIENCE_S)
    with socket.create_connection((addresses[0], parts.port), _PATIENCE_S) as raw, raw.dup() as other:

        def give_up() -> None:
            late.set()
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)

        # The socket's own timeout begins anew with every byte.
        timer = threading.Timer(_PATIENCE_S, give_up)
        timer.start()
        try:
            connection = http.client.HTTPConnection(parts.hostname, parts.port)
            connection.sock = raw if peer.fingerprint is None else _unchecked().wrap_socket(raw)
            with contextlib.closing(connection):
                connection.request("GET", parts.path)
                answer = connection.getresponse()
                if answer.status != http.HTTPStatus.OK:
                    raise ProtocolError(f"it answers {answer.status} to a request for its counters")
                text = answer.read(_LONGEST)
        except Exception as e:
            if late.is_set():
                raise TimeoutError("timed out") from e
            raise
        finally:
            timer.cancel()
    if late.is_set():
        raise TimeoutError("timed out")
    return text.decode("utf-8", "replace")


def _unchecked() -> ssl.SSLContext:
    """Returns a context for self-signed certificates: what is read are counters, which nobody has to believe."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
