"""Pauses the cyclic garbage collector while hundreds of thousands of objects are created in a loop.

A full collection in such a loop costs more than the loop (measured: 0.4 us a tensor became 4).
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Holders:
    """Counts the threads of one process that have paused the collector."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.was_enabled = False


_holders = _Holders()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses cyclic collection while the block runs.

    Blocks may be nested, and blocks of several threads may overlap: collection resumes after the last one.
    """
    holders = _holders
    with holders.lock:
        if holders.count == 0:
            holders.was_enabled = gc.isenabled()
            gc.disable()
        holders.count += 1
    try:
        yield
    finally:
        # In a child that was forked inside the block, _begin_anew has resumed the collector already.
        if holders is _holders:
            with holders.lock:
                holders.count -= 1
                if holders.count == 0 and holders.was_enabled:
                    gc.enable()


def _begin_anew() -> None:
    """Resumes the collector in a forked child.

    The threads that paused it do not exist there, and one of them may have held the lock: the child gets a new one.
    """
    global _holders
    before, _holders = _holders, _Holders()
    if before.count and before.was_enabled:
        gc.enable()


os.register_at_fork(after_in_child=_begin_anew)
