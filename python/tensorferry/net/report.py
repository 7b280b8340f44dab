"""How a receive went: as an object, and as log lines."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from .._native import Report

logger = logging.getLogger("tensorferry")

#: How many senders a log line names.
_MOST_SENDERS = 12
#: How many characters of a path it has.
_LONGEST_PATH = 200


class InPlace(NamedTuple):
    """How the source's state matched the receiver's live state.

    Attributes:
        matched: how many of the source's tensors have a counterpart in the live state
        offered: how many tensors the source has
        there: the path of one of the source's tensors, for messages: of one without a counterpart, if there is one
        here: the path of one of the live state's tensors, for messages
    """

    matched: int
    offered: int
    there: str
    here: str


@dataclass(frozen=True, slots=True)
class ReceiveReport:
    """How a receive went.

    Attributes:
        step: the step that was received
        bytes: bytes of payload received, those that had to be fetched again included
        seconds: duration of the whole receive; the sum of the next three
        open_seconds: time until a source had answered and its header had arrived
        fetch_seconds: time until all bytes had arrived and were verified
        build_seconds: the remaining time, in which tensors and objects are made and what came elsewhere is copied
        verify_seconds: the part of ``fetch_seconds`` that compared checksums with the source's
        lanes: connections used
        retries: ranges that had to be fetched again
        same_host: whether shared memory was used instead of the network
        routes: the routes that bytes took over the network: the address here, and the source's
        troubles: for each source that a range had to be taken from, by its host and port, the last reason
        in_place: how the live state matched; ``None`` without one
        relayed_bytes: the part of ``bytes`` that other receivers have sent
        relays: how many other receivers have sent them
        route_bytes: bytes that came by each of ``routes``, in that order
        refused_blocks: blocks of 1 MiB from other receivers that were not the source's, and were fetched again
        senders: how many bytes came from each source and each other receiver, by its host and port; bytes that came
            more than once count for who sent them last
    """

    step: int
    bytes: int
    seconds: float
    open_seconds: float
    fetch_seconds: float
    build_seconds: float
    verify_seconds: float
    lanes: int
    retries: int
    same_host: bool
    routes: tuple[tuple[str, str], ...]
    troubles: dict[str, str]
    in_place: InPlace | None
    relayed_bytes: int = 0
    relays: int = 0
    refused_blocks: int = 0
    route_bytes: tuple[int, ...] = ()
    senders: dict[str, int] = field(default_factory=dict)

    @property
    def bytes_per_second(self) -> float:
        """The rate while bytes were fetched."""
        return self.bytes / max(self.fetch_seconds, 1e-9)

    @property
    def route_rates(self) -> tuple[float, ...]:
        """The bytes per second that came by each of ``routes``, in that order, while bytes were fetched."""
        return tuple(nbytes / max(self.fetch_seconds, 1e-9) for nbytes in self.route_bytes)

    @classmethod
    def of(cls, step: int, report: Report, fit: InPlace | None, seconds: float) -> ReceiveReport:
        """Returns the report of a receive of ``step`` that took ``seconds`` in all.

        Args:
            step: the step that was received
            report: the native client's report
            fit: how the live state matched, if there was one
            seconds: duration of the whole receive
        """
        return cls(
            step=step,
            bytes=report.bytes,
            seconds=seconds,
            open_seconds=report.opening_seconds,
            fetch_seconds=report.fetching_seconds,
            build_seconds=max(seconds - report.opening_seconds - report.fetching_seconds, 0.0),
            verify_seconds=report.verifying_seconds,
            lanes=report.lanes,
            retries=report.retries,
            same_host=report.same_host,
            routes=tuple(report.routes),
            troubles=report.troubles,
            in_place=fit,
            relayed_bytes=report.relayed,
            relays=report.relays,
            refused_blocks=report.refused,
            route_bytes=tuple(report.route_bytes),
            senders=report.senders,
        )


def _shares(senders: dict[str, int]) -> str:
    """Returns the part of a log line that says how many bytes came from whom; empty where all came from one."""
    if len(senders) < 2:
        return ""
    most = sorted(senders.items(), key=lambda one: -one[1])
    named = [f"{sent} from {sender}" for sender, sent in most[:_MOST_SENDERS]]
    if rest := sum(sent for _, sent in most[_MOST_SENDERS:]):
        named.append(f"{rest} from {len(most) - _MOST_SENDERS} more")
    return f", bytes by sender: {', '.join(named)}"


def counted(number: int, one: str, several: str) -> str:
    """Returns ``number`` with the word for one or for several."""
    return f"{number} {one if number == 1 else several}"


def in_place(fit: InPlace | None) -> str:
    """Returns the end of a log line: how many tensors were received in place; empty without a live state."""
    if fit is None:
        return ""
    text = f", {fit.matched} of {fit.offered} tensors in place"
    if not 0 < fit.matched < fit.offered:
        return text
    more = fit.offered - fit.matched - 1
    others = f" and {more} more are" if more else " is"
    return f"{text} ({fit.there[:_LONGEST_PATH]}{others} not in the live state, so came into fresh memory)"


def log_receive(report: ReceiveReport, *, tls: bool, secret: bool) -> None:
    """Logs a receive: trouble with sources, its routes, protection and speed.

    Args:
        report: the receive
        tls: whether the connections to all sources were encrypted
        secret: whether the sources and this process have proven to each other that they know a shared secret
    """
    for source, trouble in report.troubles.items():
        logger.warning("step %d: ranges of %s were fetched over other connections: %s", report.step, source, trouble)
    several = len(report.routes) > 1
    carried = zip(report.route_bytes, report.route_rates, strict=True)
    shares = [f" ({nbytes} bytes, {rate / 1e9:.3f} GB/s)" if several else "" for nbytes, rate in carried]
    routes = [f"{here} <- {there}{share}" for (here, there), share in zip(report.routes, shares, strict=True)]
    if report.same_host:
        routes.append("shared memory")
    relayed = ""
    if report.relays:
        own = max(report.bytes - report.relayed_bytes, 0)
        others = counted(report.relays, "other receiver", "other receivers")
        relayed = f", {own} bytes from the source and {report.relayed_bytes} from {others}"
    logger.info(
        "received step %d: %d bytes in %.3f s (%.2f GB/s; open %.3f s, fetch %.3f s), %s over %s, %s, "
        "%s TLS, %s a secret%s",
        report.step,
        report.bytes,
        report.seconds,
        report.bytes_per_second / 1e9,
        report.open_seconds,
        report.fetch_seconds,
        counted(report.lanes, "lane", "lanes"),
        ", ".join(routes) or "a connection that was closed",
        counted(report.retries, "retry", "retries"),
        "with" if tls else "without",
        "with" if secret else "without",
        relayed + _shares(report.senders) + in_place(report.in_place),
    )
