"""Outcomes of the matrix as a table, and the promises that they break."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from .cell import Outcome
from .scenario import HEALED


def broken_promises(outcome: Outcome, expected: frozenset[str]) -> list[str]:
    """Returns the promises of tensorferry that an outcome breaks, one sentence each.

    Args:
        outcome: of one cell
        expected: ``"healed"`` or names of exception classes with which the receive may end; empty: any
    """
    broken = []
    if outcome.outcome == "code ran":
        broken.append("code of a hostile source ran")
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
        broken.append(f"{outcome.error} is not a TensorferryError")
    if outcome.error == "FetchTimeout" and "timed out" not in outcome.message:
        broken.append(f"the message of a timeout does not say 'timed out': {outcome.message}")
    return broken


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Returns a table with a line per fault and transport: outcomes, source, median and longest time, wrong bytes."""
    lines = [("fault", "transport", "outcome", "source", "seconds", "wrong bytes")]
    cells: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        cells.setdefault((outcome.fault, outcome.transport), []).append(outcome)
    for (fault, transport), runs in cells.items():
        seconds = [run.seconds for run in runs]
        span = f"{statistics.median(seconds):.1f} (max {max(seconds):.1f})"
        endings, sources = (
            _with_counts(texts) for texts in ([_ending_text(r) for r in runs], [r.source for r in runs])
        )
        lines.append((fault, transport, endings, sources, span, str(sum(run.wrong_bytes for run in runs))))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _ending_text(outcome: Outcome) -> str:
    text = outcome.ending if outcome.outcome in (HEALED, "error") else outcome.outcome.upper()
    late = " LATE" if outcome.late and outcome.outcome != "hung" else ""
    return text + late + ("" if outcome.struck else " (never struck)")


def _with_counts(texts: Iterable[str]) -> str:
    """Returns each text once, behind how often it occurs, the most frequent first."""
    return ", ".join(f"{count} {text}" for text, count in Counter(texts).most_common())
