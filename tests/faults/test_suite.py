"""The fault suite can fail: each row detects what it is there to detect, and what never struck proves nothing."""

from __future__ import annotations

import json

import pytest

from faults import broken_transports
from faults.__main__ import main
from faults.matrix.candidates import Candidate
from faults.matrix.catalogue import SCENARIOS
from faults.matrix.cell import Limits, Outcome
from faults.matrix.report import broken_promises, format_table
from faults.matrix.run_matrix import run_matrix
from faults.matrix.scenario import Scenario
from faults.proxy.faults import Delay, FlipByte

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.beyond_torchft]

LIMITS = Limits(nbytes=24 << 20, timeout=4.0, stall=8.0)
QUICK = Limits(nbytes=8 << 20, timeout=3.0, stall=3.0, grace=4.0)


def broken(name: str, **more: object) -> Candidate:
    return Candidate(name, f"{broken_transports.__name__}:{name}", **more)


SEEN = {
    "HangsInReceive": ("hung", "next heal failed"),
    "LateInReceive": ("healed", "fine"),
    "CrashesInReceive": ("crashed", "next heal failed"),
    "ReceivesOneWrongByte": ("wrong bytes", "next heal failed"),
    "RaisesInDisallow": ("healed", "raised"),
    "StallsInDisallow": ("healed", "stalled"),
    "CrashesInDisallow": ("healed", "crashed"),
    "ServesNothingAfterwards": ("healed", "next heal failed"),
}
EACH_CHANGE = {"ReceivesOneWrongByte", "RaisesInDisallow"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EACH_CHANGE else pytest.mark.nightly) for name in SEEN]
)
def test_bad_transports_are_seen(name: str) -> None:
    (outcome,) = run_matrix([broken(name)], ["none"], limits=QUICK)
    assert (outcome.outcome, outcome.source) == SEEN[name], outcome
    assert broken_promises(outcome, frozenset({"healed"}))
    assert outcome.late == (name in ("HangsInReceive", "LateInReceive"))
    assert outcome.wrong_bytes == (name == "ReceivesOneWrongByte")
    assert name != "HangsInReceive" or "recv_checkpoint" in outcome.message


# Failures of torchft's transport, which these rows can therefore detect; "healed" is none.
STOCK = {
    "flip-lane": ("wrong bytes", "fine"),
    "drain": ("healed", "fine"),
    "change": ("wrong bytes", "fine"),
    "pickle-system": ("code ran", "fine"),
    "pickle-dotted": ("code ran", "fine"),
    "pickle-pointer": ("crashed", "fine"),
    "source-forked": ("error", "port open"),
    "silent-names": ("error", "fine"),
    "idle-crowd": ("healed", "fine"),
}


@pytest.mark.nightly
def test_what_torchfts_transport_does_is_seen() -> None:
    pytest.importorskip("torchft")
    pytest.importorskip("numpy")
    for outcome in run_matrix(["torchft"], STOCK, limits=LIMITS, jobs=4):
        row = outcome.fault
        if outcome.outcome == "left out":
            continue
        assert outcome.struck, outcome
        assert (outcome.outcome, outcome.source) == STOCK[row], outcome
        assert bool(broken_promises(outcome, SCENARIOS[row].expected)) == (outcome.outcome != "healed")
        assert outcome.wrong_bytes == 1 or row != "flip-lane", outcome
        assert outcome.late or outcome.slow or row not in ("source-forked", "silent-names"), outcome


# What a transport that serves freed memory can come to. Where new tensors reuse that memory, it is unmapped for a
# moment in between: a source that reads on in that moment, as it does on a busy machine, crashes as well.
UNMAPPED = {("error", "crashed")}
REUSED = {("wrong bytes", "fine")} | UNMAPPED
# Where the kernel reads that memory, to send it, it refuses (EFAULT), and the connection ends instead.
REFUSED = {("error", "fine")}
# Transports that are broken on purpose, for the rows that torchft's transport passes.
BROKEN = {
    ("torchft_that_does_not_wait", "drain"): {("wrong bytes", "fine")},
    ("torchft_that_does_not_wait", "reader-slow"): {("wrong bytes", "fine")},
    ("ServesAddresses", "replace-data"): UNMAPPED | REFUSED,
    ("ServesAddresses", "replace-set"): REUSED | REFUSED,
    ("ServesAddresses", "replace-half"): REUSED | REFUSED,
    ("ServesAddresses", "replace-data-local"): UNMAPPED | REFUSED,
    ("ReceivesAtAddresses", "replace-target"): {("crashed", "fine")},
    ("torchft_with_one_thread", "idle-crowd"): {("error", "fine")},
}


@pytest.mark.nightly
@pytest.mark.parametrize("cell", BROKEN, ids="-".join)
def test_rows_see_what_they_are_there_to_see(cell: tuple[str, str]) -> None:
    pytest.importorskip("torchft")
    name, row = cell
    (outcome,) = run_matrix([broken(name, local=True, in_place=True)], [row], limits=LIMITS)
    assert outcome.struck, outcome
    assert (outcome.outcome, outcome.source) in BROKEN[cell], outcome
    assert broken_promises(outcome, SCENARIOS[row].expected)


@pytest.mark.nightly
def test_a_healthy_source_beside_a_faulty_one_that_is_hurt_is_seen() -> None:
    bad = broken("RaisesInDisallow", join="tensorferry:join_metadata")
    (outcome,) = run_matrix([bad], ["source-sigkill-second"], limits=QUICK)
    assert (outcome.outcome, outcome.source) == ("healed", "raised"), outcome


# The second one is reported although another fault of its row did happen; the bytes of the last bypass no network.
NEVER = [
    ("tensorferry", Scenario("far", "behind the end", (FlipByte(at=1 << 40),))),
    ("tensorferry", Scenario("never", "later than the end", (Delay(at=0),), during=lambda _: None, part=9.0)),
    (broken("StaysOnTheNetwork", local=True), SCENARIOS["replace-data-local"]),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("transport", "row"), NEVER, ids=[row.name for _, row in NEVER])
def test_a_fault_that_never_struck_is_reported(transport: str | Candidate, row: Scenario) -> None:
    (outcome,) = run_matrix([transport], [row], limits=QUICK)
    assert "the fault never struck" in broken_promises(outcome, frozenset())
    assert "1 whose fault never struck" in format_table([outcome])


def test_the_command_prints_broken_promises_and_writes_json(tmp_path, capsys, monkeypatch) -> None:
    def run(transports, faults, **_):
        return [Outcome(row.name, column.name, wrong_bytes=9) for row in faults for column in transports]

    monkeypatch.setattr("faults.__main__.run_matrix", run)
    written = tmp_path / "results" / "faults.json"
    assert main(["--faults", "none,wrong-s*", "--transports", "tensorferry,torchft", "--json", str(written)]) == 1
    out = capsys.readouterr().out
    assert "wrong-step, tensorferry: 9 wrong bytes" in out
    assert "torchft: 9 wrong bytes" not in out
    assert [o["fault"] for o in json.loads(written.read_text())["outcomes"]] == ["none"] * 2 + ["wrong-step"] * 2
    for option, name in (("--faults", "no-such-fault"), ("--transports", "no-such-transport")):
        with pytest.raises(SystemExit):
            main([option, name])
        assert name in capsys.readouterr().err
