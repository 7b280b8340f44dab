"""Control groups for children of tests, where this machine lets a test make some."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

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
