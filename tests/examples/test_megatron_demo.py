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


def test_other_losses_are_found():
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); from layouts import same; "
            "print(same([3.0, 2.0], [3.0, 2.0001]), same([3.0, 2.0], [3.0, 2.001]))",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.stdout.split() == ["True", "False"], found.stderr
