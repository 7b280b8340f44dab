"""Runs many cells, some at a time, and puts what came of them into a table."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..proxy.faults import Fault
from .candidates import BUILTIN, Candidate
from .catalogue import SCENARIOS
from .processes import ChildGone, ChildHung
from .run_cell import Limits, Outcome, run_cell
from .scenario import HEALED, LeftOut, Scenario

__all__ = [
    "broken_promises",
    "candidate",
    "format_markdown",
    "format_table",
    "from_json",
    "run_matrix",
    "scenario",
    "to_json",
]


LEFT_OUT = "left out"


def candidate(transport: str | Candidate) -> Candidate:
    """A transport by name (``"tensorferry"``, ``"torchft"``), or by ``"module:callable"``."""
    if isinstance(transport, Candidate):
        return transport
    if transport in BUILTIN:
        return BUILTIN[transport]
    if ":" not in transport:
        raise ValueError(f"no transport {transport!r}: {', '.join(BUILTIN)}, or module:callable")
    return Candidate(transport, transport)


def scenario(fault: str | Scenario | Fault) -> Scenario:
    """A row by name; a fault alone makes a row of its own, without a promise about its end."""
    if isinstance(fault, Scenario):
        return fault
    if isinstance(fault, Fault):
        return Scenario(repr(fault), "a fault of the caller's", (fault,), expected=frozenset())
    if fault not in SCENARIOS:
        raise ValueError(f"no fault {fault!r}: {', '.join(SCENARIOS)}")
    return SCENARIOS[fault]


def run_matrix(
    transports: Iterable[str | Candidate] = ("tensorferry",),
    faults: Iterable[str | Scenario | Fault] | None = None,
    *,
    repeats: int = 1,
    limits: Limits | None = None,
    jobs: int = 2,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Runs each fault against each transport, every time in fresh processes that are ended in any case.

    Args:
        transports: names, ``module:callable`` or candidates
        faults: names of rows, rows of your own, or single faults; all rows if left out
        repeats: how often each
        limits: size of the state, deadline, and how long a source may stall
        jobs: cells that run at a time
        progress: called with each outcome as it comes, from other threads

    Returns:
        The outcomes, in the order of faults, transports, repeats; none for a fault that a transport cannot have, and
        ``"left out"``, with the reason, for one that this machine cannot have.

    Raises:
        ValueError: no such transport or fault
    """
    columns = [candidate(t) for t in transports]
    rows = [scenario(f) for f in (SCENARIOS if faults is None else faults)]
    limits = limits or Limits()

    def run(cell: tuple[Candidate, Scenario, int]) -> Outcome:
        column, row, repeat = cell
        try:
            outcome = run_cell(column, row, limits, repeat)
        except (ChildGone, ChildHung) as error:  # before anything went wrong on purpose
            outcome = Outcome(row.name, column.name, repeat, outcome="did not start", message=str(error))
        except LeftOut as reason:
            outcome = Outcome(row.name, column.name, repeat, outcome=LEFT_OUT, message=str(reason))
        if progress:
            progress(outcome)
        return outcome

    cells = [
        (column, row, repeat) for row in rows for column in columns if row.concerns(column) for repeat in range(repeats)
    ]
    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="cell") as pool:
        return list(pool.map(run, cells))


def broken_promises(outcome: Outcome, expected: frozenset[str]) -> list[str]:
    """What tensorferry promises for every fault and ``outcome`` does not keep; ``expected``: how it may end."""
    if outcome.outcome == LEFT_OUT:
        return []
    broken = []
    if outcome.outcome == "code ran":
        broken.append("code of a hostile source ran")
    if outcome.slow and not outcome.late:
        broken.append(f"the receive took {outcome.seconds:.1f} s, which is too much of its deadline for this fault")
    if outcome.wrong_bytes:
        broken.append(f"{outcome.wrong_bytes} wrong bytes")
    if outcome.hurt:
        broken.append(f"the source was hurt: {outcome.source}")
    if outcome.late:
        broken.append(f"the receive took {outcome.seconds:.1f} s, past its deadline")
    if not outcome.struck:
        broken.append("the fault never struck")
    if expected and outcome.ending not in expected:
        broken.append(f"it ended with {outcome.ending}, not {' or '.join(sorted(expected))}")
    if outcome.error and expected and "TensorferryError" not in outcome.error_classes:
        broken.append(f"{outcome.error} is no TensorferryError")
    if outcome.error == "FetchTimeout" and "timed out" not in outcome.message:
        broken.append(f"a timeout that does not say so: {outcome.message}")
    return broken


def format_table(outcomes: Sequence[Outcome]) -> str:
    """A line per fault and transport: endings, the source, median and longest seconds, wrong bytes."""
    lines = [("fault", "transport", "outcome", "source", "seconds", "wrong bytes")]
    cells: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        cells.setdefault((outcome.fault, outcome.transport), []).append(outcome)
    for (fault, transport), runs in cells.items():
        seconds = [run.seconds for run in runs]
        span = f"{statistics.median(seconds):.1f}" + (f" (max {max(seconds):.1f})" if len(runs) > 1 else "")
        lines.append(
            (
                fault,
                transport,
                _counted([_ending(run) for run in runs]),
                _counted([run.source for run in runs]),
                span,
                str(sum(run.wrong_bytes for run in runs)),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    rows.insert(1, "  ".join("-" * width for width in widths))
    rows += ["", *(_summary(name, outcomes) for name in dict.fromkeys(o.transport for o in outcomes))]
    return "\n".join(rows)


def format_markdown(outcomes: Sequence[Outcome]) -> str:
    """A line per fault and a column per transport: endings, sources that were hurt, median and longest seconds."""
    transports = list(dict.fromkeys(outcome.transport for outcome in outcomes))
    lines = [["fault", *transports], ["---"] * (1 + len(transports))]
    for fault in dict.fromkeys(outcome.fault for outcome in outcomes):
        line = [f"`{fault}`"]
        for transport in transports:
            runs = [o for o in outcomes if (o.fault, o.transport) == (fault, transport)]
            line.append(_markdown_cell(runs) if runs else "")
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_cell(runs: list[Outcome]) -> str:
    text = _counted([_ending(run) for run in runs])
    if hurt := [run.source for run in runs if run.hurt]:
        text += f"; source {_counted(hurt)}"
    if timed := [run.seconds for run in runs if run.outcome not in (LEFT_OUT, "crashed")]:
        text += f"; {statistics.median(timed):.1f} s" + (f", at most {max(timed):.1f} s" if len(timed) > 1 else "")
    return text.replace("|", r"\|")


def _ending(outcome: Outcome) -> str:
    if outcome.outcome == LEFT_OUT:
        return f"{LEFT_OUT} ({outcome.message})"
    text = outcome.ending if outcome.outcome in (HEALED, "error") else outcome.outcome.upper()
    late = " LATE" if outcome.late else " SLOW" if outcome.slow else ""
    return text + ("" if outcome.outcome == "hung" else late) + ("" if outcome.struck else " (never struck)")


def _counted(texts: list[str]) -> str:
    counts = Counter(texts)
    if len(counts) == 1 and len(texts) == 1:
        return texts[0]
    return ", ".join(f"{count} {text}" for text, count in counts.most_common())


def _summary(transport: str, outcomes: Sequence[Outcome]) -> str:
    left_out = [o for o in outcomes if o.transport == transport and o.outcome == LEFT_OUT]
    mine = [o for o in outcomes if o.transport == transport and o.outcome != LEFT_OUT]
    wrong = [o for o in mine if o.wrong_bytes]
    return (
        f"{transport}: {len(mine)} runs, {sum(o.outcome == HEALED for o in mine)} healed, "
        f"{sum(o.outcome == 'error' for o in mine)} errors, "
        f"{len(wrong)} with wrong bytes ({sum(o.wrong_bytes for o in wrong)} bytes), "
        f"{sum(o.late for o in mine)} past the deadline + 1 s, {sum(o.hurt for o in mine)} with a source hurt, "
        f"{sum(not o.struck for o in mine)} whose fault never struck"
        + (f", {len(left_out)} left out" if left_out else "")
    )


def from_json(text: str) -> list[Outcome]:
    """The outcomes that :func:`to_json` wrote."""
    return [Outcome(**{**row, "error_classes": tuple(row["error_classes"])}) for row in json.loads(text)["outcomes"]]


def to_json(outcomes: Sequence[Outcome], **about: Any) -> str:
    """All outcomes as JSON, with whatever else is to be told beside them."""
    return json.dumps({**about, "outcomes": [dataclasses.asdict(o) for o in outcomes]}, indent=1)
