"""The processes of the example are ended together with their own children."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import end

pytestmark = pytest.mark.process


LEAVES_A_GRANDCHILD = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL)
print(left.pid, flush=True)
"""


def is_running(pid: int) -> bool:
    """Reports a zombie as ended: an orphan without a reaping parent stays one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_a_process_left_behind_ends_with_it():
    child = subprocess.Popen(
        [sys.executable, "-c", LEAVES_A_GRANDCHILD], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with child:
        left = int(child.stdout.readline())
        child.wait(30)
        assert is_running(left)
        end(child)
        deadline = time.monotonic() + 10
        while is_running(left) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_running(left)
        end(child)  # ending it twice does no harm
