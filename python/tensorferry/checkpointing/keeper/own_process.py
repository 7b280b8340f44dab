"""What a keeper asks of the system for its process: signals, weight, descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

#: The least scheduling weight of trainers is more than three times this (``nice``).
_NICE = 5


@contextlib.contextmanager
def ended_by_signals(stop: Callable[[int], object]) -> Iterator[None]:
    """Within the block, SIGTERM, SIGINT and SIGHUP call ``stop`` with their number."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: stop(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def lower_weight() -> None:
    """Gives this process, and all threads that it starts from now on, less weight than a trainer has."""
    nice = max(os.getpriority(os.PRIO_PROCESS, 0), _NICE)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    if os.getsid(0) == os.getpid():
        # Where the kernel gives each session a share (autogroups), that counts within the session only.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(nice))


def raise_descriptor_limit() -> None:
    """Allows as many open files as the system lets this process have: each snapshot takes a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
