"""`make demo-restart` in miniature: a killed trainer comes back on the state that its keeper holds."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import end

pytestmark = pytest.mark.nightly


STORY = Path(__file__).parents[2] / "examples" / "restart" / "story.py"


@pytest.mark.timeout(120)
def test_the_restart_demo_plays_to_its_end():
    command = [sys.executable, str(STORY), "--steps", "4", "--every", "2", "--kill-after", "2", "--width", "64"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as story:
        try:
            out, _ = story.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            end(story)
            raise
    assert story.returncode == 0, out
    assert "the final state equal the reference bit for bit" in out
    assert "loads the last checkpoint from the disk" in out
