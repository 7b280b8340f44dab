"""Runs the cells of the matrix, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from .candidates import BUILTIN, Candidate
from .catalogue import SCENARIOS
from .cell import Limits, Outcome
from .processes import ChildGone, ChildHung
from .run_cell import run_cell
from .scenario import Scenario


def candidate(transport: str | Candidate) -> Candidate:
    """Returns the candidate for a name (``"tensorferry"``, ``"torchft"``) or for ``"module:callable"``.

    Raises:
        ValueError: no candidate has this name
    """
    if isinstance(transport, Candidate):
        return transport
    if transport in BUILTIN:
        return BUILTIN[transport]
    if ":" not in transport:
        raise ValueError(f"unknown transport {transport!r}: choose {', '.join(BUILTIN)}, or module:callable")
    return Candidate(transport, transport)


def scenario(fault: str | Scenario) -> Scenario:
    """Returns the scenario for a name.

    Raises:
        ValueError: no scenario has this name
    """
    if isinstance(fault, Scenario):
        return fault
    if fault not in SCENARIOS:
        raise ValueError(f"unknown fault {fault!r}: choose one of {', '.join(SCENARIOS)}")
    return SCENARIOS[fault]


def run_matrix(
    transports: Iterable[str | Candidate],
    faults: Iterable[str | Scenario],
    *,
    repeats: int = 1,
    limits: Limits | None = None,
    jobs: int = 2,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Runs each fault against each transport, every time in fresh processes, which are always ended.

    Args:
        transports: names, ``module:callable`` or candidates
        faults: names of scenarios, or scenarios
        repeats: how often each combination runs
        limits: size of the state, deadline, and how long a source may stall
        jobs: how many cells run at a time
        progress: called with each outcome as soon as it is known, from other threads

    Returns:
        The outcomes, in the order of faults, transports, repeats. There is none for a fault that a transport cannot
        have; where a process does not start, it is ``"did not start"``, with the reason.

    Raises:
        ValueError: a name is not that of a transport or a fault
    """
    columns = [candidate(t) for t in transports]
    rows = [scenario(f) for f in faults]
    limits = limits or Limits()

    def run(cell: tuple[Candidate, Scenario, int]) -> Outcome:
        column, row, repeat = cell
        try:
            outcome = run_cell(column, row, limits, repeat)
        except (ChildGone, ChildHung) as error:  # before the scenario began
            outcome = Outcome(row.name, column.name, repeat, outcome="did not start", message=str(error))
        if progress:
            progress(outcome)
        return outcome

    cells = [
        (column, row, repeat) for row in rows for column in columns if row.concerns(column) for repeat in range(repeats)
    ]
    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="cell") as pool:
        return list(pool.map(run, cells))
