"""`make bench-scale` in miniature: it finishes, what arrives is what was sent, and its JSON has the table's numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import end

ROOT = Path(__file__).parents[2]
#: It starts processes that import torch.
pytestmark = [pytest.mark.nightly, pytest.mark.beyond_torchft, pytest.mark.timeout(300)]


def test_rates_over_lanes_beside_raw_sockets_and_the_main_loop(tmp_path: Path) -> None:
    results_path = tmp_path / "scale.json"
    command = [
        sys.executable, str(ROOT / "benches" / "scale.py"), "--lanes", "1,2,0", "--mib", "32", "--rounds", "1",
        "--repeats", "1", "--json", str(results_path),
    ]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, cwd=ROOT, start_new_session=True) as bench:
        try:
            out, err = bench.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            end(bench)  # and the measuring processes with it
            raise
    assert bench.returncode == 0, err
    results = json.loads(results_path.read_text())
    assert {(sample["asked"], sample["kind"]) for sample in results["samples"]} == {
        (1, "raw sockets"), (2, "raw sockets"), (1, "sockets"), (2, "sockets"), (0, "sockets"),
        (1, "shared memory"), (2, "shared memory"), (0, "shared memory"),
    }  # fmt: skip
    for sample in results["samples"]:
        assert sample["GB/s"] > 0
        assert sample["cpu"] > 0
        assert sample["source switches"] > 0
        assert sample["lanes"] == (sample["asked"] or sample["lanes"]) > 0
    assert {sample["split"] for sample in results["loop"]} >= {False}
    assert all(sample["rate"] >= 0 for sample in results["loop"])
    assert "| 2 | raw sockets |" in out
    assert "(chosen) | shared memory |" in out
