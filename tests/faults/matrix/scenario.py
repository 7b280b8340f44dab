"""A scenario, which is a row of the matrix: one thing that goes wrong, and how a receive may end then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..proxy.faults import Fault

if TYPE_CHECKING:
    from .candidates import Candidate
    from .cell import Cell

HEALED = "healed"

Beside: TypeAlias = Literal["", "in front", "behind"]

BROKEN = {
    "tensorferry-secret": frozenset({"UnprovenSource", "SourceRefused"}),
    "tensorferry-tls": frozenset({"UnprovenSource", "ConnectError", "FetchTimeout", "ProtocolError"}),
}
"""Further ways in which a receive may fail, for transports that authenticate their peer."""


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
        wrong_step: whether the receiver asks for a step that the source does not serve
        expected: how tensorferry promises that the receive ends: ``"healed"``, or names of exception classes
        private: what it promises with ``snapshot="copy"``, if that is more
        survives: whether the source must still run at the end; ``False`` if the scenario kills or stops it
        nbytes: least size of the state
        lanes: number of connections in place of the candidate's, unless that is 0
        beside: whether the receive has a second, healthy source with the same state, and whether the metadata names it
            before (``"in front"``) or after (``"behind"``) the faulty one
        other_state: whether that source holds another state as the same step
        trap: whether the state's pickle calls ``os.system``
        in_step: whether the newer state differs from the first one in its tensors only
    """

    name: str
    about: str
    faults: tuple[Fault, ...] | Callable[[Cell], tuple[Fault, ...]] = ()
    during: Callable[[Cell], None] | None = None
    part: float = 0.25
    wrong_step: bool = False
    expected: frozenset[str] = field(default_factory=lambda: frozenset({HEALED}))
    private: frozenset[str] | None = None
    survives: bool = True
    nbytes: int = 0
    lanes: int = 0
    beside: Beside = ""
    other_state: bool = False
    trap: bool = False
    in_step: bool = False

    def concerns(self, candidate: Candidate) -> bool:
        """Whether the scenario is possible with a transport."""
        return not (self.beside and not candidate.join)

    def promised(self, transport: str) -> frozenset[str]:
        """How a receive of the transport with this name may end."""
        if transport == "tensorferry-copy" and self.private is not None:
            return self.private
        if self.expected <= {HEALED}:
            return self.expected
        # Damage can hit the proof of the secret, and it ends an encrypted connection.
        return self.expected | BROKEN.get(transport, frozenset())
