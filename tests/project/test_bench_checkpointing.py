"""`make bench-checkpointing` in miniature: the bench and its keeper run, and its table has a figure for each column."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import end

pytestmark = pytest.mark.nightly


ROOT = Path(__file__).parents[2]
CONTENDERS = ["a plain copy", "tensorferry", "tensorferry, keeper", "torch.save"]


@pytest.mark.timeout(300)
def test_the_bench_of_checkpointers_runs(tmp_path):
    results_path = tmp_path / "results.json"
    command = [
        sys.executable, str(ROOT / "benches" / "checkpointing.py"),
        "--json", str(results_path), "--folder", str(tmp_path),
        "--mib", "4", "--rounds", "1", "--saves", "2", "--warm-up", "1", "--unloaded", "0.05", "--neighbours", "1",
        "--contenders", ",".join(CONTENDERS),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as bench:
        try:
            out, err = bench.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            end(bench)  # and the trainers with it
            raise
    assert bench.returncode == 0, err
    results = json.loads(results_path.read_text())
    assert results["problems"] == []
    assert [sample["contender"] for sample in results["samples"]] == CONTENDERS
    for sample in results["samples"]:
        assert len(sample["saves"]) == 2
        assert all(save["stand_still_s"] > 0 for save in sample["saves"])
        # Who sums up the memory takes a part of a core, so not during the saves whose step rate counts.
        assert ["extra" in save for save in sample["saves"]] == [True, False]
        if sample["contender"] != "a plain copy":
            assert sample["equal"] is True
            assert sample["loads"]
            assert all(seconds > 0 for seconds in sample["loads"].values())
            assert all(save["durable_s"] > 0 for save in sample["saves"])
    assert {*results["samples"][-1]["loads"]} == {"torch.load", "mapped"}
    for name in CONTENDERS:
        assert f"| {name} | " in out
    for line in ("tensorferry, keeper loads ", "tensorferry is durable ", "times as long as a plain copy takes"):
        assert line in out
