"""A cell of the matrix: its limits, its processes, and what came of it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..proxy.proxy import FaultProxy
from .candidates import Candidate
from .processes import AllowedState, Child, Processes
from .scenario import Scenario

STEP = 7

AHEAD = 0.25
"""The part of the state that a healthy source beside the faulty one may serve before the fault has struck. It is more
than what comes with the header, and too little for a receive to finish without the faulty source."""

SHARE = 2 << 20
"""Body bytes that a connection may carry before a fault has struck: more than the offset of any fault, and less than
the state divided by the number of connections."""

PATIENCE = 0.2
"""The part of the timeout for which connections wait for the fault at most."""


@dataclass(frozen=True)
class Limits:
    """Sizes and times of a run.

    Args:
        nbytes: size of the state
        timeout: deadline of a receive, and the timeout both transports are made with, seconds
        stall: how long the source's loop may pause, or a call into its transport exceed its own timeout, seconds
        grace: seconds after its deadline at which a receive is killed
    """

    nbytes: int = 64 << 20
    timeout: float = 10.0
    stall: float = 5.0
    grace: float = 15.0


@dataclass
class Outcome:
    """The result of one cell."""

    fault: str
    transport: str
    repeat: int = 0
    outcome: str = "healed"
    """``"healed"``, ``"error"``, ``"wrong bytes"``, ``"hung"`` (the receiver was killed), ``"crashed"`` (the receiver
    ended), ``"code ran"`` (a hostile source's), or ``"did not start"`` (a process of the cell)."""
    source: str = "fine"
    """``"fine"``, ``"gone"`` (the fault ended it), or how it was hurt: ``"crashed"``, ``"raised"``, ``"stalled"``,
    ``"next heal failed"``."""
    seconds: float = 0.0
    late: bool = False
    """Whether the receive took longer than its deadline and one second."""
    wrong_bytes: int = 0
    error: str | None = None
    error_classes: tuple[str, ...] = ()
    message: str = ""
    source_seconds: float = 0.0
    """The longest call of the source's trainer into its transport."""
    struck: int = 0
    """How often the fault struck; with 0 the cell proves nothing."""
    notes: list[str] = field(default_factory=list)

    @property
    def hurt(self) -> bool:
        """Whether the source was hurt."""
        return self.source not in ("fine", "gone")

    @property
    def ending(self) -> str:
        """The name of the exception's class if there was one, otherwise ``outcome``."""
        return self.error or self.outcome


class Cell:
    """The processes, the proxies and the state of one cell. A scenario's ``during`` acts on it.

    Args:
        processes: start and end the source and the receiver
        candidate: the transport
        scenario: what happens in the cell
        limits: sizes and times
        seed: of the state that the source publishes first; the newer state has the next seed

    Raises:
        ChildGone: a process ended, or the source could not publish
        ChildHung: a process did not start in time
    """

    def __init__(
        self, processes: Processes, candidate: Candidate, scenario: Scenario, limits: Limits, seed: int
    ) -> None:
        self._processes = processes
        self._candidate = candidate
        self._limits = limits
        self._seed = seed
        self.timeout = limits.timeout
        self.nbytes = limits.nbytes
        self.receive_started = self.resumed = 0.0
        self.step = STEP
        self.newer_seed = seed + 1
        self.seeds = [seed]
        self.allowed: list[AllowedState] = [
            (seed, seed),
            (self.newer_seed, seed if scenario.in_step else self.newer_seed),
        ]
        self.receiver = processes.receiver(candidate)
        self.source, self.metadata = processes.source(candidate, STEP, seed, scenario.trap)
        self.proxy = FaultProxy.before(self.metadata)
        self.beside: FaultProxy | None = None
        self.happened = False

    def allow_newer(self) -> None:
        """Also allows the newer state as the result of the receive, as long as all of it is the newer one."""
        self.seeds = [self._seed, self.newer_seed]

    def another_source(self, same_state: bool) -> tuple[str, int, str]:
        """Starts another source with the same or the newer state; returns its host, port and metadata."""
        _, metadata = self._processes.source(self._candidate, STEP, self._seed if same_state else self.newer_seed)
        url = urlsplit(metadata)
        return url.hostname or "", url.port or 80, metadata

    @contextlib.contextmanager
    def sources(self, scenario: Scenario) -> Iterator[str]:
        """Yields the metadata for the receiver: of the source behind the proxy, and of the healthy one if there is one.

        The healthy source has a proxy of its own, which stops at :data:`AHEAD`.
        """
        through = self.proxy.through(self.metadata)
        if not scenario.beside:
            yield through
            return
        metadata = self.another_source(same_state=not scenario.other_state)[2]
        with FaultProxy.before(metadata) as self.beside:
            self.beside.hold(int(self.nbytes * AHEAD))
            if scenario.other_state:
                self.allow_newer()
                self.proxy.hold(int(self.nbytes * AHEAD))
            healthy = self.beside.through(metadata)
            yield self._candidate.joined([healthy, through] if scenario.beside == "in front" else [through, healthy])

    def strikes(self, scenario: Scenario) -> int:
        """Counts how often the fault has struck."""
        if scenario.during:  # its connection faults only prepare for what happens then
            return int(self.happened)
        if scenario.trap:  # the receiver has reached it
            return int(self.proxy.counters.body_bytes > 0)
        if scenario.other_state:  # the receiver has reached both states
            return int(all(proxy and proxy.counters.response_bytes for proxy in (self.proxy, self.beside)))
        return self.proxy.fired.total() + (scenario.wrong_step or not scenario.faults)

    def ask_source(self, request: tuple[Any, ...]) -> Any:
        """Sends a request to the source's trainer and returns the answer; raises like :meth:`Child.ask`."""
        return self.ask(self.source, request)

    def ask(self, source: Child, request: tuple[Any, ...]) -> Any:
        """Sends a request to the trainer of any source and returns the answer; raises like :meth:`Child.ask`."""
        return source.ask(request, self.timeout + self._limits.stall + self._limits.grace)

    def resume_receiver(self) -> None:
        """Continues a stopped receiver; it is not late within a second of this."""
        self.receiver.signal(signal.SIGCONT)
        self.resumed = time.monotonic()

    def withdraw(self) -> None:
        """Makes the source withdraw its state, and its trainer write over it."""
        self.ask_source(("withdraw",))
