"""The scenarios of two receivers that can pass on to each other what they have: one relays, the other is watched."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..proxy import faults
from .processes import wait_until
from .scenario import HEALED, Scenario
from .workers import OVERWRITE

if TYPE_CHECKING:
    from .cell import Cell

PART = 0.5
"""The part of one state that has come to both receivers together when something happens."""
DEEP = 1_300_000
"""An offset in the bodies of a connection that is behind the header and the first block."""


def _kill(cell: Cell) -> None:
    assert cell.relay
    cell.relay.signal(signal.SIGKILL)
    wait_until(lambda: not (cell.relay and cell.relay.alive()), 10)


def _stop(cell: Cell) -> None:
    assert cell.relay
    cell.relay.signal(signal.SIGSTOP)


def _leave(cell: Cell) -> None:
    """The relay's receive ends at its deadline, and another one begins."""
    assert cell.relay
    cell.relay.receive_answer(cell.timeout)
    cell.relay.send((cell.proxy.through(cell.metadata), cell.step, cell.allowed, cell.timeout))


def _lie(cell: Cell) -> None:
    """The relay's trainer writes over what has come, while it is being passed on."""
    assert cell.relay
    cell.relay.send((OVERWRITE,))
    wait_until(cell.relay.has_answered, cell.timeout / 2)


def relay_scenarios(rows: Mapping[str, Scenario]) -> list[Scenario]:
    """Returns the scenarios; ``rows`` are those of one receiver, some of which a second one joins."""
    relayed = Scenario("", "", part=PART, relay="through the proxy")
    own = {
        "none": ("takes the same state", None),
        "sigkill": ("is killed mid-transfer", _kill),
        "sigstop": ("is stopped mid-transfer, for good", _stop),
    }
    # What a stopped receiver is being sent counts as on its way for two seconds.
    within = {"sigstop": 10.0}
    scenarios = [
        dataclasses.replace(
            relayed,
            name=f"relay-{name}",
            about=f"another receiver {about}",
            during=during,
            timeout=within.get(name, 0.0),
        )
        for name, (about, during) in own.items()
    ]
    scenarios += [
        dataclasses.replace(
            relayed,
            name="relay-leaves",
            about="another receiver's deadline ends mid-transfer, and it begins again",
            during=_leave,
            relay_timeout=1.0,
        ),
        dataclasses.replace(
            relayed,
            name="relay-lies",
            about="another receiver's trainer writes over what has come, while it is passed on",
            during=_lie,
            relay="in place",
        ),
        Scenario(
            "relay-partition",
            "every connection to the source is silent from the second block on, but for those of another receiver",
            (faults.HalfOpen(at=DEEP),),
            relay="around the proxy",
            expected=rows["half-open-all"].expected | {HEALED},
        ),
    ]
    for name in ("drain", "move-on", "source-sigkill", "source-sigstop"):
        row = rows[name]
        about = f"{row.about}, and another receiver takes the same state"
        more = frozenset({HEALED}) if name.startswith("source-sig") else frozenset()
        scenarios.append(
            dataclasses.replace(
                row, name=f"relay-{name}", about=about, expected=row.expected | more, relay="through the proxy"
            )
        )
    return scenarios
