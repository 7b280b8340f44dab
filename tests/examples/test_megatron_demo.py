"""`make demo-megatron`: it ends well, and its check can fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly


ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "megatron" / "layouts.py"
RELEASE = Path(sys.prefix) / "megatron-0.19.2"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not RELEASE.is_dir(), reason="megatron-core is not installed: make build")
def test_the_demo_ends_well():
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    environment = os.environ | {"PYTHONPATH": str(RELEASE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the losses are the same" in done.stdout
