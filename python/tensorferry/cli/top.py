"""``tensorferry top``: a live table of a fleet, from the counters of its transports."""

from __future__ import annotations

import concurrent.futures
import math
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..errors import InvalidArgument
from ..storage import peers as publications
from . import console, exits
from .flags import Json, Switch

#: Seconds that a transport has to answer, and the longest answer that is read.
_PATIENCE_S = 3.0
_LONGEST = 1 << 20
#: The widest cell: a hostile transport may say anything.
_WIDEST = 60
#: How many transports are asked at a time.
_AT_ONCE = 32
_HEADS = ("at", "step", "gate", "does", "to", "sends", "receives", "done", "healed", "failed", "last heal")
_RIGHT = (1, 4, 5, 6, 7, 8, 9)
_LINE = re.compile(r"tensorferry_(\w+)(?:\{([^{}]*)\})? ([0-9.e+-]+)", re.ASCII)
_SCHEME = re.compile(r"https?://(?:sha256-[0-9a-f]+@)?")

_Values = dict[tuple[str, str], float]


@dataclass
class _Peer:
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
        return self.values.get((name, label), 0.0)


def top(*metadata: str, every: float = 2.0, once: Switch = False, json: Json = False) -> int:
    """Shows a fleet: who serves, who heals, how fast, and in which phase.

    Args:
        metadata: of transports, as metadata() returns it; or the address of a port for counters, such as node1:9400
        every: seconds between two looks
        once: look once, and end
        json: print each look as one JSON document on one line, with all counters
    """
    if not metadata:
        raise InvalidArgument("give the metadata of at least one transport, or the address of its port for counters")
    if not 0.1 <= every <= 3600:
        raise InvalidArgument(f"--every must be between 0.1 and 3600 seconds, not {every}")
    peers = [peer for given in metadata for peer in _peers(given)]
    with concurrent.futures.ThreadPoolExecutor(min(_AT_ONCE, len(peers))) as pool:
        try:
            _watch(peers, lambda: list(pool.map(_ask, peers)), every, once, json)
        except KeyboardInterrupt:
            # The ordinary end of a table that goes on for ever.
            return exits.OK
    return exits.NO if once and any(peer.trouble for peer in peers) else exits.OK


def _watch(peers: list[_Peer], ask: Callable[[], Any], every: float, once: bool, as_json: bool) -> None:
    if once or as_json:
        while True:
            ask()
            if as_json:
                console.out_json([_fields(peer) for peer in peers])
            else:
                console.out_table(_HEADS, [_row(peer) for peer in peers], _RIGHT)
            if once:
                return
            time.sleep(every)
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False, transient=False) as live:
        while True:
            ask()
            live.update(_table(peers), refresh=True)
            time.sleep(every)


def _peers(given: str) -> list[_Peer]:
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


def _peer(word: str) -> _Peer:
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
    return _Peer(shown, f"{parts.scheme}://{shown}{path}/metrics", fingerprint)


def _ask(peer: _Peer) -> None:
    """Asks for the counters of ``peer``; what goes wrong is noted there."""
    try:
        text, now = _fetch(peer), time.monotonic()
    except Exception as e:
        peer.trouble = str(getattr(e, "reason", "") or e) or type(e).__name__
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


def _fetch(peer: _Peer) -> str:
    # Proxies are for the world outside; and what would follow a redirect could ask anyone.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirects()]
    if peer.fingerprint is not None:
        handlers.append(urllib.request.HTTPSHandler(context=_unchecked()))
    with urllib.request.build_opener(*handlers).open(peer.url, timeout=_PATIENCE_S) as answer:
        return str(answer.read(_LONGEST).decode("utf-8", "replace"))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _unchecked() -> ssl.SSLContext:
    """Returns a context for self-signed certificates: what is read are counters, which nobody has to believe."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _does(peer: _Peer) -> str:
    phases = [phase for phase in ("open", "fetch", "build") if peer.value("receiving_phase", phase) > 0]
    doing = [f"heals ({', '.join(phases)})"] if phases else []
    if peer.value("receivers"):
        doing.append("sends")
    if peer.value("waiting_requests"):
        doing.append(f"{peer.value('waiting_requests'):.0f} wait")
    return ", ".join(doing) or "-"


def _row(peer: _Peer) -> Sequence[str]:
    """Returns the cells of ``peer``, clean and not too wide."""
    return [console.clean(cell)[:_WIDEST] for cell in _cells(peer)]


def _cells(peer: _Peer) -> Sequence[str]:
    if peer.trouble:
        return (peer.shown, *["-"] * 2, peer.trouble, *["-"] * 7)
    total = peer.value("receiving_total_bytes")
    step = f"{peer.value('step'):.0f}" if ("step", "") in peer.values else "-"
    last = "-"
    if ("last_receive_step", "") in peer.values:
        seconds = {phase: peer.value("last_receive_seconds", phase) for phase in ("open", "fetch", "build")}
        shares = "+".join(f"{seconds[phase]:.2f}" for phase in seconds)
        rate = console.amount(peer.value("last_receive_bytes_per_second"))
        last = f"step {peer.value('last_receive_step'):.0f} in {shares} s, {rate}/s"
    return (
        peer.shown,
        step,
        "open" if peer.value("allowed") else "closed",
        _does(peer),
        f"{peer.value('receivers'):.0f}",
        f"{console.amount(peer.rates[0])}/s" if peer.rates[0] else "-",
        f"{console.amount(peer.rates[1])}/s" if peer.rates[1] else "-",
        f"{100 * peer.value('receiving_bytes') / total:.0f} %" if total else "-",
        f"{peer.value('receives_total', 'healed'):.0f}",
        f"{peer.value('receives_total', 'failed'):.0f}",
        last,
    )


def _table(peers: list[_Peer]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, head in enumerate(_HEADS):
        table.add_column(head, justify="right" if number in _RIGHT else "left", no_wrap=number == 0)
    for peer in peers:
        style = "red" if peer.trouble else "yellow" if peer.value("receiving") else ""
        table.add_row(*(Text(cell, style=style) for cell in _row(peer)))
    return table


def _fields(peer: _Peer) -> dict[str, Any]:
    if peer.trouble:
        return {"at": peer.shown, "trouble": console.clean(peer.trouble)}
    counters = {f"{name}{{{label}}}" if label else name: value for (name, label), value in peer.values.items()}
    return {"at": peer.shown, "sent_per_second": peer.rates[0], "received_per_second": peer.rates[1], **counters}
