"""Second requests for ranges that take much longer than most: of many requests, one or the other waits for a slow disk.

The object is the one that was opened, or the store refuses, so it does not matter which of two answers is taken.
"""

from __future__ import annotations

import collections
import statistics
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

#: How many reads have to be known before one counts as slow, and how many are remembered.
_KNOWN, _REMEMBERED = 16, 64
#: How many times as long as the median a slow one takes at least, and how many seconds.
_TIMES, _LEAST_S = 4.0, 0.25
#: Of so many reads, one may be requested twice: where all are slow, a second request would slow down the others.
_OF = 20

_T = TypeVar("_T")


class Pace:
    """How long the reads of one operation take. Those who share it read pieces of about the same size."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self._first = self._second = 0

    async def read(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Makes a request, and a second one beside it if it is slow; returns what the faster one brings.

        Raises:
            Exception: what the last one of them raises
        """
        # Slow to load, for those who never come here.
        import asyncio

        began = time.monotonic()
        running = {asyncio.ensure_future(make())}
        try:
            done, _ = await asyncio.wait(running, timeout=self._patience())
            if not done and self._may_repeat():
                running.add(asyncio.ensure_future(make()))
            while True:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                fine = [one for one in done if one.exception() is None]
                if fine or not running:
                    found = (fine or list(done))[0].result()
                    self._note(time.monotonic() - began)
                    return found
        finally:
            for one in running:
                one.cancel()

    def _patience(self) -> float | None:
        """Returns after how many seconds a read counts as slow; ``None`` while that is not known."""
        with self._lock:
            self._first += 1
            if len(self._taken) < _KNOWN:
                return None
            return max(_LEAST_S, _TIMES * statistics.median(self._taken))

    def _may_repeat(self) -> bool:
        with self._lock:
            may = len(self._taken) >= _KNOWN and (self._second + 1) * _OF <= self._first
            self._second += may
            return may

    def _note(self, seconds: float) -> None:
        with self._lock:
            self._taken.append(seconds)
