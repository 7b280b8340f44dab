"""The fault suite can fail: transports that are broken on purpose, and torchft's own, are seen for what they do."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch
from torch.utils._pytree import tree_map

from faults.__main__ import main
from faults.matrix.candidates import Candidate
from faults.matrix.catalogue import SCENARIOS
from faults.matrix.cell import Limits, Outcome
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


class ServesAddresses(HTTPTransport):
    """Serves the memory that tensors had when they were sent, even after it was freed."""

    def send_checkpoint(self, dst_ranks, step, state_dict, timeout):
        super().send_checkpoint(dst_ranks, step, tree_map(_at_its_address, state_dict), timeout)


def _at_its_address(leaf):
    if not isinstance(leaf, torch.Tensor) or not leaf.nbytes:
        return leaf
    memory = (ctypes.c_char * leaf.nbytes).from_address(leaf.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(leaf.dtype).view(leaf.shape)


def torchft_that_does_not_wait(timeout, lanes):
    """Does not wait for readers on withdrawal: the trainer writes over memory that is still being served."""
    from torchft.checkpointing import HTTPTransport as Stock

    return type("DoesNotWait", (Stock,), {"disallow_checkpoint": lambda _: None})(timeout, lanes)


SEEN = {
    ("ReceivesOneWrongByte", "none"): [("wrong bytes", "next heal failed")],
    ("RaisesInDisallow", "none"): [("healed", "raised")],
    ("HangsInReceive", "none"): [("hung", "next heal failed")],
    # Where the kernel reads freed memory, to send it, it refuses (EFAULT), and the connection ends.
    ("ServesAddresses", "replace-data"): [("error", "crashed"), ("error", "fine")],
    ("torchft_that_does_not_wait", "drain"): [("wrong bytes", "fine")],
}
EACH_CHANGE = {"ReceivesOneWrongByte", "RaisesInDisallow"}


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=() if cell[0] in EACH_CHANGE else pytest.mark.nightly) for cell in SEEN]
)
def test_bad_transports_are_seen(cell: tuple[str, str]) -> None:
    if "torchft" in cell[0]:
        pytest.importorskip("torchft")
    name, row = cell
    (outcome,) = run_matrix([Candidate(name, f"{__name__}:{name}")], [row], limits=LIMITS)
    assert outcome.struck, outcome
    assert (outcome.outcome, outcome.source) in SEEN[cell], outcome
    assert broken_promises(outcome, SCENARIOS[row].expected)


@pytest.mark.nightly
def test_what_torchfts_transport_does_is_seen() -> None:
    pytest.importorskip("torchft")
    expected = {"none": "healed", "flip-lane": "wrong bytes", "change": "wrong bytes", "pickle-system": "code ran"}
    for outcome in run_matrix(["torchft"], expected, limits=LIMITS, jobs=4):
        assert outcome.struck, outcome
        assert outcome.outcome == expected[outcome.fault], outcome


def test_the_command_prints_broken_promises(capsys, monkeypatch) -> None:
    def run(transports, faults, **_):
        return [Outcome(row.name, column.name, wrong_bytes=9) for row in faults for column in transports]

    monkeypatch.setattr("faults.__main__.run_matrix", run)
    assert main(["--faults", "none,wrong-s*", "--transports", "tensorferry,torchft"]) == 1
    out = capsys.readouterr().out
    assert "wrong-step, tensorferry: 9 wrong bytes" in out
    assert "torchft: 9 wrong bytes" not in out
    for option, name in (("--faults", "no-such-fault"), ("--transports", "no-such-transport")):
        with pytest.raises(SystemExit):
            main([option, name])
        assert name in capsys.readouterr().err
