"""What checkpointers need of a keeper: ``keeper/client.py`` has one, and users may pass another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .handover import Handover


class Keeper(Protocol):
    """What keeps staged states in memory, beside the process that writes them."""

    def offer(self, given: Handover, released: Callable[[], None]) -> None:
        """Offers a state; never raises and never waits long.

        Args:
            given: the state, and whose it is: the fields of an :class:`Order`. It holds the memory, so it must be gone
                when ``released`` is called
            released: to be called once, on any thread: when the state is refused, evicted, or the keeper is gone
        """

    def let_go(self) -> bool:
        """Asks for the release of the oldest state, because memory is short; returns whether one was released."""

    def close(self) -> None:
        """Ends the connection; states that are kept stay."""
