"""The script of a proxy while it runs: its faults, which of them have struck, and whether forwarding is held."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .faults import Fault
from .pace import Pace


@dataclass
class ProxyCounters:
    """Connections that a proxy has accepted, and bytes that it has read, whether or not a fault kept them back."""

    connections: int = 0
    response_bytes: int = 0
    body_bytes: int = 0


class Script:
    """The faults of one proxy and what they have done so far. All its connections share it.

    Args:
        faults: several may hit one connection
        target: host and port of the source
    """

    def __init__(self, faults: Iterable[Fault], target: tuple[str, int]) -> None:
        self.faults: Sequence[Fault] = tuple(faults)
        self.target = target
        self.counters = ProxyCounters()
        self.fired: Counter[str] = Counter()
        self.pace: Pace | None = None
        #: Number of body bytes, over all connections, at which forwarding stops.
        self.hold_at: int | None = None
        self.held = threading.Event()
        self.gate = asyncio.Event()
        self._reached: Counter[int] = Counter()

    def record(self, fault: Fault) -> None:
        """Counts a fault that has struck, and lets paced connections go on."""
        self.fired[type(fault).__name__] += 1
        if self.pace:
            self.pace.end()

    def strikes(self, fault: Fault, number: int) -> bool:
        """Whether ``fault`` strikes connection ``number``, which has reached the fault's offset.

        A fault of the order ``"reaching"`` counts the connection: ask once for each.
        """
        if fault.order == "reaching":
            index = self.faults.index(fault)
            number = self._reached[index]
            self._reached[index] += 1
        return fault.hits(number)

    async def pass_gate(self, body: int, carried: int) -> None:
        """Waits until the next bytes of a connection may be forwarded.

        Args:
            body: how many of them belong to a body
            carried: body bytes of this connection so far, these included
        """
        if self.pace:
            await self.pace.wait(carried)
        self.counters.body_bytes += body
        if self.hold_at is not None and self.counters.body_bytes >= self.hold_at:
            self.held.set()
            await self.gate.wait()
