"""A short run of the fault matrix: tensorferry keeps its promises when connections, peers and processes fail.

The whole matrix, beside torchft's HTTPTransport, is `make faults`. A change runs one cell of each kind of fault.
"""

from __future__ import annotations

import itertools
import json

import pytest

import fault_candidates
import tensorferry
from tensorferry.testing import (
    SCENARIOS,
    Candidate,
    Delay,
    FlipByte,
    Limits,
    Outcome,
    Scenario,
    broken_promises,
    format_markdown,
    format_table,
    from_json,
    run_matrix,
    to_json,
)
from tensorferry.testing.__main__ import main
from tensorferry.testing.matrix.scenario import Beside

# The first test waits for the outcomes of all cells.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.beyond_torchft]

LIMITS = Limits(nbytes=24 << 20, timeout=4.0, stall=8.0)

# Some rows with a second source beside the faulty one, with a secret and with TLS; `make faults` runs all.
BESIDE = (
    "half-open-all-first", "drip-all-first", "flip-all-first", "drip-head-all-second", "move-on-second",
    "source-sigkill-second", "source-sigstop-first", "other-state-first", "other-state-second",
)  # fmt: skip
SECURED = ("none", "truncate-once", "half-open-lane", "flip-lane", "drip-start", "wrong-generation", "source-restart")

CELLS = [("tensorferry", row.name) for row in SCENARIOS.values() if not row.beside]
CELLS += [("tensorferry", row) for row in BESIDE]
CELLS += [("tensorferry-copy", row) for row in ("none", *(r.name for r in SCENARIOS.values() if r.private))]
CELLS += [("tensorferry-secret", row) for row in SECURED]
CELLS += [("tensorferry-tls", row) for row in (*SECURED, "drip-head-all", "drip-head-all-second")]

#: What each change runs; the others are for the night.
QUICK_CELLS = {
    *(("tensorferry", row) for row in ("drip-all", "replace-data-local", "pickle-system", "source-sigkill-second")),
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
    if outcome.outcome == "left out":
        pytest.skip(outcome.message)
    if (outcome.late or outcome.slow) and outcome.outcome != "hung":
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


@pytest.mark.parametrize("cell", [("tensorferry", row) for row in ("source-sigstop", "source-restart", "republish")])
def test_errors_name_their_source(cell: tuple[str, str], outcomes: dict[tuple[str, str], Outcome]) -> None:
    assert outcomes[cell].error
    assert "127.0.0.1:" in outcomes[cell].message


@pytest.mark.parametrize("cell", [("tensorferry", "reader-stall"), ("tensorferry-copy", "reader-stall")])
def test_only_borrowed_memory_is_waited_for(cell: tuple[str, str], outcomes: dict[tuple[str, str], Outcome]) -> None:
    """A reader that takes nothing is cut off after 2 s; the wait shows that the one of this row really is stuck."""
    assert (outcomes[cell].source_seconds > 1) == (cell[0] == "tensorferry"), outcomes[cell]


# ---------------------------------------------------------------------------------------------------------------------
# The suite detects the faults that it exists for


QUICK = Limits(nbytes=8 << 20, timeout=3.0, stall=3.0, grace=4.0)
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


@pytest.fixture(scope="module")
def sightings() -> dict[str, Outcome]:
    bad = [Candidate(name, f"{fault_candidates.__name__}:{name}") for name in SEEN]
    return {outcome.transport: outcome for outcome in run_matrix(bad, ["none"], limits=QUICK, jobs=4)}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SEEN)
def test_bad_transports_are_seen(name: str, sightings: dict[str, Outcome]) -> None:
    outcome = sightings[name]
    assert (outcome.outcome, outcome.source) == SEEN[name], outcome
    assert broken_promises(outcome, frozenset({"healed"}))
    assert outcome.late == (name in ("HangsInReceive", "LateInReceive"))
    assert outcome.wrong_bytes == (name == "ReceivesOneWrongByte")


@pytest.mark.nightly
def test_where_a_receive_hung_is_reported(sightings: dict[str, Outcome]) -> None:
    assert "recv_checkpoint" in sightings["HangsInReceive"].message


@pytest.mark.nightly
def test_wrong_bytes_of_torchfts_transport_are_seen() -> None:
    """This shows that the suite can fail: a flipped byte and memory read after the withdrawal are detected."""
    pytest.importorskip("torchft")
    unsafe = Candidate("unsafe", f"{fault_candidates.__name__}:torchft_that_does_not_wait")
    (flipped,) = run_matrix(["torchft"], ["flip-lane"], limits=LIMITS)
    (overwritten,) = run_matrix([unsafe], ["reader-slow"], limits=LIMITS)
    assert (flipped.outcome, flipped.wrong_bytes) == ("wrong bytes", 1)
    assert (overwritten.outcome, overwritten.source) == ("wrong bytes", "fine"), overwritten


# Failures of torchft's transport, which these rows can therefore detect.
STOCK = {
    "drain": ("healed", "fine"),
    "change": ("wrong bytes", "fine"),
    "pickle-system": ("code ran", "fine"),
    "pickle-dotted": ("code ran", "fine"),
    "pickle-pointer": ("crashed", "fine"),
    "source-forked": ("error", "port open"),
    "silent-names": ("error", "fine"),
    "idle-crowd": ("healed", "fine"),
}


@pytest.fixture(scope="module")
def stock() -> dict[str, Outcome]:
    pytest.importorskip("torchft")
    pytest.importorskip("numpy")
    return {outcome.fault: outcome for outcome in run_matrix(["torchft"], STOCK, limits=LIMITS, jobs=4)}


@pytest.mark.nightly
@pytest.mark.parametrize("row", STOCK)
def test_what_torchfts_transport_does_is_seen(row: str, stock: dict[str, Outcome]) -> None:
    outcome = stock[row]
    if outcome.outcome == "left out":
        pytest.skip(outcome.message)
    assert outcome.struck, outcome
    assert (outcome.outcome, outcome.source) == STOCK[row], outcome
    assert bool(broken_promises(outcome, SCENARIOS[row].expected)) == (outcome.outcome != "healed")
    if row in ("source-forked", "silent-names"):
        assert outcome.late or outcome.slow, outcome


# What a transport that serves freed memory can come to. Where new tensors reuse that memory, it is unmapped for a
# moment in between: a source that reads on in that moment, as it does on a busy machine, crashes as well.
UNMAPPED = {("error", "crashed")}
REUSED = {("wrong bytes", "fine")} | UNMAPPED
# Where the kernel reads that memory, to send it, it refuses (EFAULT), and the connection ends instead.
REFUSED = {("error", "fine")}
# Transports that are broken on purpose, for the rows that torchft's transport passes.
BROKEN = {
    ("torchft_that_does_not_wait", "drain"): {("wrong bytes", "fine")},
    ("ServesAddresses", "replace-data"): UNMAPPED | REFUSED,
    ("ServesAddresses", "replace-set"): REUSED | REFUSED,
    ("ServesAddresses", "replace-half"): REUSED | REFUSED,
    ("ServesAddresses", "replace-data-local"): UNMAPPED | REFUSED,
    ("ReceivesAtAddresses", "replace-target"): {("crashed", "fine")},
    ("torchft_with_one_thread", "idle-crowd"): {("error", "fine")},
}


@pytest.fixture(scope="module")
def broken() -> dict[tuple[str, str], Outcome]:
    pytest.importorskip("torchft")
    came = {}
    for name, rows in itertools.groupby(BROKEN, key=lambda cell: cell[0]):
        bad = Candidate(name, f"{fault_candidates.__name__}:{name}", local=True, in_place=True)
        came |= {(name, o.fault): o for o in run_matrix([bad], [row for _, row in rows], limits=LIMITS, jobs=4)}
    return came


@pytest.mark.nightly
@pytest.mark.parametrize("cell", BROKEN, ids="-".join)
def test_rows_see_what_they_are_there_to_see(cell: tuple[str, str], broken: dict[tuple[str, str], Outcome]) -> None:
    outcome = broken[cell]
    assert outcome.struck, outcome
    assert (outcome.outcome, outcome.source) in BROKEN[cell], outcome
    assert broken_promises(outcome, SCENARIOS[cell[1]].expected)


@pytest.mark.nightly
def test_a_shortcut_that_is_not_taken_is_reported() -> None:
    """The row is about bytes that bypass the network, but this transport's bytes do not."""
    far = Candidate("far", f"{fault_candidates.__name__}:StaysOnTheNetwork", local=True)
    (outcome,) = run_matrix([far], ["replace-data-local"], limits=LIMITS)
    assert "the fault never struck" in broken_promises(outcome, frozenset())


@pytest.mark.nightly
def test_faults_that_a_transport_cannot_have_are_left_out() -> None:
    """The proxy cannot read heads of encrypted answers; torchft's receiver has one source and no receive in place."""
    assert not run_matrix(["tensorferry-tls"], ["lying-length"], limits=QUICK)
    rows = ["flip-all-first", "drain-local", "replace-target", "pickle-dotted-stock"]
    assert not run_matrix([Candidate("alone", "no:matter")], rows, limits=QUICK)


@pytest.mark.nightly
def test_faults_that_the_machine_cannot_have_are_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    outcomes = run_matrix(["tensorferry"], ["pickle-dotted-stock", "pickle-pointer"], limits=QUICK)
    assert [(o.outcome, o.message) for o in outcomes] == [
        ("left out", "torchft is not installed"),
        ("left out", "numpy is not installed"),
    ]
    assert not any(broken_promises(o, frozenset({"UnsafePickle"})) for o in outcomes)
    table = format_table(outcomes)
    assert "left out (numpy is not installed)" in table
    assert "0 whose fault never struck, 2 left out" in table


@pytest.mark.nightly
def test_a_fault_of_the_callers_own() -> None:
    (outcome,) = run_matrix(["tensorferry"], [FlipByte(at=10, connections=0)], limits=QUICK)
    assert (outcome.outcome, outcome.struck) == ("healed", 1)


@pytest.mark.nightly
def test_a_fault_that_never_struck_is_reported() -> None:
    (outcome,) = run_matrix(["tensorferry"], [FlipByte(at=1 << 40)], limits=QUICK)
    assert "the fault never struck" in broken_promises(outcome, frozenset({"healed"}))


@pytest.mark.nightly
def test_a_moment_in_mid_transfer_that_never_came_is_reported() -> None:
    """It is reported although another fault of the row did happen."""
    row = Scenario("never", "later than the end", (Delay(at=0),), during=lambda _: None, part=9.0)
    (outcome,) = run_matrix(["tensorferry"], [row], limits=QUICK)
    assert "the fault never struck" in broken_promises(outcome, frozenset({"healed"}))
    assert "1 whose fault never struck" in format_table([outcome])


@pytest.mark.nightly
@pytest.mark.parametrize("side", ["in front", "behind"])
def test_a_source_cannot_be_done_before_the_one_beside_it_has_its_fault(side: Beside) -> None:
    """Otherwise the healthy source would have sent everything before the faulty one had sent anything."""
    slow = (Delay(of="stream", seconds=0.5),)
    row = Scenario("late", "long after the first byte", slow, during=lambda _: None, part=0.4, beside=side)
    (outcome,) = run_matrix(["tensorferry"], [row], limits=QUICK)
    assert not broken_promises(outcome, row.expected), outcome


@pytest.mark.nightly
def test_a_healthy_source_beside_a_faulty_one_that_is_hurt_is_seen() -> None:
    bad = Candidate("bad", f"{fault_candidates.__name__}:RaisesInDisallow", join="tensorferry:join_metadata")
    (outcome,) = run_matrix([bad], ["source-sigkill-second"], limits=QUICK)
    assert (outcome.outcome, outcome.source) == ("healed", "raised"), outcome


@pytest.mark.nightly
def test_the_command_prints_the_table_and_writes_json(tmp_path, capsys) -> None:
    written = tmp_path / "results" / "faults.json"
    assert (
        main(
            ["--faults", "none,wrong-s*", "--size-mib", "8", "--timeout", "4", "--repeats", "2", "--json", str(written)]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert [line.split()[:4] for line in out.splitlines()[2:4]] == [
        ["none", "tensorferry", "2", "healed"],
        ["wrong-step", "tensorferry", "2", "WrongStep"],
    ]
    outcomes = json.loads(written.read_text())["outcomes"]
    assert [o["fault"] for o in outcomes] == ["none", "none", "wrong-step", "wrong-step"]
    assert {o["wrong_bytes"] for o in outcomes} == {0}


@pytest.mark.nightly
def test_the_table_of_a_document_is_made_from_json(tmp_path, capsys) -> None:
    outcomes = [
        Outcome("none", "tensorferry", seconds=0.1, struck=1),
        Outcome("none", "tensorferry", 1, seconds=0.3, struck=1),
        Outcome("none", "torchft", seconds=2.0, struck=1, outcome="wrong bytes", wrong_bytes=9, source="stalled"),
        Outcome("flip-all", "tensorferry", outcome="error", error="FetchTimeout", seconds=5.0, late=True),
    ]
    assert from_json(to_json(outcomes)) == outcomes
    lines = [
        "| fault | tensorferry | torchft |",
        "| --- | --- | --- |",
        "| `none` | 2 healed; 0.2 s, at most 0.3 s | WRONG BYTES; source stalled; 2.0 s |",
        "| `flip-all` | FetchTimeout LATE (never struck); 5.0 s |  |",
    ]
    assert format_markdown(outcomes).splitlines() == lines
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    files[0].write_text(to_json(outcomes[:3]))
    files[1].write_text(to_json(outcomes[3:]))
    assert main(["--markdown", "--read", *map(str, files)]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines() == lines
    assert "flip-all, tensorferry: the fault never struck" in captured.err


@pytest.mark.nightly
def test_the_command_refuses_names_it_does_not_know(capsys) -> None:
    for option, name in (("--faults", "no-such-fault"), ("--transports", "no-such-transport")):
        with pytest.raises(SystemExit):
            main([option, name])
        assert name in capsys.readouterr().err
