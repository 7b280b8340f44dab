"""Turns of saves: how many may be unfinished."""

from __future__ import annotations

import threading

from ..errors import TransportClosed

#: How many saves may be unfinished: one is written while the next is copied.
GENERATIONS = 2


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

    def take(self) -> None:
        """Waits until another save may begin.

        Raises:
            TransportClosed: the interpreter exits
        """
        with self._changed:
            self._changed.wait_for(lambda: self._count < GENERATIONS or self._is_ending)
            self.check()
            self._count += 1

    def give(self) -> None:
        """Gives a turn back: a save is over."""
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_for_another(self) -> bool:
        """Waits until a save is over besides the calling one; false if there is none."""
        with self._changed:
            count = self._count
            if count < 2:
                return False
            self._changed.wait_for(lambda: self._count < count)
            return True

    def wait_for_all(self, timeout: float | None) -> bool:
        """Waits for ``timeout`` seconds, without a limit if that is ``None``; returns whether all saves are over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, timeout)
