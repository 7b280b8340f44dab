"""A full ``/dev/shm``, and a process that may make no large files: no signal, but another route or an error."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


CODE = """
import os, resource, sys
from datetime import timedelta
from pathlib import Path
import torch
from tensorferry import HTTPTransport
from tensorferry._native import SharedBuffer
from tensorferry.errors import SystemRefused

patience = timedelta(seconds=30)
state = {"w": torch.arange(4 << 20)}

def received(same_host):
    source = HTTPTransport(patience, interface="127.0.0.1", same_host=same_host)
    receiver = HTTPTransport(patience, interface="127.0.0.1", same_host=same_host)
    try:
        source.send_checkpoint([1], 1, state, patience)
        found = receiver.recv_checkpoint(0, source.metadata(), 1, patience)
        assert torch.equal(found["w"], state["w"])
        return receiver.last_report.same_host
    finally:
        receiver.shutdown()
        source.shutdown()
"""

FULL = """
shm = Path("/dev/shm")
file = os.open(shm / "filler", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(file, bytes(4096))
except OSError:
    os.close(file)
assert os.statvfs(shm).f_bavail == 0
memory = SharedBuffer(8 << 20, threads=2)
torch.frombuffer(memory, dtype=torch.uint8).fill_(7)
assert received(True)
print("through")
"""

SHORT = """
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
try:
    SharedBuffer(8 << 20, threads=2)
except SystemRefused as e:
    assert "bytes of shared memory" in str(e), e
else:
    raise AssertionError("such a file may not be made")
# The ring of a receive is refused, and bytes come over the network.
assert not received(True)
print("through")
"""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_shared_memory_is_not_that_of_dev_shm() -> None:
    """So it makes no difference that this is full."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare here")
    mount = [unshare, "-Urm", "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "sh"]
    if (tried := run([*mount, "true"])).returncode:
        pytest.skip(f"no mount namespace can be made: {tried.stderr.strip()}")
    done = run([*mount, sys.executable, "-W", "ignore", "-c", CODE + FULL])
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr[-3000:]


def test_a_process_that_may_make_no_large_files_gets_an_error_or_the_network() -> None:
    done = run([sys.executable, "-W", "ignore", "-c", CODE + SHORT])
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr[-3000:]
