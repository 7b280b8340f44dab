"""`make demo-fleet` in miniature: killed replicas heal from all healthy ones, and the table says who sent how much."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torchft")

import fleet_story
from verdict import Heal, Rank

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly


@pytest.mark.process
def test_the_demo_says_what_it_cannot_show():
    command = [sys.executable, str(fleet_story.__file__), "--replicas", "2", "--kill", "2"]
    demo = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (demo.returncode, demo.stderr) == (2, "cannot kill 2 of 2 replicas and heal them\n")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.parametrize("quorum", [(), ("--sync-quorum",)], ids=["asynchronous", "synchronous"])
def test_the_demo_of_a_fleet_ends_well(
    tmp_path: Path,
    quorum: tuple[str, ...],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    # Once with interpreters of their own, as users start them.
    if not quorum:
        request.getfixturevalue("forked_starts")
    command = ["fleet_story.py", "--logs", str(tmp_path), "--deadline", "230", "--replicas", "4", *quorum]
    monkeypatch.setattr(sys, "argv", command)
    before = signal.getsignal(signal.SIGTERM)
    try:
        status = fleet_story.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    out = capsys.readouterr().out
    assert status == 0, out
    assert "on all replicas: SHA-256" in out
    again = re.findall(r"^replica (\d), again +\d+ (.*)$", out, re.MULTILINE)
    assert sorted(replica for replica, _ in again) == ["1", "2"], out
    for _, row in again:
        # Columns: replica 0 to 3, all, seconds. Both that were never killed have sent a share; one that has healed a
        # step earlier may have, too.
        shares = row.split()
        assert "-" not in (shares[0], shares[3]), out
        assert min(float(shares[0]), float(shares[3])) > 0, out


def test_the_table_names_everybody():
    heals = [
        Heal(Rank(1, 0, 1), None, 9, 8, 0.5, 0.0, 0.0, "a", "a", {"replica 0": 3 << 20, "10.0.0.9:1": 1 << 20}),
        Heal(Rank(2, 0, 0), None, 0, 8, 0.25, 0.0, 0.0, "a", "a", {}),
    ]
    head, first, second = fleet_story.table(heals, 2)
    assert " ".join(head.split()) == "MiB received by step replica 0 replica 1 10.0.0.9:1 in all seconds"
    assert first.split() == ["replica", "2", "0", "-", "-", "-", "0.0", "0.25"]
    assert second.split() == ["replica", "1,", "again", "9", "3.0", "-", "1.0", "4.0", "0.50"]
