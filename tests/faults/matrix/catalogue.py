"""The scenarios that come with the suite: the rows of the matrix."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..proxy import faults
from .processes import wait_until
from .scenario import HEALED, Beside, Scenario

if TYPE_CHECKING:
    from .cell import Cell

GONE = frozenset({"ConnectError", "FetchTimeout"})
"""tensorferry's errors for a source that cannot be reached or stops sending."""

DEEP = 300_000
"""An offset in the first body of most connections; responses with metadata are smaller."""
DEEPER = 1_300_000
"""An offset after the first block, when the transfer has begun, and before the end of a connection's share."""
# Large enough that the source still has more to send than the 4 MiB that the kernel buffers.
LARGE = 128 << 20


def _sigkill(cell: Cell) -> None:
    cell.source.signal(signal.SIGKILL)
    wait_until(lambda: not cell.source.alive(), 10)


def _sigstop(cell: Cell) -> None:
    cell.source.signal(signal.SIGSTOP)


def _restart(cell: Cell) -> None:
    _sigkill(cell)
    cell.proxy.retarget(*cell.another_source(same_state=True)[:2])


def _republish(cell: Cell) -> None:
    """The source publishes other bytes as the same step during the transfer."""
    cell.allow_newer()
    cell.ask_source(("publish", cell.step, cell.newer_seed))


def _stall(cell: Cell) -> None:
    """The receiver reads nothing while its source withdraws the state, writes over it and publishes the next step.

    The proxy reads nothing either: otherwise the source could hand its bytes over.
    """
    cell.receiver.signal(signal.SIGSTOP)
    try:
        cell.withdraw()
        cell.ask_source(("publish", cell.step + 1, cell.newer_seed))
    finally:
        cell.resume_receiver()


def _move_on(cell: Cell) -> None:
    """The source withdraws and publishes the next step while the receiver goes on reading."""
    cell.proxy.release()
    cell.withdraw()
    cell.ask_source(("publish", cell.step + 1, cell.newer_seed))


def _drain(cell: Cell) -> None:
    """The source withdraws while the receive goes on and makes further requests."""
    cell.ask_source(("drain",))
    # After this a source that waits for its readers is waiting, and any other has withdrawn.
    wait_until(cell.source.has_answered, 0.2)
    cell.proxy.release()
    cell.source.receive_answer(2 * cell.timeout)


def _replace(cell: Cell) -> None:
    cell.ask_source(("replace",))


def _change(cell: Cell) -> None:
    """The source's trainer writes to the served tensors; a receive may return the old or the new state, whole."""
    cell.allow_newer()
    cell.ask_source(("change", cell.newer_seed))


def _with_connections(
    name: str,
    about: str,
    make: Callable[..., faults.Fault],
    always: frozenset[str],
    once: bool = True,
    **more: object,
) -> list[Scenario]:
    """One fault on one connection of several, on the first connections only, and on every connection.

    Args:
        name: beginning of the scenarios' names
        about: what the fault does
        make: class of the fault
        always: how a receive may end when the fault hits every connection
        once: whether the receiver notices the fault at once, so that the same receive can recover from it
        more: further arguments of the fault
    """
    rows = [
        Scenario(f"{name}-lane", f"{about}: one of several", (make(connections=1, order="reaching", at=DEEP, **more),)),
        Scenario(f"{name}-all", f"{about}: every connection", (make(at=DEEP, **more),), expected=always),
    ]
    if once:
        opening = make(connections=range(2), at=DEEP, **more)
        each = make(connections=range(4), order="reaching", at=DEEPER, **more)
        rows[1:1] = [
            Scenario(f"{name}-opening", f"{about}: the first two connections, in the first answer", (opening,)),
            Scenario(f"{name}-once", f"{about}: each of the first four connections, once under way", (each,)),
        ]
    return rows


def _with_healthy_source(rows: list[Scenario]) -> list[Scenario]:
    """The scenarios that a single source does not survive, with a healthy source named before or after it."""
    chosen = {
        row.name: row
        for row in rows
        if row.name.endswith("-all") or row.name in ("move-on", "source-sigkill", "source-sigstop")
    }
    sides: dict[str, Beside] = {"first": "behind", "second": "in front"}
    return [
        dataclasses.replace(
            row,
            name=f"{row.name}-{name}",
            about=f"{row.about}, and a healthy source {beside} it",
            beside=beside,
            expected=frozenset({HEALED}),
            private=None,
        )
        for row in chosen.values()
        for name, beside in sides.items()
    ]


_ROWS = [
    Scenario("none", "nothing goes wrong"),
    *_with_connections("truncate", "closed in the middle of a body", faults.Truncate, GONE),
    *_with_connections("reset", "reset in the middle of a body", faults.Reset, GONE),
    *_with_connections("half-open", "silent from the middle of a body on", faults.HalfOpen, GONE, once=False),
    *_with_connections("drip", "one byte each 0.1 s from the middle of a body on", faults.Drip, GONE, once=False),
    *_with_connections("flip", "a byte of a body is changed", faults.FlipByte,
        frozenset({HEALED, "CorruptCheckpoint"})),
    Scenario("mute-start", "the first connection never answers", (faults.HalfOpen(connections=0, of="stream"),)),
    Scenario("stubborn", "each of the first five connections is closed in its first body",
        (faults.Truncate(connections=range(5), order="reaching", at=DEEP),), expected=GONE | {HEALED}),
    Scenario("drip-head-all", "one byte each 0.1 s from the first one on", (faults.Drip(of="stream"),), expected=GONE),
    Scenario("wrong-step", "the source serves another step", wrong_step=True, expected=frozenset({"WrongStep"})),
    Scenario("republish", "the source publishes other bytes as the same step, mid-transfer", during=_republish,
        expected=frozenset({HEALED, "SourceChanged"}), private=frozenset({HEALED})),
    Scenario("move-on", "the source withdraws, writes over the state and publishes the next step, mid-transfer",
        during=_move_on, expected=frozenset({HEALED, "SourceChanged", "WrongStep"}) | GONE,
        private=frozenset({HEALED})),
    Scenario("source-sigkill", "the source is killed mid-transfer", during=_sigkill, expected=GONE, survives=False),
    Scenario("source-sigstop", "the source is stopped mid-transfer, for good", during=_sigstop, expected=GONE,
        survives=False),
    Scenario("source-restart", "the source is killed mid-transfer and another takes its port", during=_restart,
        expected=frozenset({"SourceRefused", "SourceChanged"}) | GONE, survives=False),
    Scenario("reader-stall", "the receiver stops reading while the source withdraws the state and goes on",
        during=_stall, part=0.1, nbytes=LARGE // 2, lanes=1,
        expected=frozenset({HEALED, "SourceChanged", "WrongStep"}) | GONE,
        private=frozenset({HEALED})),
]  # fmt: skip

_ROWS += [
    *_with_healthy_source(_ROWS),
    Scenario("other-state-first", "a second source holds another state as the same step", beside="behind",
        other_state=True),
    Scenario("other-state-second", "the same, and the metadata names it first", beside="in front", other_state=True),
    Scenario("drain", "the source withdraws mid-transfer, and writes over the state when it is allowed to",
        during=_drain),
    Scenario("replace-data", "the source's trainer assigns to tensor.data mid-transfer, and frees the memory",
        during=_replace),
    Scenario("change", "the source's trainer writes to its tensors in place mid-transfer", during=_change,
        in_step=True, expected=frozenset({HEALED, "TornCheckpoint", "CorruptCheckpoint", "SourceChanged"}),
        private=frozenset({HEALED})),
    Scenario("pickle-system", "a hostile source's pickle names os.system", trap=True,
        expected=frozenset({"UnsafePickle"})),
]  # fmt: skip

SCENARIOS: Mapping[str, Scenario] = {row.name: row for row in _ROWS}
"""All scenarios by name, in the order of the table."""
