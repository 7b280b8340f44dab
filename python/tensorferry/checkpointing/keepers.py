"""What checkpointers need of a keeper: ``keeper/client.py`` has one, and users may pass another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .handover import Handover

if TYPE_CHECKING:
    from .._native import Stored
    from .keeper.snapshot import Snapshot


class StateKeeper(Protocol):
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


@runtime_checkable
class LoadingKeeper(StateKeeper, Protocol):
    """A keeper from which states are loaded, too, as ``keeper/client.py`` describes it. None of its methods raises.

    Attributes:
        newest_loaded: when the newest save began that it has given out, in nanoseconds since the epoch
    """

    newest_loaded: int

    def below(self, root: Path, rank: int, world_size: int) -> list[Snapshot]:
        """Returns the snapshots of ``rank`` of the checkpoints in ``root``."""

    def prefer(self, path: str, rank: int, world_size: int, agreed: str | None = None) -> Stored | None:
        """Returns the checkpoint at ``path`` out of memory, ``None`` if it is to be loaded from the disk."""
