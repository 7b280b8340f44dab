"""`make bench` in miniature: it finishes in time, and its JSON has the numbers that the tables need."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import end

ROOT = Path(__file__).parents[2]
pytest.importorskip("torchft")
pytest.importorskip("matplotlib")
#: A bench starts dozens of processes.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


def run_bench(*arguments):
    command = [sys.executable, str(ROOT / "benches" / "side_by_side.py"), *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as bench:
        try:
            out, err = bench.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            end(bench)  # and the measuring processes with it
            raise
    assert bench.returncode == 0, err
    return out


@pytest.mark.process
def test_quick_run_measures_both_and_writes_the_results(tmp_path):
    results_path, plot_path = tmp_path / "results.json", tmp_path / "bench.png"
    out = run_bench(
        "--quick", "--scale", 0.002, "--rounds", 1, "--rows", "large,small,tiny", "--stalls", "small",
        "--contenders", "torchft:0,gloo,gloo+inplace,tensorferry,tensorferry+network+inplace", "--memory", "backed",
        "--json", results_path, "--plot", plot_path,
    )  # fmt: skip
    results = json.loads(results_path.read_text())

    assert results["problems"] == []
    assert {"cores", "kernel", "torch", "torchft", "tensorferry", "first_touch"} <= set(results["machine"])
    assert [row["name"] for row in results["rows"]] == ["large", "small", "tiny"]
    large, small, tiny = results["rows"]
    assert large["tensors"] == 8
    assert small["bytes"] == small["tensors"] * 1024
    assert tiny["bytes"] == 16 * 1024
    fresh = {"torchft:0", "gloo", "tensorferry"}
    assert {s["contender"] for s in large["samples"]} == {*fresh, "gloo+inplace", "tensorferry+network+inplace"}
    assert {s["contender"] for s in small["samples"]} == fresh
    for row in results["rows"]:
        for sample in row["samples"]:
            assert sample["first_equal"] is True
            assert sample["first_s"] > 0
            assert sample["send_s"] > 0
            assert sample["warm_up_s"] > 0
            assert sample["memory"] == "backed"
        assert all(line["speedup"]["median"] > 0 for line in row["summary"]["lines"])
    assert all(sample["second_equal"] is True for sample in large["samples"])
    assert all(len(sample["first_all_s"]) == 50 for sample in tiny["samples"])
    kinds = {f"{kind}_{streams}_s" for kind in ("fresh", "huge", "touched") for streams in (1, 2)}
    assert set(large["raw"][0]) == {"round", "order", *kinds}
    assert all(line["of_raw_touched"]["median"] > 0 for line in large["summary"]["lines"])

    watched = {sample["contender"]: sample for sample in results["stalls"]}
    assert {*fresh} < set(watched)
    assert all(0 < sample["serving_awake_s"] <= sample["serving_worst_s"] for sample in watched.values())
    assert watched["tensorferry"]["sending_worst_s"] > 0

    assert plot_path.read_bytes().startswith(b"\x89PNG")
    table, details = (results_path.with_name(f"{name}.md").read_text() for name in ("table", "details"))
    for title in ("8 x 128 MiB, second", "8 x 128 MiB, in place", "100,000 x 1 KiB, first", "16 KiB in total, first"):
        assert f"| {title} |" in table
        assert title in out
    assert "8 x 128 MiB: 2.14746 MB in 8 tensors" in details
    assert "The source's main loop, 100,000 x 1 KiB" in details


@pytest.mark.process
def test_a_state_in_a_job_is_healed_by_fresh_processes_that_train(tmp_path):
    results_path = tmp_path / "results.json"
    run_bench(
        "--quick", "--scale", 0.01, "--rounds", 1, "--rows", "job28", "--memory", "backed",
        "--contenders", "torchft:4,gloo+inplace,tensorferry+inplace", "--json", results_path,
    )  # fmt: skip
    results = json.loads(results_path.read_text())
    assert results["problems"] == []
    assert [sample["contender"] for sample in results["rows"][0]["samples"]] == [
        "torchft:4", "gloo+inplace", "tensorferry+inplace",
    ]  # fmt: skip
    for sample in results["rows"][0]["samples"]:
        assert sample["first_equal"] is True
        assert sample["warm_up_s"] is None


@pytest.mark.process
def test_a_sharded_state_is_received_by_a_process_with_the_same_mesh(tmp_path):
    results_path = tmp_path / "results.json"
    run_bench(
        "--quick", "--scale", 0.002, "--rounds", 1, "--rows", "fsdp", "--memory", "backed",
        "--contenders", "torchft:0,tensorferry", "--json", results_path,
    )  # fmt: skip
    results = json.loads(results_path.read_text())
    assert results["problems"] == []
    samples = results["rows"][0]["samples"]
    assert [sample["contender"] for sample in samples] == ["torchft:0", "tensorferry"]
    # A parameter and two moments, all DTensors, and AdamW's count of steps.
    assert all(sample["first_equal"] is True and sample["tensors"] == 64 * 4 for sample in samples)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    # Other tests have modules of the same names.
    for path in (ROOT / "benches").glob("*.py"):
        monkeypatch.setitem(sys.modules, path.stem, None)
        del sys.modules[path.stem]
    return importlib.import_module


def sample(contender, number, seconds, memory="backed", **more):
    shape = {"bytes": 32 << 20, "tensors": 4, "send_s": 0.1, "warm_up_s": 0.1, "source_extra": None}
    return {"contender": contender, "round": number, "memory": memory, "first_s": seconds, **shape, **more}


def results_of(bench, samples, **row):
    report = bench("report")
    row = {"title": "a state", "table": ["first"], "bytes": 32 << 20, "tensors": 4, "samples": samples, **row}
    facts = {"cores": 2, "cpu": "a", "kernel": "6", "python": "3", "torch": "2", "torchft": "0.2.0", "tensorferry": "1"}
    return {
        "machine": facts | {"others_busy": [0.0], "first_touch": {"backed": 6.0, "cold": 0.5}},
        "options": {"rounds": 3, "scale": 1.0},
        "rows": [row | {"summary": report.summarise_transfers(samples, [])}],
        "stall_summary": [],
    }


def test_ratios_agree_with_the_medians_beside_them(bench):
    samples = [
        *(sample("torchft:0", i, s) for i, s in enumerate((9.0, 9.0, 9.0))),
        *(sample("torchft:4", i, s) for i, s in enumerate((2.0, 4.0, 9.0))),
        *(sample("tensorferry", i, s) for i, s in enumerate((1.0, 4.0, 5.0))),
        sample("gloo+inplace", 0, 0.5),
    ]
    samples.append({"contender": "tensorferry", "round": 3, "memory": "backed", "error": "lost"})
    fresh = {"fresh_1_s": 0.9, "fresh_2_s": 2.0, "huge_1_s": 2.1, "huge_2_s": 2.2}
    raw = [{"round": 1, "touched_1_s": 1.0, "touched_2_s": 2.0, **fresh}]
    summary = bench("report").summarise_transfers(samples, raw)

    assert summary["best_rival"]["first"] == "torchft:4"  # not the one in place, which the line is not about
    assert summary["best_rival"]["second"] is None
    ours = next(line for line in summary["lines"] if line["contender"] == "tensorferry")
    assert ours["seconds"] == {"median": 4.0, "low": 1.0, "high": 5.0}
    assert ours["speedup"] == {"median": 1.0, "low": 1.0, "high": 2.0}  # the median of the ratios would be 1.8
    assert ours["of_raw_fresh"]["median"] == 0.225
    assert ours["of_raw_touched"]["median"] == 0.25


def test_in_place_the_best_rival_may_be_one_that_receives_into_fresh_memory(bench):
    samples = [sample("torchft:0", 0, 2.0), sample("gloo+inplace", 0, 3.0), sample("tensorferry+inplace", 0, 1.0)]
    summary = bench("report").summarise_transfers(samples, [])
    assert summary["best_rival"]["in place"] == "torchft:0"
    assert summary["best_rival"]["first"] == "torchft:0"
    line = bench("report").table_lines(results_of(bench, samples, table=["in place"]))[0]
    assert line.seconds == {"HTTPTransport": 2.0, "PGTransport": 3.0, "tensorferry": 1.0}


def test_cold_memory_is_a_line_of_its_own(bench):
    samples = [
        sample("torchft:0", 0, 2.0), sample("tensorferry", 0, 1.0),
        sample("torchft:0", 0, 8.0, "cold"), sample("tensorferry", 0, 2.0, "cold"),
    ]  # fmt: skip
    results = results_of(bench, samples, table=["first", "cold"])
    backed, cold = bench("report").table_lines(results)
    assert (backed.memory, backed.ratios["tensorferry"]["median"]) == ("backed", 2.0)
    assert (cold.memory, cold.ratios["tensorferry"]["median"]) == ("cold", 4.0)


@pytest.fixture
def memory(bench, monkeypatch, tmp_path):
    """The benchmark's memory module on a machine with 1 GiB free, whose first touches run at the rates in a list."""
    module = bench("memory")
    monkeypatch.setattr(module, "_REPORTING", tmp_path)
    monkeypatch.setattr(module, "_free", lambda: 1 << 30)
    module.rates = []
    monkeypatch.setattr(module, "first_touch", lambda _: module.rates.pop(0))
    return module


def test_what_is_backed_is_held_until_free_memory_is_cold(memory):
    memory.rates += [5.0, 0.2, 5.0, 0.2, 0.3, 0.4, 5.0]
    ballast = memory.Ballast()
    assert ballast.hold_backed(leave=256 << 20, backed=6.0) == pytest.approx(0.3)
    assert memory.rates == [5.0], "a single slow step is a pause of the machine"
    assert len(ballast._held) == 6
    ballast.release()
    assert ballast._held == []


def test_why_there_is_no_cold_memory_is_said(memory, monkeypatch, tmp_path):
    left = iter(range(1 << 30, 0, -(32 << 20)))
    monkeypatch.setattr(memory, "_free", lambda: next(left))
    memory.rates += [5.0] * 64
    with pytest.raises(memory.AllBacked, match="the first 768 MiB of free memory were backed"):
        memory.Ballast().hold_backed(leave=256 << 20, backed=6.0)
    monkeypatch.setattr(memory, "_REPORTING", tmp_path / "none")
    with pytest.raises(memory.AllBacked, match="no host takes free memory back"):
        memory.Ballast().hold_backed(leave=256 << 20, backed=6.0)


def test_the_reason_is_in_the_notes(bench):
    results = results_of(bench, [sample("torchft:0", 0, 2.0), sample("tensorferry", 0, 1.0)])
    results["machine"] |= {"first_touch": {"backed": 6.0}, "why_not_cold": "no host takes it back"}
    assert "was not measured: no host takes it back" in bench("report").as_text(results)


def test_a_line_in_which_ours_is_slower_is_named_even_if_the_table_leaves_it_out(bench):
    samples = [sample("torchft:0", 0, 1.0), sample("tensorferry", 0, 0.5), sample("tensorferry+network", 0, 2.0)]
    results = results_of(bench, samples, table=["second"])
    for text in (bench("report").as_text(results), bench("report").as_markdown(results)):
        assert "Slower than the best rival: a state, first, tensorferry, sockets: 0.5 beside HTTPTransport, 0 " in text


def test_a_state_that_a_rival_refuses_is_marked(bench):
    samples = [sample("torchft:0", 0, 1.0), sample("tensorferry", 0, 0.5)]
    samples.append({"contender": "gloo", "round": 0, "memory": "backed", "refused": "AssertionError: standard tensors"})
    table = bench("report").as_markdown(results_of(bench, samples))
    assert "| a state, first | backed | 1000 (0) | refused | 500 | 2 | - | - |" in table
    assert "Refused by PGTransport (gloo): AssertionError: standard tensors." in table


@pytest.mark.parametrize("can_be_cold", [False, True])
def test_only_fresh_receives_are_measured_in_cold_memory(bench, can_be_cold):
    row = bench("states").ROWS["large"]
    options = SimpleNamespace(contenders=None, full=False, memory=None)
    turns = bench("side_by_side").Bench(options, None, True, can_be_cold)._turns(row, 0)
    cold = {contender.name for contender, memory in turns if memory == "cold"}
    fresh = {contender.name for contender, _ in turns if contender is not None and not contender.in_place}
    assert cold == (fresh if can_be_cold else set())


@pytest.mark.process
def test_checkpoints_are_measured_beside_torchs(tmp_path):
    results_path = tmp_path / "dcp.json"
    command = [
        sys.executable, str(ROOT / "benches" / "dcp.py"), "--rounds", "1", "--scale", "0.01", "--rows", "large,reshard",
        "--contenders", "tensorferry files,tensorferry peers,FileSystemWriter,safetensors",
        "--json", str(results_path), "--folder", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
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
