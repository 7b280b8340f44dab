"""``examples/fsdp2/train.py`` with two ranks: a run that begins again ends as one that was never interrupted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import forked

pytestmark = pytest.mark.process


EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2" / "train.py"


def train(folder: Path, steps: int) -> tuple[list[str], str]:
    """Runs the example as torchrun does; returns the digest of each rank, and what all have said."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, str(EXAMPLE), "--folder", str(folder), "--steps", str(steps), "--every", "4"]
    about = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    about |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1"}
    ranks = [
        forked.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **about, "RANK": str(n), "LOCAL_RANK": str(n)},
        )
        for n in range(2)
    ]
    try:
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    ends = [re.search(rf"rank \d at step {steps}: (\w{{64}})", text) for text in said]
    assert all(ends), said
    return [end[1] for end in ends if end], "\n".join(said)


@pytest.mark.process
@pytest.mark.timeout(240)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    expected, said = train(tmp_path, 8)
    assert "goes on" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-8"]
    shutil.rmtree(tmp_path / "step-8")
    found, said = train(tmp_path, 8)
    assert said.count("goes on after step 4") == 2
    assert found == expected
    assert found[0] != found[1], "both ranks have the same part of the model"
