"""A row of the matrix: one thing that goes wrong, and what may come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..proxy.faults import Fault, ReplaceHead
from .attacks import Attack
from .idle_crowd import IdleCrowd
from .traps import Trap

if TYPE_CHECKING:
    from .candidates import Candidate
    from .run_cell import Cell

__all__ = ["HEALED", "Beside", "LeftOut", "Scenario"]

HEALED = "healed"

Beside: TypeAlias = Literal["", "in front", "behind"]

BROKEN = {
    "tensorferry-secret": frozenset({"UnprovenSource", "SourceRefused"}),
    "tensorferry-tls": frozenset({"UnprovenSource", "ConnectError", "FetchTimeout", "ProtocolError"}),
}
"""What else a receive may end with that would not be healed anyway, for transports that check more."""


class LeftOut(Exception):
    """A row cannot be had on this machine; the text says why."""


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
        beside: the receive has a second, healthy source with the same state, in front of the faulty one or behind it
        other_state: that source holds another state as the same step
        timeout: the deadline of the receive, if it is not the run's, seconds
        prompt: the part of the deadline that the receive may take; 0: all of it
        local: source and receiver do without the network. The proxy sees little of them then, and nothing is held when
            ``during`` is called: the source sends slowly instead.
        in_place: the receiver has a live state to receive into
        silent_names: the source is told by a name that only a name server knows, and the receiver's never answers
        trap: the source is hostile, and its state a trap
        stock: the source is torchft's own transport
        waiting: the source serves nothing at first, and ``during`` is called when the receive waits for its next step
        in_step: the newer of the two states has the objects of the first one, since only its tensors are written to
    """

    name: str
    about: str
    faults: tuple[Fault, ...] | Callable[[Cell], tuple[Fault, ...]] = ()
    during: Callable[[Cell], None] | None = None
    part: float = 0.25
    attack: Attack | IdleCrowd | None = None
    wrong_step: bool = False
    expected: frozenset[str] = field(default_factory=lambda: frozenset({HEALED}))
    private: frozenset[str] | None = None
    survives: bool = True
    nbytes: int = 0
    lanes: int = 0
    beside: Beside = ""
    other_state: bool = False
    timeout: float = 0.0
    prompt: float = 0.0
    local: bool = False
    in_place: bool = False
    silent_names: bool = False
    trap: Trap | None = None
    stock: bool = False
    waiting: bool = False
    in_step: bool = False

    def concerns(self, candidate: Candidate) -> bool:
        """Whether it can happen to this transport."""
        reads = not callable(self.faults) and any(isinstance(fault, ReplaceHead) for fault in self.faults)
        lacks = (
            (self.beside and not candidate.join)
            or (self.local and not candidate.local)
            or (self.in_place and not candidate.in_place)
            or (self.stock and not candidate.stock)
        )
        return not lacks and not (reads and candidate.encrypts)

    def promised(self, transport: str) -> frozenset[str]:
        """How the transport of this name may end."""
        if transport == "tensorferry-copy" and self.private is not None:
            return self.private
        if self.expected <= {HEALED}:
            return self.expected
        # What is damaged beyond repair can be what a source proves itself by, or keeps a connection together.
        return self.expected | BROKEN.get(transport, frozenset())
