"""The fault suite can fail: transports that are broken on purpose are seen for what they do."""

from __future__ import annotations

import time

import pytest
import torch

from faults.matrix.candidates import Candidate
from faults.matrix.catalogue import SCENARIOS
from faults.matrix.cell import Limits
from faults.matrix.report import broken_promises
from faults.matrix.run_matrix import run_matrix
from tensorferry import HTTPTransport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.beyond_torchft]

LIMITS = Limits(nbytes=24 << 20, timeout=4.0, stall=8.0)


class HangsInReceive(HTTPTransport):
    def recv_checkpoint(self, src_rank, metadata, step, timeout):  # noqa: ARG002
        time.sleep(600)


class ReceivesOneWrongByte(HTTPTransport):
    def recv_checkpoint(self, *arguments, **more):
        state = super().recv_checkpoint(*arguments, **more)
        state["model"]["layer3.weight"].view(torch.uint8)[77] ^= 1
        return state


class RaisesInDisallow(HTTPTransport):
    def disallow_checkpoint(self):
        raise TimeoutError("timed out waiting for readers")


SEEN = {
    ("ReceivesOneWrongByte", "none"): [("wrong bytes", "next heal failed")],
    ("RaisesInDisallow", "none"): [("healed", "raised")],
    ("HangsInReceive", "none"): [("hung", "next heal failed")],
}
EACH_CHANGE = {"ReceivesOneWrongByte", "RaisesInDisallow"}


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=() if cell[0] in EACH_CHANGE else pytest.mark.nightly) for cell in SEEN]
)
def test_bad_transports_are_seen(cell: tuple[str, str]) -> None:
    name, row = cell
    (outcome,) = run_matrix([Candidate(name, f"{__name__}:{name}")], [row], limits=LIMITS)
    assert outcome.struck, outcome
    assert (outcome.outcome, outcome.source) in SEEN[cell], outcome
    assert broken_promises(outcome, SCENARIOS[row].expected)
