"""Keeps a receive from being over before a fault has struck."""

from __future__ import annotations

import asyncio
import contextlib

__all__ = ["Pace"]


class Pace:
    """What each connection may carry before a fault has struck on one of them; it then waits for that.

    Args:
        share: bytes of bodies per connection
        patience: seconds after which nobody waits any longer
    """

    def __init__(self, share: int, patience: float) -> None:
        self._share = share
        self._patience = patience
        self._over = asyncio.Event()

    def end(self) -> None:
        """A fault has struck: all go on."""
        self._over.set()

    async def wait(self, carried: int) -> None:
        """Waits if a connection has ``carried`` its share and no fault has struck."""
        if carried <= self._share or self._over.is_set():
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), self._patience)
        self.end()
