"""Receives with almost no address space left, and machines without room for shared memory: errors, never signals."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from tensorferry import HTTPTransport

pytestmark = pytest.mark.nightly


TIMEOUT = timedelta(seconds=60)
MIB = 1 << 20

RECEIVE = """
import resource, sys
from datetime import timedelta
import torch
from tensorferry import HTTPTransport, SystemRefused, TensorferryError

metadata, mode = sys.argv[1:]
patience = timedelta(seconds=20)
live = {"w": torch.zeros(6 << 20), "v": {"n": torch.zeros(5)}}
transport = HTTPTransport(
    patience, interface="127.0.0.1", same_host=mode == "ring", state_dict=(lambda: live) if mode != "fresh" else None
)
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
# Everything that is loaded or started once is here.
transport.recv_checkpoint(0, metadata, 1, patience)
for mib in (0, 0.3, 0.8, 1.5, 3, 6, 12, 2000):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(mib * (1 << 20)), hard))
    try:
        transport.recv_checkpoint(0, metadata, 1, patience)
        told = "received"
    except (TensorferryError, MemoryError) as e:
        told = type(e).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    print(mib, told, flush=True)
transport.recv_checkpoint(0, metadata, 1, patience)
transport.shutdown()
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("mode", ["fresh", "in place", "ring"])
def test_a_receiver_with_little_address_space_gets_an_error_and_lives(mode: str) -> None:
    state = {"w": torch.ones(6 << 20), "v": {"n": torch.arange(5.0)}}
    source = HTTPTransport(TIMEOUT, interface="127.0.0.1")
    try:
        source.send_checkpoint([1], 1, state, TIMEOUT)
        command = [sys.executable, "-W", "ignore", "-c", RECEIVE, source.metadata(), mode]
        # Freed buffers go back to the system, so that each one is asked for anew.
        env = {
            **os.environ,
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
            "MALLOC_ARENA_MAX": "1",
        }
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=env)
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-3000:])
        told = [line.split()[1] for line in done.stdout.splitlines()]
        assert told[-1] == "received", told
        assert set(told) <= {"received", "SystemRefused", "MemoryError"}, told
        assert "SystemRefused" in told or mode == "ring", told
    finally:
        source.shutdown()
