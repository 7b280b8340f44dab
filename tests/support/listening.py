"""By which sockets this process listens."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def listening() -> set[str]:
    """Returns the sockets by which this process listens, by the numbers that the system gives them."""
    sockets = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(descriptor))
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()]
    return {line[9] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}
