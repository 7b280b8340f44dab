"""`make demo-fleet` in miniature: killed replicas heal from all healthy ones, and the table says who sent how much."""

from __future__ import annotations

import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torchft")

import fleet_story

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.usefixtures("forked_starts")
def test_the_demo_of_a_fleet_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = ["fleet_story.py", "--logs", str(tmp_path), "--deadline", "230", "--replicas", "4"]
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
