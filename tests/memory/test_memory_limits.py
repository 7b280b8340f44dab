"""The memory that a process can have: its control group and the limit of its address space, in children under both.

That all levels and both versions of control groups are read is tested in ``rust/core/src/memory/machine.rs``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tensorferry import HTTPTransport
from tensorferry.checkpointing import SyncCheckpointer

pytestmark = pytest.mark.nightly


MIB = 1 << 20
GROUP = 512 * MIB

IN_GROUP = """
import sys
from datetime import timedelta
open(sys.argv[1], "w").write("0")
verb, metadata, path = sys.argv[2:]
import torch
from tensorferry import HTTPTransport, Network
from tensorferry._native import SharedBuffer
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.cli.app import run
from tensorferry.errors import SystemRefused
patience = timedelta(seconds=60)
try:
    if verb == "receive":
        HTTPTransport(patience, network=Network(same_host=False)).recv_checkpoint(0, metadata, 1, patience)
    elif verb == "load":
        SyncCheckpointer().load(path)
    elif verb == "load_file":
        load_file(path)
    elif verb == "shared":
        SharedBuffer(9 << 30, threads=1)
    else:
        print("done", run([verb, path, path]))
except SystemRefused as e:
    print("SystemRefused", e)
"""


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """Makes a group below that of this process whose memory is limited; yields the file that takes its processes.

    Skips the test, with the reason, where no such group can be made.
    """
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    groups = {names: path.lstrip("/") for _, names, path in lines}
    version_1 = next((names for names in groups if "memory" in names.split(",")), "")
    above = Path("/sys/fs/cgroup", "memory" if version_1 else "", groups.get(version_1, ""))
    group = above / f"tensorferry-test-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(nbytes))
    except OSError as e:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made whose memory is limited: {e}")
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


@pytest.mark.process
@pytest.mark.parametrize("verb", ["receive", "load", "load_file", "shared", "diff"])
def test_a_state_that_is_larger_than_the_control_group_is_refused_and_not_killed(verb, tmp_path) -> None:
    """The kernel would end the process, without a word: what has to fit is compared before it is allocated."""
    large = {"w": torch.zeros((GROUP + 64 * MIB) // 4), "small": torch.ones(3)}
    source: HTTPTransport[object] = HTTPTransport(timedelta(seconds=60), interface="127.0.0.1")
    try:
        if verb == "receive":
            source.send_checkpoint([1], 1, large, timedelta(seconds=60))
        elif verb in ("load", "diff"):
            SyncCheckpointer().save(tmp_path / "c", large)
        else:
            torch.save(large, tmp_path / "c")
        with limited(GROUP) as processes:
            arguments = [str(processes), verb, source.metadata(), str(tmp_path / "c")]
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", IN_GROUP, *arguments],
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-2000:])
        # A mapping of a file costs the group nothing that it cannot take back.
        expected = "done 0" if verb == "diff" else "SystemRefused"
        assert done.stdout.splitlines()[-1].startswith(expected), done.stdout
        if expected == "SystemRefused":
            assert "the control group of this process may have" in done.stdout
    finally:
        source.shutdown()
