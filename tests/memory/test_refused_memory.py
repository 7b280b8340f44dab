"""Memory that the system refuses: a typed error, and nothing is left that a later call stumbles over."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


#: The limit is that of a process, so this has one of its own. What is left under it is enough for all but the state.
CODE = """
import resource, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from tensorferry import HTTPTransport, SystemRefused
from tensorferry.dcp import FileReader, FileWriter, own_errors

MIB = 1 << 20
patience = timedelta(seconds=20)
folder = Path(sys.argv[1])
state = {"w": torch.full((64 * MIB // 4,), 3.0)}
other = {"w": torch.zeros(64 * MIB // 4, dtype=torch.half)}

def refused(call):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
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

transport = HTTPTransport(patience, interface="127.0.0.1", snapshot="copy")
assert refused(lambda: transport.send_checkpoint([1], 1, state, patience)), "send"
transport.send_checkpoint([1], 2, state, patience)
assert torch.equal(transport.recv_checkpoint(0, transport.metadata(), 2, patience)["w"], state["w"])
transport.disallow_checkpoint()
transport.shutdown()

dcp.save(state, storage_writer=FileWriter(folder), no_dist=True)
assert refused(load), "load"
load()
assert bool((other["w"] == 3).all())
print("through")
"""


def test_a_copy_or_a_load_without_memory_raises_and_the_next_one_succeeds(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.endswith("through\n"), done.stderr[-3000:]
