"""A short run of the fault matrix: tensorferry keeps its promises when connections, peers and processes fail.

The whole matrix, beside torchft's HTTPTransport, is `make faults`. A change runs one cell of each kind of fault.
"""

from __future__ import annotations

import itertools

import pytest

import tensorferry
from faults.matrix.catalogue import SCENARIOS
from faults.matrix.cell import Limits, Outcome
from faults.matrix.report import broken_promises
from faults.matrix.run_matrix import run_matrix

# The first test waits for the outcomes of all cells.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.beyond_torchft]

LIMITS = Limits(nbytes=24 << 20, timeout=4.0, stall=8.0)

# Some rows with a second source beside the faulty one, with a secret and with TLS; `make faults` runs all.
BESIDE = (
    "half-open-all-first", "drip-all-first", "flip-all-first", "drip-head-all-second", "move-on-second",
    "source-sigkill-second", "source-sigstop-first", "other-state-first", "other-state-second",
)  # fmt: skip
SECURED = ("none", "truncate-once", "half-open-lane", "flip-lane", "source-restart")

CELLS = [("tensorferry", row.name) for row in SCENARIOS.values() if not row.beside]
CELLS += [("tensorferry", row) for row in BESIDE]
CELLS += [("tensorferry-copy", row) for row in ("none", *(r.name for r in SCENARIOS.values() if r.private))]
CELLS += [("tensorferry-secret", row) for row in SECURED]
CELLS += [("tensorferry-tls", row) for row in (*SECURED, "drip-head-all", "drip-head-all-second")]

#: What each change runs; the others are for the night.
QUICK_CELLS = {
    *(("tensorferry", row) for row in ("drip-all", "replace-data", "pickle-system", "source-sigkill-second")),
    *(
        ("tensorferry", row)
        for row in ("source-sigstop", "source-sigkill", "half-open-all", "truncate-all", "flip-all")
    ),
    *(("tensorferry", row) for row in ("wrong-step", "source-restart", "republish", "reader-stall")),
    *(("tensorferry-copy", "reader-stall"), ("tensorferry-secret", "none"), ("tensorferry-tls", "flip-lane")),
}
assert set(CELLS) >= QUICK_CELLS
CASES = [pytest.param(cell, marks=() if cell in QUICK_CELLS else pytest.mark.nightly) for cell in CELLS]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[tuple[str, str], Outcome]:
    """Returns the outcomes of the chosen cells, which run several at a time because most of them wait."""
    chosen: dict[tuple[str, str], None] = {}
    for item in request.session.items:
        if item.module is request.module and outcomes.__name__ in item.fixturenames:
            chosen[item.callspec.params["cell"]] = None
    cells = sorted(chosen, key=CELLS.index)
    came: list[Outcome] = []
    for transport, rows in itertools.groupby(cells, key=lambda cell: cell[0]):
        came += run_matrix([transport], [row for _, row in rows], limits=LIMITS, jobs=4)
    return {(outcome.transport, outcome.fault): outcome for outcome in came}


@pytest.mark.parametrize("cell", CASES, ids="-".join)
def test_promises_are_kept(cell: tuple[str, str], outcomes: dict[tuple[str, str], Outcome]) -> None:
    """No byte is wrong, no source is harmed, no receive exceeds its deadline by 1 s, and the end is as documented."""
    transport, row = cell
    outcome = outcomes[cell]
    if outcome.late and outcome.outcome != "hung":
        # Other cells may have kept the machine busy, so late cells run once more, alone. A second delay is a failure.
        (outcome,) = run_matrix([transport], [row], limits=LIMITS, jobs=1)
    assert not broken_promises(outcome, SCENARIOS[row].promised(transport)), outcome


CATCHABLE = {
    "truncate-all": {"OSError", "ConnectionError", "URLError"},
    "half-open-all": {"OSError", "TimeoutError", "URLError"},
    "source-sigstop": {"OSError", "TimeoutError", "URLError"},
    "source-sigkill": {"OSError", "URLError"},
    "flip-all": {"ValueError"},
    "wrong-step": {"OSError", "HTTPError"},
}


@pytest.mark.parametrize("cell", [("tensorferry", row) for row in CATCHABLE], ids=CATCHABLE)
def test_errors_are_what_callers_of_torchft_catch(
    cell: tuple[str, str], outcomes: dict[tuple[str, str], Outcome]
) -> None:
    outcome = outcomes[cell]
    assert outcome.error in tensorferry.__all__
    assert {"TensorferryError", *CATCHABLE[cell[1]]} <= set(outcome.error_classes)
    assert "127.0.0.1:" in outcome.message or cell[1] == "wrong-step"


@pytest.mark.parametrize("cell", [("tensorferry", "reader-stall"), ("tensorferry-copy", "reader-stall")])
def test_only_borrowed_memory_is_waited_for(cell: tuple[str, str], outcomes: dict[tuple[str, str], Outcome]) -> None:
    """A reader that takes nothing is cut off after 2 s; the wait shows that the one of this row really is stuck."""
    assert (outcomes[cell].source_seconds > 1) == (cell[0] == "tensorferry"), outcomes[cell]
