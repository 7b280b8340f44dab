"""A lock that is free in every forked child, for short sections of code."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager


class ForkSafeLock:
    """A lock that a forked child finds free, even if a thread of its parent held it during the fork.

    That thread does not exist in the child, so an ordinary lock would stay locked there for ever. Only for locks that
    live as long as their module: the hook that replaces the lock in a child is never removed.

    A signal handler or a ``__del__`` in the middle of a section may enter it again, in the same thread: a section must
    be written so that it finds everything in order when all of another one has run between two of its steps.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def held(self) -> AbstractContextManager[object]:
        """Holds the lock while the block runs; a child that is forked inside the block may leave the block, too."""
        # A `with` block leaves the lock that it has entered: that child releases the lock of its parent.
        return self._lock
