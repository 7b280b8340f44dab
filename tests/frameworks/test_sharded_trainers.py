"""Lightning's Fabric for real: two ranks are killed, and go on from what was saved under ``install``."""

from __future__ import annotations

import importlib.util
import os

import pytest
from framework_ranks import job

from tensorferry.dcp import marker

pytestmark = pytest.mark.nightly


STRATEGIES = [""] + (["fsdp"] if os.environ.get("TENSORFERRY_ALL_FRAMEWORKS") else [])


@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_ranks_go_on_with_the_state_that_torchs_own_writer_saves(strategy, tmp_path):
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("Lightning is not installed")
    script = "lightning_trainer.py"
    with job(script, "train", tmp_path, STRATEGY=strategy) as ranks:
        saved = [rank.wait_for("saved") for rank in ranks]
        for rank in ranks:
            rank.kill()
    assert any(marker.is_marker(path) for path in (tmp_path / "ours").rglob(".metadata"))
    assert list((tmp_path / "theirs").rglob("*.distcp"))
    assert not list((tmp_path / "ours").rglob("*.distcp"))
    with job(script, "resume", tmp_path, STRATEGY=strategy) as ranks:
        for rank, before in zip(ranks, saved, strict=True):
            assert rank.wait_for("theirs") == before
            assert rank.wait_for("ours") == before
            rank.end()
