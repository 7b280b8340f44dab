"""A script as it is acted out: which faults have struck, what went through so far, and where bytes are held."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .faults import Fault
from .pace import Pace

__all__ = ["Play", "ProxyCounters"]


@dataclass
class ProxyCounters:
    """What went through a proxy so far."""

    connections: int = 0
    request_bytes: int = 0
    response_bytes: int = 0
    body_bytes: int = 0


class Play:
    """What the connections of one proxy share, all in its thread.

    Args:
        script: the faults; several may hit one connection
        target: host and port of the source
    """

    def __init__(self, script: Iterable[Fault], target: tuple[str, int]) -> None:
        """Nothing has struck yet."""
        self.script: Sequence[Fault] = tuple(script)
        self.target = target
        self.counters = ProxyCounters()
        self.fired: Counter[str] = Counter()
        self.pace: Pace | None = None
        #: Bytes of bodies at which forwarding stops, over all connections.
        self.hold_at: int | None = None
        self.held = threading.Event()
        self.gate = asyncio.Event()
        self._reached: Counter[int] = Counter()

    def struck(self, fault: Fault) -> None:
        """Notes that a fault has struck."""
        self.fired[type(fault).__name__] += 1
        if self.pace:
            self.pace.end()

    def strikes(self, fault: Fault, number: int) -> bool:
        """Whether a fault whose place connection ``number`` has come to strikes there."""
        if fault.order == "reaching":
            index = self.script.index(fault)
            number = self._reached[index]
            self._reached[index] += 1
        return fault.hits(number)

    async def pass_gate(self, body: int, carried: int) -> None:
        """Waits while ``body`` bytes of a body may not go on, on a connection that carried ``carried`` with them."""
        if self.pace:
            await self.pace.wait(carried)
        self.counters.body_bytes += body
        if self.hold_at is not None and self.counters.body_bytes >= self.hold_at:
            self.held.set()
            await self.gate.wait()
