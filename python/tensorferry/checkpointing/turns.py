"""Turns of saves: how many may be unfinished, and who waits for whom."""

from __future__ import annotations

import threading

from ..errors import InvalidArgument, TransportClosed

#: How many saves may be unfinished: one is written while the next is copied.
GENERATIONS = 2
#: What is wrong with a call in a callback of a future that would wait for ever.
IN_CALLBACK = (
    "{} cannot be called in a callback of a save's future: the thread that runs callbacks is the one that hears how "
    "saves went. Let the callback wake a thread of your own"
)


class Turns:
    """Counts the saves that are unfinished."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._is_ending = False

    def end(self) -> None:
        """Lets no further save begin, not even one that waits for its turn: the interpreter exits."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raises where a save cannot begin any more.

        Raises:
            TransportClosed: the interpreter exits
        """
        if self._is_ending:
            raise TransportClosed(
                "the interpreter is exiting, and would not finish this save: end threads that save, or wait for them, "
                "before the program ends"
            )

    def take(self, may_wait: bool) -> None:
        """Waits until another save may begin.

        Raises:
            InvalidArgument: it would have to wait, and may not
            TransportClosed: the interpreter exits
        """
        with self._changed:
            if not may_wait and self._count >= GENERATIONS:
                raise _would_wait()
            self._changed.wait_for(lambda: self._count < GENERATIONS or self._is_ending)
            self.check()
            self._count += 1

    def give(self) -> None:
        """Gives a turn back: a save is over."""
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_for_another(self, may_wait: bool) -> bool:
        """Waits until a save is over besides the calling one; false if there is none.

        Raises:
            InvalidArgument: there is one, and it may not wait
        """
        with self._changed:
            count = self._count
            if count < 2:
                return False
            if not may_wait:
                raise _would_wait()
            self._changed.wait_for(lambda: self._count < count)
            return True

    @property
    def is_any_taken(self) -> bool:
        """Whether a save is unfinished."""
        return self._count > 0

    def wait_for_all(self, timeout: float | None) -> bool:
        """Waits for ``timeout`` seconds, without a limit if that is ``None``; returns whether all saves are over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, timeout)


def _would_wait() -> InvalidArgument:
    return InvalidArgument(IN_CALLBACK.format("a save that has to wait for an earlier one"))
