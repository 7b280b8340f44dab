"""What can go wrong with a connection: one class per fault, and which connections it hits.

A script is a sequence of faults; :class:`tensorferry.testing.FaultProxy` acts it out. Offsets count per connection,
from 0, either over all bytes (``of="stream"``) or over the bodies of HTTP answers alone (``of="body"``, heads left out;
several answers on one connection count on).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Answer",
    "Connections",
    "Delay",
    "Divert",
    "Drip",
    "Duplicate",
    "Fault",
    "FlipByte",
    "HalfOpen",
    "OffsetFault",
    "ReplaceHead",
    "Reset",
    "Truncate",
]

Connections = int | range | frozenset[int] | None
"""Numbers of connections, from 0; ``None`` is all of them."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What all faults have.

    Args:
        connections: which connections it hits; ``None``: all of them
        order: how connections are numbered: as they were ``"accepted"``, or as they came to the fault's place
            (``"reaching"``): number 1 is then the second connection that carries that many bytes, whatever small
            requests were made on others before
    """

    connections: Connections = None
    order: Literal["accepted", "reaching"] = "accepted"

    def hits(self, number: int) -> bool:
        """Whether the connection with this number is hit."""
        if self.connections is None:
            return True
        return number == self.connections if isinstance(self.connections, int) else number in self.connections


@dataclass(frozen=True, kw_only=True)
class OffsetFault(Fault):
    """A fault at a place in the bytes of one direction, once per connection.

    Args:
        at: offset of the first byte it concerns
        of: what the offset counts
        direction: ``"response"`` is from the source to the receiver; requests have no bodies that count
    """

    at: int = 0
    of: Literal["body", "stream"] = "body"
    direction: Literal["request", "response"] = "response"

    def __post_init__(self) -> None:
        if self.at < 0:
            raise ValueError(f"an offset is 0 or more, not {self.at}")
        if self.direction == "request" and self.of == "body":
            raise ValueError('requests are counted with of="stream"')


@dataclass(frozen=True, kw_only=True)
class Truncate(OffsetFault):
    """Closes the connection in good order after ``at`` bytes."""


@dataclass(frozen=True, kw_only=True)
class Reset(OffsetFault):
    """Resets the connection (RST) after ``at`` bytes."""


@dataclass(frozen=True, kw_only=True)
class HalfOpen(OffsetFault):
    """From byte ``at`` on nothing is forwarded in either direction and nothing is read; the connection stays open."""


@dataclass(frozen=True, kw_only=True)
class FlipByte(OffsetFault):
    """Changes byte ``at``.

    Args:
        mask: the bits that are flipped
    """

    mask: int = 0x01


@dataclass(frozen=True, kw_only=True)
class Duplicate(OffsetFault):
    """Sends bytes twice: up to ``count`` of those that begin at ``at``, as far as they came in one read."""

    count: int = 64


@dataclass(frozen=True, kw_only=True)
class Delay(OffsetFault):
    """Waits before byte ``at``."""

    seconds: float = 0.2


@dataclass(frozen=True, kw_only=True)
class Drip(OffsetFault):
    """From byte ``at`` on sends ``size`` bytes each ``interval`` seconds."""

    size: int = 1
    interval: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Answer(Fault):
    """Answers the first request in place of the source, which is not asked.

    Args:
        data: sent at once
        repeat: sent again and again after it, until the receiver goes
        interval: seconds between two of these
        close: close the connection at the end; without, it stays open
    """

    data: bytes = b""
    repeat: bytes = b""
    interval: float = 0.0
    close: bool = True


@dataclass(frozen=True, kw_only=True)
class ReplaceHead(Fault):
    """Puts ``new`` for ``old`` (upper or lower case) in the head of every answer: lies about status, length, range."""

    old: bytes
    new: bytes


@dataclass(frozen=True, kw_only=True)
class Divert(Fault):
    """Connects to another source.

    Args:
        host: its host
        port: its port
        old: bytes of requests, such as the path in the first source's metadata,
        new: and what the other source is sent in their place
    """

    host: str
    port: int
    old: bytes = b""
    new: bytes = b""
