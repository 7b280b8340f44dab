"""One cell of the matrix: one source, one receiver, one thing that goes wrong between them."""

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
from .processes import Child, ChildGone, ChildHung, Children, Orphan, Right, wait_until
from .scenario import LeftOut, Scenario
from .traps import missing
from .workers import Received, Setting, SourceReport

__all__ = ["Cell", "Limits", "Outcome", "run_cell"]

STEP = 7

AHEAD = 0.25
"""The part of the state that a source beside the faulty one may serve before the fault has struck. It is more than what
the header comes with, and without the faulty one the receive is not over, however fast the other is."""

SHARE = 2 << 20
"""Bytes of bodies that a connection may carry before a fault has struck: more than the place of any fault in it, and
less than the state divided by the connections."""

LOCAL_SECONDS = 2.0
"""How long a source takes, at the least, to send its state to a process of the same machine."""

OPENED = 64 << 10
"""A receive has begun, and is not asking for small things only, when so many bytes of bodies have come."""

PATIENCE = 0.2
"""The part of the timeout that connections wait for the fault at most."""


@dataclass(frozen=True)
class Limits:
    """How large and how long.

    Args:
        nbytes: size of the state
        timeout: deadline of a receive, and the timeout both transports are made with, seconds
        stall: how long the source's loop may pause, or a call of it take beyond what its timeout explains, seconds
        grace: seconds past its deadline after which a receive is killed
    """

    nbytes: int = 64 << 20
    timeout: float = 10.0
    stall: float = 5.0
    grace: float = 15.0


@dataclass
class Outcome:
    """What came of one cell."""

    fault: str
    transport: str
    repeat: int = 0
    outcome: str = "healed"
    """``"healed"``, ``"error"``, ``"wrong bytes"``, ``"hung"`` (killed), ``"crashed"`` (the receiver), ``"code ran"``
    (a hostile source's), or ``"left out"``, and ``message`` says why this machine cannot have the fault."""
    source: str = "fine"
    """``"fine"``, ``"gone"`` (as the fault has it), or how it was hurt: ``"crashed"``, ``"raised"``, ``"stalled"``,
    ``"port open"`` (after its end), ``"next heal failed"``."""
    seconds: float = 0.0
    late: bool = False
    """Whether the receive took longer than its deadline and one second."""
    slow: bool = False
    """Whether it took longer than the part of the deadline that the row allows."""
    wrong_bytes: int = 0
    error: str | None = None
    error_classes: tuple[str, ...] = ()
    message: str = ""
    source_seconds: float = 0.0
    """The longest call of the source's trainer into its transport."""
    struck: int = 0
    """How often the fault struck; 0: it never did, and the cell says nothing."""
    notes: list[str] = field(default_factory=list)

    @property
    def hurt(self) -> bool:
        """Whether the source was hurt."""
        return self.source not in ("fine", "gone")

    @property
    def ending(self) -> str:
        """``outcome``, or the class of the error."""
        return self.error or self.outcome


class Cell:
    """What a scenario acts on."""

    def __init__(self, children: Children, candidate: Candidate, scenario: Scenario, limits: Limits, seed: int) -> None:
        self._children = children
        self._candidate = candidate
        self._limits = limits
        self._seed = seed
        self.timeout = limits.timeout
        self.nbytes = limits.nbytes
        self.told = self.resumed = 0.0
        self.step = STEP
        self.newer_seed = seed + 1
        self.seeds = [seed]
        self.right: list[Right] = [(seed, seed), (self.newer_seed, seed if scenario.in_step else self.newer_seed)]
        self.others: list[Child] = []
        self.orphan: Orphan | None = None
        self.port_open = False
        self.receiver = children.receiver(candidate)
        source = BUILTIN["torchft"] if scenario.stock else candidate
        self.source, self.metadata = children.source(source, STEP, seed, scenario.trap)
        self.proxy = FaultProxy.before(self.metadata)
        self.beside: FaultProxy | None = None
        self.happened = False

    def newer_is_right(self) -> None:
        """From here on the receiver may also end with the second state, if it has all of it."""
        self.seeds = [self._seed, self.newer_seed]

    def another_source(self, same_state: bool) -> tuple[str, int, str]:
        """Host, port and metadata of a source that takes the first one's place, or stands beside it."""
        source, metadata = self._children.source(self._candidate, STEP, self._seed if same_state else self.newer_seed)
        self.others.append(source)
        url = urlsplit(metadata)
        return url.hostname or "", url.port or 80, metadata

    @contextlib.contextmanager
    def sources(self, scenario: Scenario) -> Iterator[str]:
        """What the receiver is told: the way through the proxy, and the healthy source if there is one.

        That one is behind a proxy of its own, which stops at :data:`AHEAD`.
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
                self.newer_is_right()
                self.proxy.hold(int(self.nbytes * AHEAD))
            healthy = self.beside.through(metadata)
            yield self._candidate.joined([healthy, through] if scenario.beside == "in front" else [through, healthy])

    def strikes(self, scenario: Scenario) -> int:
        """How often the fault has struck, attacks left out."""
        if scenario.during:  # the faults of its connections are no more than its setting
            return int(self.happened)
        if scenario.silent_names:
            return int(self._children.names_asked.exists())
        if scenario.trap:  # the receiver has come to it
            return int(self.proxy.counters.body_bytes > 0)
        if scenario.other_state:  # the receiver has come to both states
            return int(all(proxy and proxy.counters.response_bytes for proxy in (self.proxy, self.beside)))
        certain = scenario.wrong_step or not (scenario.faults or scenario.attack)
        return self.proxy.fired.total() + certain

    def ask_source(self, request: tuple[Any, ...]) -> Any:
        """Has the source's trainer do something."""
        return self.ask(self.source, request)

    def ask(self, source: Child, request: tuple[Any, ...]) -> Any:
        """Has the trainer of any of the sources do something."""
        return source.ask(request, self.timeout + self._limits.stall + self._limits.grace)

    def wait_halfway(self, part: float) -> bool:
        """Waits for the moment at which a source that sends slowly has sent so much; ``False`` if that did not come.

        Nor has it come if the bytes went through the proxy instead of past it.
        """
        carried = self.proxy.counters
        wait_until(lambda: carried.body_bytes > OPENED or self.receiver.answered(), self.timeout)
        wait_until(self.receiver.answered, part * LOCAL_SECONDS)
        return not self.receiver.answered() and carried.body_bytes < self.nbytes * part / 2 + (1 << 20)

    def wait_asked(self) -> bool:
        """Waits until the receiver has asked for something and waits itself; ``False`` if it did not come to that."""
        asked = wait_until(lambda: self.proxy.counters.request_bytes > 0, self.timeout / 2)
        wait_until(self.receiver.answered, 0.3)
        return asked and not self.receiver.answered()

    def adopt(self, pid: int) -> None:
        """Has a process that the source has forked ended with the cell."""
        self.orphan = self._children.adopt(pid)

    def resume_receiver(self) -> None:
        """Lets a stopped receiver go on; it cannot have kept its deadline before."""
        self.receiver.signal(signal.SIGCONT)
        self.resumed = time.monotonic()

    def withdraw(self) -> None:
        """Has the source withdraw its state, and its trainer write over it."""
        self.ask_source(("withdraw",))


def run_cell(candidate: Candidate, scenario: Scenario, limits: Limits, repeat: int = 0) -> Outcome:
    """Runs one cell in processes of its own; it ends in time, whatever they do."""
    outcome = Outcome(scenario.name, candidate.name, repeat)
    limits = dataclasses.replace(
        limits, nbytes=max(limits.nbytes, scenario.nbytes), timeout=scenario.timeout or limits.timeout
    )
    candidate = dataclasses.replace(candidate, lanes=candidate.lanes and (scenario.lanes or candidate.lanes))
    bound = 8 * limits.timeout + 10 * limits.stall + 300
    _look_for_needs(scenario)
    with Children(limits.nbytes, limits.timeout, bound, _setting(scenario, limits)) as children:
        cell = Cell(children, candidate, scenario, limits, seed=1000 + 2 * repeat)
        cell.proxy.close()
        script = scenario.faults(cell) if callable(scenario.faults) else scenario.faults
        with FaultProxy.before(cell.metadata, script) as cell.proxy, _attack(cell, scenario, outcome):
            if script and not (scenario.during or scenario.beside):
                cell.proxy.pace(SHARE, PATIENCE * limits.timeout)
            _receive(cell, scenario, limits, outcome)
            outcome.struck += cell.strikes(scenario)
        if children.marker.exists():
            outcome.notes.append(f"the receive ended with {outcome.ending}: {outcome.message}")
            outcome.outcome, outcome.error, outcome.wrong_bytes = "code ran", None, 0
        _examine_source(cell, children, candidate, scenario, limits, outcome)
        for other in cell.others:
            _examine_other(cell, other, scenario, limits, outcome)
    return outcome


def _look_for_needs(scenario: Scenario) -> None:
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
    """One receive through the proxy, with what happens during it."""
    if scenario.during and not (scenario.local or scenario.waiting):
        cell.proxy.hold(int(limits.nbytes * scenario.part))
    step = STEP + (5 if scenario.wrong_step else 1 if scenario.waiting else 0)
    receiver = cell.receiver
    if scenario.during:
        cell.ask_source(("prepare", cell.newer_seed))  # so that it takes no time in mid-transfer
    if scenario.waiting:
        cell.withdraw()
    with cell.sources(scenario) as metadata:
        # The state may become one of two while the receive runs; which of them are right is known at its end.
        cell.told = time.monotonic()
        receiver.tell((metadata, step, cell.right, limits.timeout))
        try:
            if scenario.during and scenario.local:
                cell.happened = cell.wait_halfway(scenario.part)
            elif scenario.waiting:
                cell.happened = cell.wait_asked()
            elif scenario.during:
                cell.happened = cell.proxy.wait_held(limits.timeout, receiver.answered)
            elif cell.beside:
                wait_until(lambda: cell.strikes(scenario) > 0 or receiver.answered(), limits.timeout)
            if cell.beside:
                cell.beside.release()
            if cell.happened:
                _during(cell, scenario, outcome)
            cell.proxy.release()
            received = cell._children.received(receiver, limits.timeout + limits.grace)
            cell.happened = cell.happened and (received.replaced or not scenario.in_place)
        except ChildHung as hung:
            outcome.outcome, outcome.seconds, outcome.late = "hung", time.monotonic() - cell.told, True
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
    outcome.late = received.seconds > max(limits.timeout, cell.resumed - cell.told) + 1
    outcome.error, outcome.error_classes = received.error, received.classes
    outcome.message = received.message
    if received.error:
        outcome.outcome = "error"
    elif received.wrong_bytes:
        outcome.outcome, outcome.wrong_bytes = "wrong bytes", received.wrong_bytes
    elif received.newer and len(cell.seeds) == 1:
        outcome.outcome, outcome.wrong_bytes = "wrong bytes", limits.nbytes
        outcome.notes.append("it is all of a state that was not asked for")


def _examine_source(
    cell: Cell, children: Children, candidate: Candidate, scenario: Scenario, limits: Limits, outcome: Outcome
) -> None:
    """Whether the source goes on: its trainer's next step, and a good receiver's heal from that."""
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
        fresh = cell.receiver if alike else children.receiver(candidate, plain=True)
        # Whether it works is asked here, not how fast it is on a machine that may be busy.
        within = limits.timeout + limits.stall
        newer = (cell.newer_seed, cell.newer_seed)
        after = children.receive(fresh, cell.metadata, STEP + 2, [newer], within, limits.grace)
        failed = f"{after.error} {after.message}, {after.wrong_bytes} wrong bytes"
        failed = failed if after.error or after.wrong_bytes else ""
    except (ChildGone, ChildHung) as error:
        failed = str(error)
    if failed:
        outcome.source = outcome.source if outcome.hurt else "next heal failed"
        outcome.notes.append(f"the next heal: {failed}")


def _examine_other(cell: Cell, other: Child, scenario: Scenario, limits: Limits, outcome: Outcome) -> None:
    """Whether a source goes on that stands beside the faulty one, or took its place: its trainer's next step."""
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
    # A source that was stopped has paused, of course.
    paused = report.longest_pause > limits.stall and scenario.name != "source-pause"
    if paused:
        outcome.source = "stalled"
        outcome.notes.append(f"the source's loop paused for {report.longest_pause:.1f} s")
    outcome.source_seconds = max(outcome.source_seconds, *(seconds for _, seconds, _ in report.calls))
    for name, seconds, raised in report.calls:
        # disallow_checkpoint may wait for readers for as long as its timeout says.
        allowed = limits.stall + (limits.timeout if name == "disallow_checkpoint" else 0)
        if raised:
            outcome.source = "raised"
            outcome.notes.append(f"{name} raised {raised} after {seconds:.1f} s")
        elif seconds > allowed:
            outcome.source = "stalled"
            outcome.notes.append(f"{name} took {seconds:.1f} s")
