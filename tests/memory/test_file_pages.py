"""A page of a mapped file that is gone ends no process, whatever else handles the signal."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


PROGRAM = """
import ctypes, faulthandler, os, sys
from tensorferry._native import FilePages

def enable():
    faulthandler.enable(open(os.devnull, "w"))

if sys.argv[2] == "before":
    enable()
pages = FilePages(sys.argv[1])
if sys.argv[2] == "after":
    enable()
os.truncate(sys.argv[1], 4096)
for _ in range(2):
    assert ctypes.string_at(pages.address + 60_000, 5) == bytes(5)
assert not pages.is_unchanged
"""


@pytest.mark.parametrize("enabled", ["never", "before", "after"])
def test_a_page_that_is_gone_ends_no_process_that_handles_faults(tmp_path: Path, enabled: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes([7]) * 65536)
    done = subprocess.run([sys.executable, "-c", PROGRAM, path, enabled], check=False, timeout=60)
    assert done.returncode == 0
