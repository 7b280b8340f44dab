"""`make bench` in miniature: it finishes in time, and its JSON has the numbers that the tables need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import end

ROOT = Path(__file__).parents[2]
pytest.importorskip("torchft")
pytest.importorskip("matplotlib")


def run_bench(*arguments):
    command = [sys.executable, str(ROOT / "benches" / "side_by_side.py"), *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as bench:
        try:
            out, err = bench.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            end(bench)  # and the measuring processes with it
            raise
    assert bench.returncode == 0, err
    return out


def test_quick_run_measures_both_and_writes_the_results(tmp_path):
    results_path, plot_path = tmp_path / "results.json", tmp_path / "bench.png"
    out = run_bench(
        "--quick", "--scale", 0.002, "--rounds", 1, "--rows", "large,small,tiny", "--stalls", "small",
        "--contenders", "torchft:0,tensorferry,tensorferry+network+inplace",
        "--json", results_path, "--plot", plot_path,
    )  # fmt: skip
    results = json.loads(results_path.read_text())

    assert results["problems"] == []
    assert {"cores", "kernel", "torch", "torchft", "tensorferry"} <= set(results["machine"])
    assert [row["name"] for row in results["rows"]] == ["large", "small", "tiny"]
    large, small, tiny = results["rows"]
    assert large["tensors"] == 8
    assert small["bytes"] == small["tensors"] * 1024
    assert tiny["bytes"] == 16 * 1024
    assert {s["contender"] for s in large["samples"]} == {"torchft:0", "tensorferry", "tensorferry+network+inplace"}
    assert {s["contender"] for s in small["samples"]} == {"torchft:0", "tensorferry"}
    for row in results["rows"]:
        for sample in row["samples"]:
            assert sample["first_equal"] is True
            assert sample["first_s"] > 0
            assert sample["send_s"] > 0
        assert all(line["speedup"]["median"] > 0 for line in row["summary"]["lines"])
    assert all(sample["second_equal"] is True for sample in large["samples"])
    kinds = {f"{kind}_{streams}_s" for kind in ("fresh", "huge", "touched") for streams in (1, 2)}
    assert set(large["raw"][0]) == {"round", "order", *kinds}
    assert all(line["of_raw_touched"]["median"] > 0 for line in large["summary"]["lines"])

    watched = {sample["contender"]: sample for sample in results["stalls"]}
    assert {"torchft:0", "tensorferry"} < set(watched)
    assert all(0 < sample["serving_awake_s"] <= sample["serving_worst_s"] for sample in watched.values())
    assert watched["tensorferry"]["sending_worst_s"] > 0

    assert plot_path.read_bytes().startswith(b"\x89PNG")
    table = results_path.with_name("table.md").read_text()
    for title in ("few large (8 x 128 MiB)", "16 KiB in total", "The source's main loop, 100,000 x 1 KiB"):
        assert title in table
        assert title in out


def test_ratios_are_taken_within_a_round(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    import report

    def sample(contender, number, seconds):
        shape = {"bytes": 32 << 20, "tensors": 4, "send_s": 0.1, "cold_s": 0.1, "source_extra": None}
        return {"contender": contender, "round": number, "first_s": seconds, **shape}

    samples = [
        *(sample("torchft:0", i, s) for i, s in enumerate((9.0, 9.0, 9.0))),
        *(sample("torchft:4", i, s) for i, s in enumerate((2.0, 4.0, 8.0))),
        *(sample("tensorferry", i, s) for i, s in enumerate((1.0, 1.0, 4.0))),
    ]
    samples.append({"contender": "tensorferry", "round": 3, "error": "lost"})
    fresh = {"fresh_1_s": 0.9, "fresh_2_s": 0.5, "huge_1_s": 0.7, "huge_2_s": 0.6}
    raw = [{"round": 1, "touched_1_s": 0.25, "touched_2_s": 0.5, **fresh}]
    summary = report.summarise_transfers(samples, raw)

    assert summary["torchft_best"] == {"first": "torchft:4", "second": None}
    ours = next(line for line in summary["lines"] if line["contender"] == "tensorferry")
    assert ours["speedup"] == {"median": 2.0, "low": 2.0, "high": 4.0}
    assert ours["seconds"] == {"median": 1.0, "low": 1.0, "high": 4.0}
    assert ours["of_raw_fresh"]["median"] == 0.5
    assert ours["of_raw_touched"]["median"] == 0.25


def test_checkpoints_are_measured_beside_torchs(tmp_path):
    results_path = tmp_path / "dcp.json"
    command = [
        sys.executable, str(ROOT / "benches" / "dcp.py"), "--rounds", "1", "--scale", "0.01", "--rows", "large,reshard",
        "--contenders", "tensorferry files,tensorferry peers,FileSystemWriter,safetensors",
        "--json", str(results_path), "--folder", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(results_path.read_text())
    assert [row["name"] for row in results["rows"]] == ["large", "reshard"]
    for row in results["rows"]:
        for sample in row["samples"]:
            assert sample["equal"] is True
            assert sample["save_s"] > 0
            assert sample["load_s"] > 0
    by_name = {sample["contender"]: sample for sample in results["rows"][1]["samples"]}
    assert by_name["tensorferry peers"]["read_ratio"] <= 1.05
    assert by_name["FileSystemWriter"]["read_ratio"] > 1.2
    assert "reshard: 8 tensors" in done.stdout
