"""`make demo-fleet` in miniature: killed replicas heal from all healthy ones, and the table says who sent how much."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchft")

from fleet_story import table
from processes import end
from verdict import Heal, Rank

DEMO = Path(__file__).parents[2] / "examples" / "heal" / "fleet_story.py"


@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.parametrize("quorum", [(), ("--sync-quorum",)], ids=["asynchronous", "synchronous"])
def test_the_demo_of_a_fleet_ends_well(tmp_path: Path, quorum: tuple[str, ...]):
    command = [sys.executable, str(DEMO), "--logs", str(tmp_path), "--deadline", "230", "--replicas", "4", *quorum]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as demo:
        try:
            out, _ = demo.communicate(timeout=250)
        except subprocess.TimeoutExpired:
            end(demo)
            raise
    assert demo.returncode == 0, out
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
    head, first, second = table(heals, 2)
    assert " ".join(head.split()) == "MiB received by step replica 0 replica 1 10.0.0.9:1 in all seconds"
    assert first.split() == ["replica", "2", "0", "-", "-", "-", "0.0", "0.25"]
    assert second.split() == ["replica", "1,", "again", "9", "3.0", "-", "1.0", "4.0", "0.50"]
