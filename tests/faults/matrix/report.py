"""Outcomes of the matrix as a table and as JSON, and the promises that they break."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .cell import Outcome
from .scenario import HEALED

LEFT_OUT = "left out"
"""The outcome of a cell that this machine cannot have."""


def broken_promises(outcome: Outcome, expected: frozenset[str]) -> list[str]:
    """Returns the promises of tensorferry that an outcome breaks, one sentence each.

    Args:
        outcome: of one cell
        expected: ``"healed"`` or names of exception classes with which the receive may end; empty: any
    """
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
        span = f"{statistics.median(seconds):.1f}" + (f" (max {max(seconds):.1f})" if len(runs) > 1 else "")
        lines.append(
            (
                fault,
                transport,
                _with_counts([_ending_text(run) for run in runs]),
                _with_counts([run.source for run in runs]),
                span,
                str(sum(run.wrong_bytes for run in runs)),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    rows.insert(1, "  ".join("-" * width for width in widths))
    rows += ["", *(_summary(name, outcomes) for name in dict.fromkeys(o.transport for o in outcomes))]
    return "\n".join(rows)


def _ending_text(outcome: Outcome) -> str:
    if outcome.outcome == LEFT_OUT:
        return f"{LEFT_OUT} ({outcome.message})"
    text = outcome.ending if outcome.outcome in (HEALED, "error") else outcome.outcome.upper()
    late = " LATE" if outcome.late else " SLOW" if outcome.slow else ""
    return text + ("" if outcome.outcome == "hung" else late) + ("" if outcome.struck else " (never struck)")


def _with_counts(texts: list[str]) -> str:
    """Returns each text once, behind how often it occurs, the most frequent first; a single one without a number."""
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


def to_json(outcomes: Sequence[Outcome], **about: Any) -> str:
    """Returns outcomes as JSON; ``about`` is stored beside them."""
    return json.dumps({**about, "outcomes": [dataclasses.asdict(o) for o in outcomes]}, indent=1)
