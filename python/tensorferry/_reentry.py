"""Locks for calls that their own thread may make a second time in the middle of the first.

Python runs signal handlers, ``__del__`` and callbacks (``progress=``, a ``__reduce__`` of the state, a handler of the
log) in the middle of whatever their thread is doing. A thread that waits there for a lock that it holds itself waits
for ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from .errors import InvalidArgument


def _reentered(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what} was called in the middle of such a call of the same thread, by a signal handler, a __del__ or a "
        "callback: set a flag there, and look at it after the call"
    )


class CallLock:
    """Admits one thread at a time to a call, and refuses a second call of the thread that is in it.

    Args:
        what: how messages name the call that is refused
    """

    def __init__(self, what: str) -> None:
        self._what = what
        #: Also for calls that may be made in the middle of the guarded one.
        self.reentrant: Any = threading.RLock()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds the lock."""
        return bool(self.reentrant._is_owned())

    def check(self) -> None:
        """Raises where :meth:`held` does.

        Raises:
            InvalidArgument: the calling thread holds the lock
        """
        if self.is_mine:
            raise _reentered(self._what)

    def held(self) -> AbstractContextManager[object]:
        """Holds the lock while the block runs.

        Raises:
            InvalidArgument: the calling thread holds it already
        """
        self.check()
        # The block enters the lock itself: no exception of a signal handler can come between.
        lock: AbstractContextManager[object] = self.reentrant
        return lock


class CallMark(threading.local):
    """Marks that the calling thread is in a call, where calls of several threads may overlap.

    Args:
        what: how messages name the call that is refused
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_set = False

    def check(self) -> None:
        """Raises in the middle of a marked call of the same thread.

        Raises:
            InvalidArgument: it is in one
        """
        if self._is_set:
            raise _reentered(self._what)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Marks the call while the block runs.

        Raises:
            InvalidArgument: the calling thread is in one already
        """
        self.check()
        try:
            self._is_set = True
            yield
        finally:
            self._is_set = False


class ForkSafeCallLock(CallLock):
    """A :class:`CallLock` that a forked child finds free; only for locks that live as long as their module."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.reentrant = threading.RLock()
