"""A lock that is free in every forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ForkSafeLock:
    """A lock that a forked child finds free, even if a thread of its parent held it during the fork.

    That thread does not exist in the child, so an ordinary lock would stay locked there for ever. Only for locks that
    live as long as their module: the hook that replaces the lock in a child is never removed.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock while the block runs; a child that is forked inside the block may leave the block, too."""
        # Not looked up again at the end: the child that was forked inside the block releases the lock of its parent.
        with self._lock:
            yield
