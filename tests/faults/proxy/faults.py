"""The faults of a connection, one class each, and which connections they hit.

A script is a sequence of faults; :class:`faults.proxy.proxy.FaultProxy` applies it. Offsets count from 0 on each
connection, either over all bytes (``of="stream"``) or over the bodies of HTTP responses only (``of="body"``: heads are
left out, and the count continues from one response on a connection to the next).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Connections = int | range | frozenset[int] | None
"""Numbers of connections, from 0; ``None`` is all of them."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Base class of all faults.

    Args:
        connections: the numbers of the connections it hits; ``None``: all of them
        order: how connections are numbered: as they were ``"accepted"``, or as they reached the fault's offset
            (``"reaching"``): number 1 is then the second connection that carries that many bytes, however many
            small requests other connections carried before
    """

    connections: Connections = None
    order: Literal["accepted", "reaching"] = "accepted"

    def hits(self, number: int) -> bool:
        """Whether the fault hits the connection with this number."""
        if self.connections is None:
            return True
        return number == self.connections if isinstance(self.connections, int) else number in self.connections


@dataclass(frozen=True, kw_only=True)
class OffsetFault(Fault):
    """A fault at an offset of the answers of a connection; it strikes each connection once at most.

    Args:
        at: offset of the first byte it affects
        of: which bytes the offset counts
    """

    at: int = 0
    of: Literal["body", "stream"] = "body"


@dataclass(frozen=True, kw_only=True)
class Truncate(OffsetFault):
    """Closes the connection (FIN) after ``at`` bytes."""


@dataclass(frozen=True, kw_only=True)
class Reset(OffsetFault):
    """Resets the connection (RST) after ``at`` bytes."""


@dataclass(frozen=True, kw_only=True)
class HalfOpen(OffsetFault):
    """Stops reading and forwarding in both directions from byte ``at`` on; the connection stays open."""


@dataclass(frozen=True, kw_only=True)
class FlipByte(OffsetFault):
    """Changes a bit of byte ``at``."""


@dataclass(frozen=True, kw_only=True)
class Drip(OffsetFault):
    """Forwards ``size`` bytes every ``interval`` seconds from byte ``at`` on.

    Args:
        size: bytes in one piece
        interval: seconds between two pieces
    """

    size: int = 1
    interval: float = 0.1
