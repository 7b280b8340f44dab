"""Whether reading files takes anything from storage: the page cache of this machine may hold them, and share them."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

#: Places of a file that are looked at, at most, and bytes from one to the next, at least.
_PLACES, _APART = 64, 1 << 20


def holds(files: Iterable[Path]) -> bool | None:
    """Whether the page cache holds files, judged by samples.

    ``None`` where the file system does not tell, or a file cannot be opened.
    """
    try:
        return all(map(_holds, files))
    except OSError:
        return None


def cache_of(folder: Path) -> tuple[str, int, int]:
    """Returns what is the same for two processes if one finds in the page cache what the other reads from a folder."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        about = folder.stat()
    except OSError:
        return secrets.token_hex(), 0, 0
    return boot, about.st_dev, about.st_ino


def _holds(path: Path) -> bool:
    """Whether the page cache holds a file, judged by bytes here and there that are read without waiting for storage."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return False
        step = max(_APART, status.st_size // _PLACES)
        # Raises another error where the file system has no such reads, like many on a network.
        return all(os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) for offset in range(0, status.st_size, step))
    except BlockingIOError:
        return False
    finally:
        os.close(file)
