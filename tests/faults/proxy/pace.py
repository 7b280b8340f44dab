"""Holds connections back so that a receive cannot finish before a fault has struck."""

from __future__ import annotations

import asyncio
import contextlib


class Pace:
    """Stops each connection after ``share`` body bytes until a fault has struck on any of them.

    Args:
        share: body bytes that each connection may carry before
        patience: seconds after which all connections go on although no fault has struck
    """

    def __init__(self, share: int, patience: float) -> None:
        self._share = share
        self._patience = patience
        self._over = asyncio.Event()

    def end(self) -> None:
        """Lets all connections go on."""
        self._over.set()

    async def wait(self, carried: int) -> None:
        """Waits if a connection has ``carried`` more than its share and no fault has struck yet."""
        if carried <= self._share or self._over.is_set():
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), self._patience)
        self.end()
