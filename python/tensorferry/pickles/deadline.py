"""The time that the pickles of one receive may take: few bytes that came in time can take much longer to read."""

from __future__ import annotations

import time

from ..errors import FetchTimeout


class Deadline:
    """The end of a receive.

    Args:
        given: the seconds that the whole receive has, from now
    """

    def __init__(self, given: float) -> None:
        self._given = given
        self._ends = time.monotonic() + given

    def check(self) -> None:
        """Checks that there is time left.

        Raises:
            FetchTimeout: there is none
        """
        if time.monotonic() > self._ends:
            raise FetchTimeout(f"timed out: the whole receive was given {self._given:.3f} s, which its pickles exceed")
