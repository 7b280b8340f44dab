"""The log lines about a receive."""

from __future__ import annotations

import logging
from typing import NamedTuple

from .._native import Report
from .addresses import interface_speed

logger = logging.getLogger("tensorferry")

#: A receive of at least this many seconds shows how fast the link is; a warning is logged if its rate is below this
#: share of the interface's rated speed.
_LONG_S = 2.0
_SLOW = 0.1


class InPlace(NamedTuple):
    """How the source's state matched the receiver's live state.

    Attributes:
        matched: how many of the source's tensors have a counterpart in the live state
        offered: how many tensors the source has
        there: the path of one of the source's tensors, for messages
        here: the path of one of the live state's tensors, for messages
    """

    matched: int
    offered: int
    there: str
    here: str


def in_place(fit: InPlace | None) -> str:
    """Returns the end of a log line: how many tensors were received in place; empty without a live state."""
    return "" if fit is None else f", {fit.matched} of {fit.offered} tensors in place"


def log_receive(step: int, report: Report, fit: InPlace | None, seconds: float) -> None:
    """Logs a receive: trouble with sources, its routes and its speed, and a warning if it was too slow.

    Args:
        step: the step that was received
        report: the native client's report
        fit: how the live state matched, if there was one
        seconds: duration of the whole receive
    """
    for source, trouble in report.troubles.items():
        logger.warning("step %d: ranges of %s were fetched over other connections: %s", step, source, trouble)
    rate = report.bytes / max(report.fetching_seconds, 1e-9)
    routes = [f"{here} <- {there}" for here, there in report.routes]
    if report.same_host:
        routes.append("shared memory")
    logger.info(
        "received step %d: %d bytes in %.3f s (%.2f GB/s; open %.3f s, fetch %.3f s), %d lanes over %s, %d retries%s",
        step,
        report.bytes,
        seconds,
        rate / 1e9,
        report.opening_seconds,
        report.fetching_seconds,
        report.lanes,
        ", ".join(routes) or "a connection that was closed",
        report.retries,
        in_place(fit),
    )
    # A short receive says nothing about a link.
    if report.same_host or report.fetching_seconds < _LONG_S:
        return
    for here, there in report.routes:
        interface = interface_speed(here)
        if interface is not None and rate < interface[1] * _SLOW:
            logger.warning(
                "step %d came at %.3f GB/s from %s, though %s here is rated at %.3f GB/s: check the network between "
                "them, or choose another route with interface= or advertise= at the source",
                step,
                rate / 1e9,
                there,
                interface[0],
                interface[1] / 1e9,
            )
