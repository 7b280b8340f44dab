"""Runs one cell of the matrix: a source, a receiver and one scenario."""

from __future__ import annotations

import dataclasses
import time

from ..proxy.proxy import FaultProxy
from .candidates import Candidate
from .cell import PATIENCE, SHARE, STEP, Cell, Limits, Outcome
from .processes import Child, ChildGone, ChildHung, Processes, wait_until
from .scenario import Scenario
from .workers import Received, SourceReport


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
    """
    outcome = Outcome(scenario.name, candidate.name, repeat)
    limits = dataclasses.replace(limits, nbytes=max(limits.nbytes, scenario.nbytes))
    candidate = dataclasses.replace(candidate, lanes=candidate.lanes and (scenario.lanes or candidate.lanes))
    bound = 8 * limits.timeout + 10 * limits.stall + 300
    with Processes(limits.nbytes, limits.timeout, bound) as processes:
        cell = Cell(processes, candidate, scenario, limits, seed=1000 + 2 * repeat)
        cell.proxy.close()
        script = scenario.faults(cell) if callable(scenario.faults) else scenario.faults
        with FaultProxy.before(cell.metadata, script) as cell.proxy:
            if script and not (scenario.during or scenario.beside):
                cell.proxy.pace(SHARE, PATIENCE * limits.timeout)
            _receive(cell, scenario, limits, outcome)
            outcome.struck += cell.strikes(scenario)
        if processes.marker.exists():
            outcome.notes.append(f"the receive ended with {outcome.ending}: {outcome.message}")
            outcome.outcome, outcome.error, outcome.wrong_bytes = "code ran", None, 0
        _examine_source(cell, processes, candidate, scenario, limits, outcome)
    return outcome


def _receive(cell: Cell, scenario: Scenario, limits: Limits, outcome: Outcome) -> None:
    """Runs the receive through the proxy, with what happens during it, and fills in ``outcome``."""
    if scenario.during:
        cell.proxy.hold(int(limits.nbytes * scenario.part))
    step = STEP + (5 if scenario.wrong_step else 0)
    receiver = cell.receiver
    if scenario.during:
        cell.ask_source(("prepare", cell.newer_seed))  # in advance, because it takes time
    with cell.sources(scenario) as metadata:
        # The receiver may return either state; whether the newer one is allowed is known only at the end.
        cell.receive_started = time.monotonic()
        receiver.send((metadata, step, cell.allowed, limits.timeout))
        try:
            if scenario.during:
                cell.happened = cell.proxy.wait_held(limits.timeout, receiver.has_answered)
            elif cell.beside:
                wait_until(lambda: cell.strikes(scenario) > 0 or receiver.has_answered(), limits.timeout)
            if cell.beside:
                cell.beside.release()
            if cell.happened:
                _strike_source(cell, scenario, outcome)
            cell.proxy.release()
            received = cell._processes.received(receiver, limits.timeout + limits.grace)
        except ChildHung as hung:
            outcome.outcome, outcome.seconds, outcome.late = "hung", time.monotonic() - cell.receive_started, True
            outcome.message = str(hung)
        except ChildGone as gone:
            outcome.outcome, outcome.message = "crashed", str(gone)
        else:
            _judge(received, cell, limits, outcome)


def _strike_source(cell: Cell, scenario: Scenario, outcome: Outcome) -> None:
    """Does what the scenario has happen during a receive; notes it if the source crashes or stalls of it."""
    assert scenario.during
    try:
        scenario.during(cell)
    except (ChildGone, ChildHung) as error:
        outcome.source = "crashed" if isinstance(error, ChildGone) else "stalled"
        outcome.notes.append(str(error))


def _judge(received: Received, cell: Cell, limits: Limits, outcome: Outcome) -> None:
    outcome.seconds = received.seconds
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
        outcome.source = "gone"
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
    _judge_report(report, limits, outcome)
    _look_for_panic(cell.source, outcome)
    try:
        alike = outcome.outcome in ("healed", "error", "wrong bytes")
        fresh = cell.receiver if alike else processes.receiver(candidate)
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


def _look_for_panic(source: Child, outcome: Outcome) -> None:
    if "panicked" in source.printed():
        outcome.source = "crashed"
        outcome.notes.append(source.printed())


def _judge_report(report: SourceReport, limits: Limits, outcome: Outcome) -> None:
    if report.longest_pause > limits.stall:
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
