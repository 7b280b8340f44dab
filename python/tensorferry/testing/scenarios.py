"""A row of the matrix: one thing that goes wrong, and what may come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .faults import Fault
from .hostile import Attack

if TYPE_CHECKING:
    from .cell import Cell

__all__ = ["HEALED", "Scenario"]

HEALED = "healed"


@dataclass(frozen=True)
class Scenario:
    """One row.

    Args:
        name: what it is called
        about: what happens
        faults: on the connections, from the start; a callable gets the cell
        during: called when part of the state has gone through the proxy, with everything held there until it
            returns or lets go itself (``cell.proxy.release()``)
        part: how much of the state that is
        attack: on the source, all the time
        wrong_step: ask for a step the source does not serve
        expected: what tensorferry promises: ``"healed"``, or classes of exceptions
        private: what it promises with ``snapshot="copy"``, if that is more
        survives: whether the source is expected to be there afterwards, and not to have been stopped
        nbytes: the state is at least as large
        lanes: so many connections instead of the candidate's, if it has any
    """

    name: str
    about: str
    faults: tuple[Fault, ...] | Callable[[Cell], tuple[Fault, ...]] = ()
    during: Callable[[Cell], None] | None = None
    part: float = 0.25
    attack: Attack | None = None
    wrong_step: bool = False
    expected: frozenset[str] = field(default_factory=lambda: frozenset({HEALED}))
    private: frozenset[str] | None = None
    survives: bool = True
    nbytes: int = 0
    lanes: int = 0

    def promised(self, transport: str) -> frozenset[str]:
        """How the transport of this name may end."""
        return self.private if self.private is not None and transport == "tensorferry-copy" else self.expected
