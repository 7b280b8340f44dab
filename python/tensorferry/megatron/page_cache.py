"""Whether files are in the page cache of this machine, so that reading them takes nothing from storage."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

#: Places of a file that are looked at, at most, and bytes from one to the next, at least.
_PLACES, _APART = 64, 1 << 20


def holds(files: Iterable[Path]) -> bool:
    """Whether the page cache holds files, judged by samples; false where the file system does not tell."""
    try:
        return all(map(_holds, files))
    except OSError:
        return False


def _holds(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            return False
        step = max(_APART, about.st_size // _PLACES)
        # Raises where a byte is not in memory, and where the file system has no such reads, like many on a network.
        return all(os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) for at in range(0, about.st_size, step))
    finally:
        os.close(file)
