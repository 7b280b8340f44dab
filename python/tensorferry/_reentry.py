"""Locks for calls that their own thread may make a second time in the middle of the first.

Python runs signal handlers, ``__del__`` and callbacks (``progress=``, a ``__reduce__`` of the state, a handler of the
log) in the middle of whatever their thread is doing. A thread that waits there for a lock that it holds itself waits
for ever.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from typing import Any

from .errors import InvalidArgument


class Reentered(InvalidArgument, RuntimeError):
    """A call was made in the middle of such a call of the same thread."""


class CallLock:
    """Admits one thread at a time to a call, and refuses a second call of the thread that is in it.

    Args:
        what: how messages name the call that is refused
        fork_safe: a forked child finds it free; only for locks that live as long as their module
    """

    def __init__(self, what: str, *, fork_safe: bool = False) -> None:
        self._what = what
        self._renew()
        if fork_safe:
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        #: Also for calls that may be made in the middle of the guarded one.
        self.reentrant: Any = threading.RLock()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds the lock."""
        return bool(self.reentrant._is_owned())

    def check(self) -> None:
        """Raises where :meth:`held` does.

        Raises:
            Reentered: the calling thread holds the lock
        """
        if self.is_mine:
            raise Reentered(
                f"{self._what} was called in the middle of such a call of the same thread, by a signal handler, a "
                "__del__ or a callback: set a flag there, and look at it after the call"
            )

    def held(self) -> AbstractContextManager[object]:
        """Holds the lock while the block runs.

        Raises:
            Reentered: the calling thread holds it already
        """
        self.check()
        # The block enters the lock itself: no exception of a signal handler can come between.
        lock: AbstractContextManager[object] = self.reentrant
        return lock
