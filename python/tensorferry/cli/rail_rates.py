"""How fast each rail between a running peer and this host is, by itself, and what it should be."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from .._native import Remote
from ..errors import TensorferryError, message_of
from ..net import addresses

#: Seconds for which each is measured.
_MEASURED_S = 1.0


class RailRate(NamedTuple):
    """What one rail has carried.

    Attributes:
        there: the peer's address
        here: the address here; empty if nobody has answered
        rate: bytes per second; 0 if nobody has answered
        expected: the speed of the slower of its two links, or else the rate of the other rails, in bytes per second; 0
            if neither is known
        measured: what ``expected`` is, in words
        trouble: why nothing has come; empty if something has
    """

    there: str
    here: str
    rate: float
    expected: float
    measured: str
    trouble: str


def rail_rates(remote: Remote) -> list[RailRate]:
    """Measures the rails that an opened peer has named, one after the other; none if it has named none.

    Raises:
        InvalidArgument: it was fetched already
        SystemRefused: the interfaces of this host cannot be listed
    """
    found = [_measure_rail(remote, there, mbit * 125_000.0) for there, mbit in remote.rails]
    return [one if one.expected else _beside(one, found) for one in found]


def _measure_rail(remote: Remote, there: str, speed: float) -> RailRate:
    try:
        nbytes, seconds, here = remote.measure(there, _MEASURED_S)
    except TensorferryError as e:
        return RailRate(there, "", 0.0, speed, "its link there", message_of(e))
    links = [(speed, "its link there")] if speed else []
    if (own := addresses.interface_speed(here)) is not None:
        links.append((own[1], own[0]))
    expected, measured = min(links, default=(0.0, ""))
    return RailRate(there, here, nbytes / max(seconds, 1e-9), expected, measured, "")


def _beside(one: RailRate, found: list[RailRate]) -> RailRate:
    """Returns a rail of unknown speed with what the others of unknown speed carry."""
    others = [other.rate for other in found if other is not one and other.rate and not other.expected]
    return one._replace(expected=statistics.median(others), measured="the other rails") if others else one
