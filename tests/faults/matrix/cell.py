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
from .candidates import BUILTIN, Candidate
from .name_server import NAME
from .processes import AllowedState, Child, Orphan, Processes, wait_until
from .scenario import Scenario
from .workers import Setting

STEP = 7

AHEAD = 0.25
"""The part of the state that a healthy source beside the faulty one may serve before the fault has struck. It is more
than what comes with the header, and too little for a receive to finish without the faulty source."""

RAIL = "127.0.0.2"
"""The second address of a source that has one. The proxy of the first one listens on 127.0.0.1."""

SHARE = 2 << 20
"""Body bytes that a connection may carry before a fault has struck: more than the offset of any fault, and less than
the state divided by the number of connections."""

LOCAL_SECONDS = 2.0
"""The least time in which a source sends its state to a process on the same machine, seconds."""

OPENED = 64 << 10
"""Body bytes after which a receive counts as begun: small requests come before."""

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
    ended), ``"code ran"`` (a hostile source's), ``"did not start"`` (a process of the cell), or ``"left out"``:
    ``message`` then says what this machine lacks."""
    source: str = "fine"
    """``"fine"``, ``"gone"`` (the fault ended it), or how it was hurt: ``"crashed"``, ``"raised"``, ``"stalled"``,
    ``"port open"`` (after its end), ``"next heal failed"``."""
    seconds: float = 0.0
    late: bool = False
    """Whether the receive took longer than its deadline and one second."""
    slow: bool = False
    """Whether the receive took longer than the part of the deadline that the scenario allows."""
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
        LeftOut: the system does not allow what the scenario requires
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
        self.others: list[Child] = []
        self.orphan: Orphan | None = None
        self.port_open = False
        self.receiver = processes.receiver(candidate)
        self.relay: Child | None = None
        if scenario.relay:
            self.relay = processes.receiver(candidate, Setting(in_place=scenario.relay == "in place"))
        source = BUILTIN["torchft"] if scenario.stock else candidate
        self.source, self.metadata = processes.source(source, STEP, seed, scenario.trap)
        self.proxy = FaultProxy.before(self.metadata)
        self.beside: FaultProxy | None = None
        self.rail: FaultProxy | None = None
        self.happened = False

    def allow_newer(self) -> None:
        """Also allows the newer state as the result of the receive, as long as all of it is the newer one."""
        self.seeds = [self._seed, self.newer_seed]

    def another_source(self, same_state: bool) -> tuple[str, int, str]:
        """Starts another source with the same or the newer state; returns its host, port and metadata."""
        source, metadata = self._processes.source(self._candidate, STEP, self._seed if same_state else self.newer_seed)
        self.others.append(source)
        url = urlsplit(metadata)
        return url.hostname or "", url.port or 80, metadata

    @contextlib.contextmanager
    def sources(self, scenario: Scenario) -> Iterator[str]:
        """Yields the metadata for the receiver: of the source behind the proxy, and of the healthy one if there is one.

        The healthy source has a proxy of its own, which stops at :data:`AHEAD`.
        """
        through = self.proxy.through(self.metadata)
        if scenario.silent_names:
            host, port = self.proxy.address
            through = through.replace(f"{host}:{port}", f"{NAME}:{port}")
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

    @contextlib.contextmanager
    def second_address(self, scenario: Scenario) -> Iterator[None]:
        """While the block runs, the source can be reached by a second address, if the scenario has faults for it.

        It has a proxy there, at the port of the first one, which stops at :data:`AHEAD`.
        """
        if not scenario.rail:
            yield
            return
        source = urlsplit(self.metadata)
        listen = (RAIL, self.proxy.address[1])
        with FaultProxy(source.hostname or "", source.port or 80, scenario.rail, listen) as self.rail:
            self.proxy.hold(int(self.nbytes * AHEAD))
            yield

    def strikes(self, scenario: Scenario) -> int:
        """Counts how often the fault has struck, attacks left out."""
        if scenario.during:  # its connection faults only prepare for what happens then
            return int(self.happened)
        if scenario.silent_names:
            return int(self._processes.names_asked.exists())
        if scenario.trap:  # the receiver has reached it
            return int(self.proxy.counters.body_bytes > 0)
        if scenario.other_state:  # the receiver has reached both states
            return int(all(proxy and proxy.counters.response_bytes for proxy in (self.proxy, self.beside)))
        if self.rail:
            return self.rail.fired.total()
        certain = scenario.wrong_step or not (scenario.faults or scenario.attack)
        return self.proxy.fired.total() + certain

    def ask_source(self, request: tuple[Any, ...]) -> Any:
        """Sends a request to the source's trainer and returns the answer; raises like :meth:`Child.ask`."""
        return self.ask(self.source, request)

    def ask(self, source: Child, request: tuple[Any, ...]) -> Any:
        """Sends a request to the trainer of any source and returns the answer; raises like :meth:`Child.ask`."""
        return source.ask(request, self.timeout + self._limits.stall + self._limits.grace)

    def wait_halfway(self, part: float) -> bool:
        """Waits until a source that sends slowly, without the network, has sent a part of the state.

        Returns:
            ``False`` if the receive ended before, or if the bytes went through the proxy instead of past it.
        """
        carried = self.proxy.counters
        wait_until(lambda: carried.body_bytes > OPENED or self.receiver.has_answered(), self.timeout)
        wait_until(self.receiver.has_answered, part * LOCAL_SECONDS)
        return not self.receiver.has_answered() and carried.body_bytes < self.nbytes * part / 2 + (1 << 20)

    def wait_asked(self) -> bool:
        """Waits until the receiver has sent a request and waits for the answer; ``False`` if that did not happen."""
        has_asked = wait_until(lambda: self.proxy.counters.request_bytes > 0, self.timeout / 2)
        wait_until(self.receiver.has_answered, 0.3)
        return has_asked and not self.receiver.has_answered()

    def adopt(self, pid: int) -> None:
        """Takes over a process that the source has forked, so that it is ended with the cell."""
        self.orphan = self._processes.adopt(pid)

    def start_relay(self, scenario: Scenario, through: str) -> None:
        """Has the second receiver begin, if there is one. ``through`` is the metadata that leads through the proxy."""
        if self.relay:
            metadata = self.metadata if scenario.relay == "around the proxy" else through
            within = scenario.relay_timeout or self._limits.timeout
            self.relay.send((metadata, self.step, self.allowed, within))

    def resume_receiver(self) -> None:
        """Continues a stopped receiver; it is not late within a second of this."""
        self.receiver.signal(signal.SIGCONT)
        self.resumed = time.monotonic()

    def withdraw(self) -> None:
        """Makes the source withdraw its state, and its trainer write over it."""
        self.ask_source(("withdraw",))
