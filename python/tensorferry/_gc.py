"""Pauses the cyclic garbage collector while hundreds of thousands of objects are created in a loop.

A full collection in such a loop costs more than the loop (measured: 0.4 us a tensor became 4).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ._fork import ForkSafeLock


class _Holders:
    """Counts the blocks of one process that pause the collector; ``_lock`` guards it."""

    def __init__(self) -> None:
        self.count = 0
        self.was_enabled = False


_lock = ForkSafeLock()
_holders = _Holders()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses cyclic collection while the block runs.

    Blocks may be nested, and blocks of several threads may overlap: collection resumes after the last one.
    """
    holders = _holders
    with _lock.held():
        # Counted before and, below, until after the collector is switched: a signal handler that pauses it in between
        # is never the first or the last one.
        holders.count += 1
        if holders.count == 1:
            holders.was_enabled = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        # In a child that was forked inside the block, _resume_in_child has resumed the collector already.
        if holders is _holders:
            with _lock.held():
                if holders.count == 1 and holders.was_enabled:
                    gc.enable()
                holders.count -= 1


def _resume_in_child() -> None:
    """Resumes the collector in a forked child, where the threads that paused it do not exist."""
    global _holders
    before, _holders = _holders, _Holders()
    if before.count and before.was_enabled:
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)
