"""The memory that a process can have: its control group and the limit of its address space, in children under both.

That all levels and both versions of control groups are read is tested in ``rust/core/src/memory/machine.rs``.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from cgroups import limited
from tensorferry._native import _available_memory, _check_machine_has, _memory_limit
from tensorferry.errors import SystemRefused

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
