"""Runs each target of ``fuzzing.py``, in a process of its own, with hundreds of mutated inputs.

``--fuzz-runs 10000 --fuzz-seed 7`` for longer ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzzing import TARGETS

pytestmark = [pytest.mark.process, pytest.mark.beyond_torchft]


@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", TARGETS)
def test_whatever_a_peer_sends_ends_well_or_in_an_error_of_ours(target: str, pytestconfig: pytest.Config) -> None:
    runs, seed = pytestconfig.getoption("--fuzz-runs"), pytestconfig.getoption("--fuzz-seed")
    done = subprocess.run(
        [sys.executable, "fuzzing.py", target, str(runs), str(seed)],
        cwd=Path(__file__).parents[1] / "support",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120 + runs,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "'well'" in done.stdout, "nothing was read: the inputs are too far from what a sender says"
