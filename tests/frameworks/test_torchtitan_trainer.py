"""torchtitan's own trainer on two ranks: killed and resumed, started from a running job, healed by torchft."""

from __future__ import annotations

import importlib.util
import os

import pytest
from framework_ranks import job

from tensorferry.dcp import marker

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(270)]
missing = [
    name for name in ("torchtitan", "torchdata", "tokenizers", "spmd_types") if importlib.util.find_spec(name) is None
]
staging = importlib.import_module("torch.distributed.checkpoint.staging")
if not hasattr(staging, "StagingOptions"):
    missing.append("the torch that torchtitan asks for")
if missing:
    pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)

ALL = bool(os.environ.get("TENSORFERRY_ALL_FRAMEWORKS"))
BEGIN = ("--module", "titan_job", "--config", "tiny", "--debug.seed", "1")
OURS = ("--override.imports", "tensorferry.torchtitan.files")


@pytest.mark.parametrize("mode", ["async_with_pinned_mem"] + (["disabled", "async"] if ALL else []))
def test_a_killed_job_goes_on_as_torchs_own_writer_lets_it(mode, tmp_path):
    run = (*BEGIN, *OURS, "--dump_folder", tmp_path, "--checkpoint.async_mode", mode, "--checkpoint.interval", 2)
    with job("titan_job.py", *run, PAUSE_AT=3, SAVE_THEIRS=2) as ranks:
        steps = []
        for rank in ranks:
            rank.wait_for("paused")
            steps.append(dict(line.split()[1:] for line in rank.output if line.startswith("step ")))
    assert marker.is_marker(tmp_path / "checkpoint/step-2/.metadata")
    assert list((tmp_path / "theirs/step-2").glob("*.distcp"))
    with job("titan_job.py", *run, PAUSE_AT=3, COMPARE=tmp_path / "theirs/step-2") as ranks:
        for rank, before in zip(ranks, steps, strict=True):
            assert rank.wait_for("theirs") == before["2"]
            assert rank.wait_for("loaded") == f"True 2 {before['2']}"
            assert rank.wait_for("step") == f"3 {before['3']}"


@pytest.mark.skipif(not ALL, reason="with TENSORFERRY_ALL_FRAMEWORKS only")
def test_an_unmodified_job_starts_from_one_that_runs(tmp_path):
    source = (*BEGIN, "--dump_folder", tmp_path / "source", "--checkpoint.interval", 100)
    with job("titan_job.py", *source, PAUSE_AT=3, PUBLISH=1) as running:
        address = running[0].wait_for("address")
        steps = []
        for rank in running:
            rank.wait_for("paused")
            steps.append(dict(line.split()[1:] for line in rank.output if line.startswith("step ")))
        begin = ("--checkpoint.initial_load_path", address, "--checkpoint.no-initial_load_model_only")
        run = (*BEGIN, "--dump_folder", tmp_path / "new", "--checkpoint.interval", 100, *begin)
        with job("titan_job.py", *run) as ranks:
            for rank, before in zip(ranks, steps, strict=True):
                assert rank.wait_for("loaded") == f"True 3 {before['3']}"


@pytest.mark.skipif(not ALL, reason="with TENSORFERRY_ALL_FRAMEWORKS only")
def test_torchft_heals_a_killed_replica_of_it(tmp_path):
    pytest.importorskip("torchft")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=2000)
    about = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "INSTALL": 1}

    def replica(number, name, seed):
        run = ("--module", "titan_job", "--config", "healing", "--debug.seed", seed)
        run += ("--dump_folder", tmp_path / name, "--fault_tolerance.replica_id", number)
        return job("titan_job.py", *run, world=1, **about)

    try:
        with replica(0, "one", 1) as (one,):
            with replica(1, "two", 2) as (two,):
                for each in (one, two):
                    each.wait_for("synced")
            with replica(1, "two_again", 3) as (again,):
                seen = dict(again.wait_for("synced").split() for _ in range(3))
                assert any("tensorferry" in line and "received step" in line for line in again.output)
                while one.wait_for("synced").split()[0] != max(seen, key=int):
                    pass
            of_one = dict(line.split()[1:] for line in one.output if line.startswith("synced "))
            assert seen.items() <= of_one.items()
    finally:
        lighthouse.shutdown()
