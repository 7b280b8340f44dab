"""Runs one cell of the matrix: a source, a receiver and one scenario."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..proxy.proxy import FaultProxy
from .attacks import attacking
from .candidates import BUILTIN, Candidate
from .idle_crowd import IdleCrowd, crowding
from .name_server import NAME
from .processes import AllowedState, Child, ChildGone, ChildHung, Orphan, Processes, wait_until
from .scenario import LeftOut, Scenario
from .traps import missing
from .workers import Received, Setting, SourceReport

__all__ = ["Cell", "Limits", "Outcome", "run_cell"]

STEP = 7

AHEAD = 0.25
"""The part of the state that a healthy source beside the faulty one may serve before the fault has struck. It is more
than what comes with the header, and too little for a receive to finish without the faulty source."""

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
    ended), ``"code ran"`` (a hostile source's), or ``"left out"``: ``message`` then says what this machine lacks."""
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
        source = BUILTIN["torchft"] if scenario.stock else candidate
        self.source, self.metadata = processes.source(source, STEP, seed, scenario.trap)
        self.proxy = FaultProxy.before(self.metadata)
        self.beside: FaultProxy | None = None
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

    def resume_receiver(self) -> None:
        """Continues a stopped receiver; it is not late within a second of this."""
        self.receiver.signal(signal.SIGCONT)
        self.resumed = time.monotonic()

    def withdraw(self) -> None:
        """Makes the source withdraw its state, and its trainer write over it."""
        self.ask_source(("withdraw",))


def run_cell(candidate: Candidate, scenario: Scenario, limits: Limits, repeat: int = 0) -> Outcome:
    """Runs one cell in fresh processes. It ends in bounded time, whatever they do.

    Args:
        candidate: the transport
        scenario: what happens between source and receiver
        limits: sizes and times
        repeat: number of the run, from 0; decides the seeds of the states

    Raises:
        ChildGone: a process ended before the scenario began
        ChildHung: a process did not start in time
        LeftOut: this machine cannot have the scenario; the text says why
    """
    outcome = Outcome(scenario.name, candidate.name, repeat)
    limits = dataclasses.replace(
        limits, nbytes=max(limits.nbytes, scenario.nbytes), timeout=scenario.timeout or limits.timeout
    )
    candidate = dataclasses.replace(candidate, lanes=candidate.lanes and (scenario.lanes or candidate.lanes))
    bound = 8 * limits.timeout + 10 * limits.stall + 300
    _check_requirements(scenario)
    with Processes(limits.nbytes, limits.timeout, bound, _setting(scenario, limits)) as processes:
        cell = Cell(processes, candidate, scenario, limits, seed=1000 + 2 * repeat)
        cell.proxy.close()
        script = scenario.faults(cell) if callable(scenario.faults) else scenario.faults
        with FaultProxy.before(cell.metadata, script) as cell.proxy, _attack(cell, scenario, outcome):
            if script and not (scenario.during or scenario.beside):
                cell.proxy.pace(SHARE, PATIENCE * limits.timeout)
            _receive(cell, scenario, limits, outcome)
            outcome.struck += cell.strikes(scenario)
        if processes.marker.exists():
            outcome.notes.append(f"the receive ended with {outcome.ending}: {outcome.message}")
            outcome.outcome, outcome.error, outcome.wrong_bytes = "code ran", None, 0
        _examine_source(cell, processes, candidate, scenario, limits, outcome)
        for other in cell.others:
            _examine_other(cell, other, scenario, limits, outcome)
    return outcome


def _check_requirements(scenario: Scenario) -> None:
    if scenario.stock and importlib.util.find_spec("torchft") is None:
        raise LeftOut("torchft is not installed")
    if scenario.trap and (reason := missing(scenario.trap)):
        raise LeftOut(reason)


def _setting(scenario: Scenario, limits: Limits) -> Setting:
    slow = scenario.local and scenario.during
    rate = int(limits.nbytes / min(LOCAL_SECONDS, limits.timeout / 2)) if slow else 0
    return Setting(scenario.local, rate, scenario.in_place, scenario.silent_names)


@contextlib.contextmanager
def _attack(cell: Cell, scenario: Scenario, outcome: Outcome) -> Iterator[None]:
    if scenario.attack is None:
        yield
        return
    if isinstance(scenario.attack, IdleCrowd):
        attack = crowding(cell.metadata, cell.source.pid, scenario.attack)
    else:
        attack = attacking(cell.metadata, scenario.attack)
    with attack as opened:
        yield
        outcome.struck += opened()


def _receive(cell: Cell, scenario: Scenario, limits: Limits, outcome: Outcome) -> None:
    """Runs the receive through the proxy, with what happens during it, and fills in ``outcome``."""
    if scenario.during and not (scenario.local or scenario.waiting):
        cell.proxy.hold(int(limits.nbytes * scenario.part))
    step = STEP + (5 if scenario.wrong_step else 1 if scenario.waiting else 0)
    receiver = cell.receiver
    if scenario.during:
        cell.ask_source(("prepare", cell.newer_seed))  # in advance, because it takes time
    if scenario.waiting:
        cell.withdraw()
    with cell.sources(scenario) as metadata:
        # The receiver may return either state; whether the newer one is allowed is known only at the end.
        cell.receive_started = time.monotonic()
        receiver.send((metadata, step, cell.allowed, limits.timeout))
        try:
            if scenario.during and scenario.local:
                cell.happened = cell.wait_halfway(scenario.part)
            elif scenario.waiting:
                cell.happened = cell.wait_asked()
            elif scenario.during:
                cell.happened = cell.proxy.wait_held(limits.timeout, receiver.has_answered)
            elif cell.beside:
                wait_until(lambda: cell.strikes(scenario) > 0 or receiver.has_answered(), limits.timeout)
            if cell.beside:
                cell.beside.release()
            if cell.happened:
                _during(cell, scenario, outcome)
            cell.proxy.release()
            received = cell._processes.received(receiver, limits.timeout + limits.grace)
            cell.happened = cell.happened and (received.replaced or not scenario.in_place)
        except ChildHung as hung:
            outcome.outcome, outcome.seconds, outcome.late = "hung", time.monotonic() - cell.receive_started, True
            outcome.message = str(hung)
        except ChildGone as gone:
            outcome.outcome, outcome.message = "crashed", str(gone)
        else:
            _judge(received, cell, scenario, limits, outcome)


def _during(cell: Cell, scenario: Scenario, outcome: Outcome) -> None:
    assert scenario.during
    try:
        scenario.during(cell)
    except (ChildGone, ChildHung) as error:
        outcome.source = "crashed" if isinstance(error, ChildGone) else "stalled"
        outcome.notes.append(str(error))


def _judge(received: Received, cell: Cell, scenario: Scenario, limits: Limits, outcome: Outcome) -> None:
    outcome.seconds = received.seconds
    outcome.slow = bool(scenario.prompt) and received.seconds > scenario.prompt * limits.timeout
    outcome.late = received.seconds > max(limits.timeout, cell.resumed - cell.receive_started) + 1
    outcome.error, outcome.error_classes = received.error, received.classes
    outcome.message = received.message
    if received.error:
        outcome.outcome = "error"
    elif received.wrong_bytes:
        outcome.outcome, outcome.wrong_bytes = "wrong bytes", received.wrong_bytes
    elif received.newer and len(cell.seeds) == 1:
        outcome.outcome, outcome.wrong_bytes = "wrong bytes", limits.nbytes
        outcome.notes.append("all of it is another state than the requested one")


def _examine_source(
    cell: Cell, processes: Processes, candidate: Candidate, scenario: Scenario, limits: Limits, outcome: Outcome
) -> None:
    """Checks that the source goes on: its trainer publishes the next step, and a good receiver heals from that."""
    if not scenario.survives:
        outcome.source = "port open" if cell.port_open else "gone"
        return
    if outcome.hurt:
        return
    try:
        cell.withdraw()
        cell.ask_source(("publish", STEP + 2, cell.newer_seed))
        report = cell.ask_source(("report",))
    except (ChildGone, ChildHung) as error:
        outcome.source = "crashed" if isinstance(error, ChildGone) else "stalled"
        outcome.notes.append(str(error))
        return
    _judge_report(report, scenario, limits, outcome)
    _look_for_panic(cell.source, outcome)
    try:
        alike = outcome.outcome in ("healed", "error", "wrong bytes") and not (scenario.silent_names or scenario.stock)
        fresh = cell.receiver if alike else processes.receiver(candidate, plain=True)
        # Longer than the timeout: this checks whether the heal works, not how fast a busy machine is.
        within = limits.timeout + limits.stall
        newer = (cell.newer_seed, cell.newer_seed)
        after = processes.receive(fresh, cell.metadata, STEP + 2, [newer], within, limits.grace)
        failed = f"{after.error} {after.message}, {after.wrong_bytes} wrong bytes"
        failed = failed if after.error or after.wrong_bytes else ""
    except (ChildGone, ChildHung) as error:
        failed = str(error)
    if failed:
        outcome.source = outcome.source if outcome.hurt else "next heal failed"
        outcome.notes.append(f"the next heal: {failed}")


def _examine_other(cell: Cell, other: Child, scenario: Scenario, limits: Limits, outcome: Outcome) -> None:
    """Checks that a source beside the faulty one, or in its place, goes on: its trainer withdraws the state."""
    try:
        cell.ask(other, ("withdraw",))
        report = cell.ask(other, ("report",))
    except (ChildGone, ChildHung) as error:
        outcome.source = "crashed" if isinstance(error, ChildGone) else "stalled"
        outcome.notes.append(f"another source: {error}")
        return
    _judge_report(report, scenario, limits, outcome)
    _look_for_panic(other, outcome)


def _look_for_panic(source: Child, outcome: Outcome) -> None:
    if "panicked" in source.printed():
        outcome.source = "crashed"
        outcome.notes.append(source.printed())


def _judge_report(report: SourceReport, scenario: Scenario, limits: Limits, outcome: Outcome) -> None:
    # A source that was stopped on purpose has paused.
    paused = report.longest_pause > limits.stall and scenario.name != "source-pause"
    if paused:
        outcome.source = "stalled"
        outcome.notes.append(f"the source's loop paused for {report.longest_pause:.1f} s")
    outcome.source_seconds = max(outcome.source_seconds, *(seconds for _, seconds, _ in report.calls))
    for name, seconds, raised in report.calls:
        # disallow_checkpoint may wait for its readers for as long as its timeout.
        allowed = limits.stall + (limits.timeout if name == "disallow_checkpoint" else 0)
        if raised:
            outcome.source = "raised"
            outcome.notes.append(f"{name} raised {raised} after {seconds:.1f} s")
        elif seconds > allowed:
            outcome.source = "stalled"
            outcome.notes.append(f"{name} took {seconds:.1f} s")
