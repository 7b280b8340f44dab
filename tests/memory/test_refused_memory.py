"""Memory that the system refuses: another route, or a typed error that leaves nothing a later call stumbles over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

#: What is limited is a process, so each script has one of its own.
START = """
import resource, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from tensorferry import HTTPTransport
from tensorferry.errors import SystemRefused
from tensorferry._native import SharedBuffer
from tensorferry.dcp import FileReader, FileWriter, own_errors

MIB = 1 << 20
folder = Path(sys.argv[1])
patience = timedelta(seconds=30)
state = {"w": torch.full((64 * MIB // 4,), 3.0)}

def received_in_memory():
    with HTTPTransport(patience, interface="127.0.0.1") as source, HTTPTransport(patience, interface="127.0.0.1") as to:
        source.send_checkpoint([1], 1, state, patience)
        found = to.recv_checkpoint(0, source.metadata(), 1, patience)
        assert torch.equal(found["w"], state["w"])
        # So its size does not matter.
        assert "/dev/shm" not in Path("/proc/self/maps").read_text()
        return to.last_report.same_host
"""

SCRIPTS = {
    # No signal ends the process, and where the ring of a receive is refused, bytes come over the network.
    "no large files": """
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
try:
    SharedBuffer(8 * MIB, threads=2)
except SystemRefused as e:
    assert "bytes of shared memory" in str(e), e
else:
    raise AssertionError("such a file may not be made")
assert not received_in_memory()
""",
    # A copy or a load without memory raises, and the next one succeeds.
    "a small address space": """
other = {"w": torch.zeros(64 * MIB // 4, dtype=torch.half)}

def refused(call):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # What is left is enough for all but the state.
    resource.setrlimit(resource.RLIMIT_AS, (used + 40 * MIB, hard))
    try:
        call()
    except SystemRefused as e:
        return f"cannot allocate {64 * MIB} bytes" in str(e)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

def load():
    with own_errors():
        dcp.load(other, storage_reader=FileReader(folder), no_dist=True)

with HTTPTransport(patience, interface="127.0.0.1", snapshot="copy") as transport:
    assert refused(lambda: transport.send_checkpoint([1], 1, state, patience)), "send"
    transport.send_checkpoint([1], 2, state, patience)
    assert torch.equal(transport.recv_checkpoint(0, transport.metadata(), 2, patience)["w"], state["w"])
dcp.save(state, storage_writer=FileWriter(folder), no_dist=True)
assert refused(load), "load"
load()
assert bool((other["w"] == 3).all())
assert received_in_memory()
""",
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_memory_that_there_is_not_is_done_without_or_an_error(what: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", START + SCRIPTS[what] + "print('through')", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout.endswith("through\n"), done.stderr[-3000:]
