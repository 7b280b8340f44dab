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
from tensorferry._native import _available_memory, _check_machine_has, _memory_limit
from tensorferry.checkpointing import SyncCheckpointer
from tensorferry.errors import SystemRefused

pytestmark = pytest.mark.nightly


MIB = 1 << 20
GROUP = 512 * MIB

ASKS = """
import sys
if len(sys.argv) > 1:
    open(sys.argv[1], "w").write("0")
import resource
from tensorferry._native import SharedBuffer, _available_memory, _check_machine_has, _memory_limit
from tensorferry.checkpointing.keeper.limits import memory_limit
from tensorferry.errors import SystemRefused

def refused(nbytes):
    try:
        _check_machine_has(nbytes, "what was announced")
    except SystemRefused as e:
        return str(e)
    return ""
"""


IN_GROUP = """
import sys
from datetime import timedelta
open(sys.argv[1], "w").write("0")
verb, metadata, path = sys.argv[2:]
import torch
from tensorferry import HTTPTransport
from tensorferry.checkpointing import SyncCheckpointer, load_file
from tensorferry.cli.app import run
from tensorferry.errors import SystemRefused
live = {"small": torch.zeros(3)}
patience = timedelta(seconds=60)
try:
    if verb.startswith("receive"):
        into = (lambda: live) if verb.endswith("place") else None
        target = HTTPTransport(patience, interface="127.0.0.1", same_host=False, state_dict=into)
        target.recv_checkpoint(0, metadata, 1, patience)
    elif verb == "load":
        SyncCheckpointer().load(path)
    elif verb == "load_file":
        load_file(path)
    else:
        print("done", run([verb, path] + [path] * (verb == "diff")))
except SystemRefused as e:
    print("SystemRefused", e)
"""


_GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """Makes a group below that of this process whose memory is limited; yields the file that takes its processes.

    Skips the test, with the reason, where no such group can be made.
    """
    groups = [line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    v1 = next((path for names, path in groups if "memory" in names.split(",")), None)
    v2 = next((path for names, path in groups if names == ""), None)
    if v1 is not None:
        above, limit = _GROUPS / "memory" / v1.lstrip("/"), "memory.limit_in_bytes"
    elif v2 is not None:
        above, limit = _GROUPS / v2.lstrip("/"), "memory.max"
    else:
        pytest.skip("this process is in no control group")
    group = above / f"tensorferry-test-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no control group can be made: {e}")
    try:
        try:
            (group / limit).write_text(str(nbytes))
        except OSError as e:
            pytest.skip(f"the memory of a control group cannot be limited here: {e}")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def run(code: str, *arguments: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ASKS + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "through\n", (done.returncode, done.stderr[-3000:])


def test_this_machine_has_memory_and_not_any_number_of_bytes() -> None:
    has, free = _memory_limit(), _available_memory()
    assert has is not None
    assert free is not None
    assert MIB < free <= has
    _check_machine_has(has, "what fits")
    with pytest.raises(SystemRefused, match=r"what does not has \d+ bytes, and"):
        _check_machine_has(1 << 62, "what does not")


@pytest.mark.process
def test_a_process_in_a_control_group_can_have_what_the_group_may_have() -> None:
    code = f"""
assert _memory_limit() == {GROUP}, _memory_limit()
assert 0 < _available_memory() < {GROUP}, _available_memory()
# An announced length that the machine has memory for, and the group does not.
assert "the control group of this process may have" in refused({GROUP} + (8 << 30)), refused({GROUP} + (8 << 30))
assert refused({GROUP}) == ""
assert memory_limit("50%") == {GROUP // 2}
try:
    SharedBuffer({GROUP} + (8 << 30), threads=1)
except SystemRefused as e:
    assert "control group" in str(e)
else:
    raise AssertionError("the kernel would have ended this process")
print("through")
"""
    with limited(GROUP) as processes:
        run(code, str(processes))


@pytest.mark.process
@pytest.mark.parametrize("verb", ["receive", "receive in place", "load", "load_file", "inspect", "diff"])
def test_a_state_that_is_larger_than_the_control_group_is_refused_and_not_killed(verb, tmp_path) -> None:
    """The kernel would end the process, without a word: what has to fit is compared before it is allocated."""
    large = {"w": torch.zeros((GROUP + 64 * MIB) // 4), "small": torch.ones(3)}
    source: HTTPTransport[object] = HTTPTransport(timedelta(seconds=60), interface="127.0.0.1")
    try:
        if verb in ("receive", "receive in place"):
            source.send_checkpoint([1], 1, large, timedelta(seconds=60))
        elif verb in ("load", "inspect", "diff"):
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
        expected = {"inspect": "done 0", "diff": "done 0"}.get(verb, "SystemRefused")
        assert done.stdout.splitlines()[-1].startswith(expected), done.stdout
        if expected == "SystemRefused":
            assert "the control group of this process may have" in done.stdout
    finally:
        source.shutdown()


@pytest.mark.process
def test_a_process_with_a_limited_address_space_can_have_no_more_than_that() -> None:
    run(
        f"""
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = _memory_limit()
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * {MIB}, used + 300 * {MIB}))
assert _memory_limit() == min(before, used + 300 * {MIB})
assert 0 < _available_memory() <= 300 * {MIB}, _available_memory()
assert "the address space of this process may have" in refused(64 << 40)
print("through")
"""
    )
