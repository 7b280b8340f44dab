"""`make demo-reshard`: it ends well."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.nightly


ROOT = Path(__file__).parents[2]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    torch.__version__ < "2.9",
    reason="torch 2.8 trains on otherwise after set_state_dict, whatever has loaded it",
)
def test_the_demo_ends_well():
    script = ROOT / "examples" / "reshard" / "live_reshard.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same to the last bit" in done.stdout
