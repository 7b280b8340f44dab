"""Lets a call have few file descriptors, or none."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


def descriptors() -> set[str]:
    """Returns the numbers of the open descriptors of this process."""
    return set(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def few_files(left: int) -> Iterator[None]:
    """While the block runs, this process can open ``left`` files more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        # The lowest free number is always given out first: below the limit, only the last ``left`` are free.
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, descriptors())) + 1 + left, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(left):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in held:
            os.close(one)
