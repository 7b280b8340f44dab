"""A scenario, which is a row of the matrix: one thing that goes wrong, and how a receive may end then."""

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
    from .cell import Cell

HEALED = "healed"

Beside: TypeAlias = Literal["", "in front", "behind"]
Relay: TypeAlias = Literal["", "through the proxy", "around the proxy", "in place"]

BROKEN = {
    "tensorferry-secret": frozenset({"UnprovenSource", "SourceRefused"}),
    "tensorferry-tls": frozenset({"UnprovenSource", "ConnectError", "FetchTimeout", "ProtocolError"}),
}
"""Further ways in which a receive may fail, for transports that authenticate their peer."""


class LeftOut(Exception):
    """Raised for a scenario that this machine cannot have; the text says why."""


@dataclass(frozen=True)
class Scenario:
    """A row of the matrix.

    Args:
        name: its name in the table
        about: what happens, for ``--list``
        faults: faults of the connections, from the start; a callable is called with the cell and returns them
        during: called with the cell when a part of the state has gone through the proxy, which holds everything until
            the call returns or releases it (``cell.proxy.release()``)
        part: how much of the state has gone through by then
        attack: runs against the source all the time
        wrong_step: whether the receiver asks for a step that the source does not serve
        expected: how tensorferry promises that the receive ends: ``"healed"``, or names of exception classes
        private: what it promises with ``snapshot="copy"``, if that is more
        survives: whether the source must still run at the end; ``False`` if the scenario kills or stops it
        nbytes: least size of the state
        lanes: number of connections in place of the candidate's, unless that is 0
        beside: whether the receive has a second, healthy source with the same state, and whether the metadata names it
            before (``"in front"``) or after (``"behind"``) the faulty one
        other_state: whether that source holds another state as the same step
        timeout: deadline of the receive, seconds; 0: that of the run
        prompt: the part of the deadline that the receive may take; 0: all of it
        local: whether source and receiver do without the network. The proxy then sees little of the transfer and cannot
            hold it when ``during`` is called: the source sends slowly instead.
        in_place: whether the receiver has a live state to receive into
        silent_names: whether the metadata names the source by a name that must be resolved, and the receiver's name
            server never answers
        trap: an attack on the receiver's unpickler, published as the state
        stock: whether the source is torchft's own transport
        waiting: whether the source serves nothing at first; ``during`` is then called when the receive waits for the
            next step
        in_step: whether the newer state differs from the first one in its tensors only
        relay: whether a second receiver takes the same state at the same time, so that each can pass on what it has:
            through the same proxy, directly, or through the proxy and into a live state; the source is slow, if it can
        relay_timeout: deadline of that second receive, seconds; 0: that of the run
        rail: faults of the connections to a second address of the source, which it names besides the proxy's
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
    relay: Relay = ""
    relay_timeout: float = 0.0
    rail: tuple[Fault, ...] = ()

    def concerns(self, candidate: Candidate) -> bool:
        """Whether the scenario is possible with a transport."""
        reads_heads = not callable(self.faults) and any(isinstance(fault, ReplaceHead) for fault in self.faults)
        lacks = (
            (self.beside and not candidate.join)
            or (self.local and not candidate.local)
            or ((self.in_place or self.relay == "in place") and not candidate.in_place)
            or (self.stock and not candidate.stock)
            or (self.rail and not candidate.rails)
        )
        return not lacks and not (reads_heads and candidate.encrypts)

    def promised(self, transport: str) -> frozenset[str]:
        """How a receive of the transport with this name may end."""
        if transport == "tensorferry-copy" and self.private is not None:
            return self.private
        if self.expected <= {HEALED}:
            return self.expected
        # Damage can hit the proof of the secret, and it ends an encrypted connection.
        return self.expected | BROKEN.get(transport, frozenset())
