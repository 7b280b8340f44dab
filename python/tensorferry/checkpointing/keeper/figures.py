"""What a keeper shows of itself on its counters and its status page: what it holds, what it refused, and its buddies.

The server draws both pages, and checks and bounds what it is given. Names of jobs are labels: those of the last 64 jobs
and ranks at most, and of a path its last part alone, because both pages are open to everybody who reaches the port.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ..._native import Server
from .generations import Generations, Kept
from .limits import readable
from .snapshot import LOCAL, Snapshot

if TYPE_CHECKING:
    from .partners import Partner

#: Most jobs and ranks with a series and a row of their own: those that were saved last.
_MOST_SERIES = 64

_Rows = list[tuple[list[tuple[str, str]], float]]


@dataclass
class Tallies:
    """What a keeper counts; changed on its thread alone.

    Attributes:
        started: when it began, in Unix time
        kept: snapshots of trainers that were kept
        copied: those of buddies
        evicted: snapshots that have gone
        refused: snapshots of trainers that were refused, by whether there was no room
        last_kept: when a snapshot of a trainer was kept last, in Unix time
        last_refusal: why one was refused last, and when
    """

    started: float = field(default_factory=time.time)
    kept: int = 0
    copied: int = 0
    evicted: int = 0
    refused: dict[str, int] = field(default_factory=lambda: {"memory": 0, "other": 0})
    last_kept: float | None = None
    last_refusal: tuple[str, float] | None = None

    def note_kept(self, about: Snapshot) -> None:
        """Counts a snapshot that is kept from now on."""
        if about.origin == LOCAL:
            self.kept, self.last_kept = self.kept + 1, time.time()
        else:
            self.copied += 1

    def note_refused(self, error: str, *, is_full: bool) -> None:
        """Counts a snapshot of a trainer that was refused."""
        self.refused["memory" if is_full else "other"] += 1
        self.last_refusal = error, time.time()


@dataclass(frozen=True)
class _Newest:
    """The newest snapshot of a job and rank, and how many there are of them."""

    about: Snapshot
    count: int
    nbytes: int


def show(
    server: Server,
    name: str,
    clients: int,
    held: Generations[Any],
    tallies: Tallies,
    partners: Iterable[Partner],
) -> None:
    """Hands to ``server`` what its pages show of the keeper called ``name``.

    Args:
        server: draws the pages
        name: the keeper's name
        clients: how many processes of the node are connected
        held: the snapshots
        tallies: what was counted
        partners: the buddies
    """
    kept = list(held)
    own, copies = ([one for one in kept if (one.about.origin == LOCAL) is here] for here in (True, False))
    newest, buddies = _newest(kept), [_Buddy.of(partner) for partner in partners]
    lines = [
        f"{readable(held.used)} of {readable(held.limit)} in {len(kept)} snapshots, {len(copies)} of them of buddies",
        f"{clients} processes are connected",
    ]
    if tallies.last_refusal is not None:
        refused, (why, at) = sum(tallies.refused.values()), tallies.last_refusal
        lines.append(f"snapshots refused: {refused}, the last one {_ago(at)}: {why}")
    tables = [
        (
            "Snapshots",
            ["job", "#rank", "of", "#newest step", "#saved", "#snapshots", "#bytes"],
            [
                [
                    _job(one.about.job),
                    f"{one.about.rank} of {one.about.world_size}",
                    "this node" if one.about.origin == LOCAL else one.about.origin,
                    str(one.about.step),
                    _ago(one.about.began / 1e9),
                    str(one.count),
                    readable(one.nbytes),
                ]
                for one in newest
            ],
        ),
        (
            "Buddies",
            ["at", "#last answer", "#snapshots there", "#copied", "#copies that failed", "trouble"],
            [one.cells() for one in buddies],
        ),
    ]
    server.show(f"keeper {name}", lines, tables, _series(held, own, copies, clients, tallies, newest, buddies))


def _series(
    held: Generations[Any],
    own: list[Kept[Any]],
    copies: list[Kept[Any]],
    clients: int,
    tallies: Tallies,
    newest: list[_Newest],
    buddies: list[_Buddy],
) -> list[tuple[str, bool, str, _Rows]]:
    def one(name: str, value: float, about: str) -> tuple[str, bool, str, _Rows]:
        return f"keeper_{name}", name.endswith("_total"), about, [([], float(value))]

    def each(name: str, label: str, about: str, rows: Iterable[tuple[str, float]]) -> tuple[str, bool, str, _Rows]:
        labelled: _Rows = [([(label, text)], float(value)) for text, value in rows]
        return f"keeper_{name}", name.endswith("_total"), about, labelled

    def by_series(name: str, about: str, value: Any) -> tuple[str, bool, str, _Rows]:
        rows: dict[tuple[str, str], float] = {}
        for found in newest:
            if found.about.origin == LOCAL:
                label = _job(found.about.job), str(found.about.rank)
                rows[label] = max(rows.get(label, 0.0), float(value(found.about)))
        return f"keeper_{name}", False, about, [([("job", job), ("rank", rank)], rows[job, rank]) for job, rank in rows]

    series = [
        one("memory_used_bytes", held.used, "Memory of the snapshots, and what is promised to those on their way."),
        one("memory_limit_bytes", held.limit, "Memory that the keeper may hold."),
        one("clients", clients, "Processes of the node that are connected."),
        each("snapshots", "origin", "Snapshots held.", [("own", len(own)), ("buddy", len(copies))]),
        each(
            "snapshot_bytes",
            "origin",
            "Their memory.",
            [(origin, sum(kept.nbytes for kept in of)) for origin, of in (("own", own), ("buddy", copies))],
        ),
        each("kept_total", "origin", "Snapshots kept.", [("own", tallies.kept), ("buddy", tallies.copied)]),
        one("evicted_total", tallies.evicted, "Snapshots that have gone."),
        each("refused_total", "reason", "Snapshots of trainers that were refused.", tallies.refused.items()),
        by_series("newest_step", "The step of the newest snapshot.", lambda about: about.step),
        by_series("newest_timestamp_seconds", "When its save began.", lambda about: about.began / 1e9),
        each("buddy_up", "buddy", "1 if the buddy has answered.", [(one.host, one.is_up) for one in buddies]),
        each("buddy_snapshots", "buddy", "Snapshots it has.", [(one.host, one.snapshots) for one in buddies]),
        each("copied_bytes_total", "buddy", "Bytes copied from it.", [(one.host, one.nbytes) for one in buddies]),
        each("copy_failures_total", "buddy", "Copies that failed.", [(one.host, one.failures) for one in buddies]),
        each(
            "buddy_answer_timestamp_seconds",
            "buddy",
            "When it answered last.",
            [(one.host, one.heard_at) for one in buddies if one.heard_at is not None],
        ),
    ]
    if tallies.last_kept is not None:
        series.append(one("last_kept_timestamp_seconds", tallies.last_kept, "When a trainer's snapshot was kept last."))
    # A name without a row would be no series.
    return [found for found in series if found[3]]


@dataclass(frozen=True)
class _Buddy:
    """What is known of a buddy."""

    host: str
    is_up: bool
    snapshots: int
    nbytes: int
    failures: int
    heard_at: float | None
    error: str

    @classmethod
    def of(cls, partner: Partner) -> _Buddy:
        status = partner.status()
        return cls(
            host=status["host"],
            is_up=not status["error"] and partner.heard_at is not None,
            snapshots=status["snapshots"],
            nbytes=status["copied_bytes"],
            failures=status["copy_failures"],
            heard_at=partner.heard_at,
            error=status["error"],
        )

    def cells(self) -> list[str]:
        heard = "never" if self.heard_at is None else _ago(self.heard_at)
        return [self.host, heard, str(self.snapshots), readable(self.nbytes), str(self.failures), self.error or "-"]


def _newest(kept: Iterable[Kept[Any]]) -> list[_Newest]:
    """Returns the newest snapshot of each job, rank and origin, of at most ``_MOST_SERIES``: those saved last.

    They are in the order of jobs and ranks, those of this node's trainers first.
    """
    found: dict[Any, list[Kept[Any]]] = {}
    for one in kept:
        found.setdefault((one.about.series, one.about.origin), []).append(one)
    newest = [
        _Newest(max(of, key=lambda one: one.about.began).about, len(of), sum(one.nbytes for one in of))
        for of in found.values()
    ]
    newest = sorted(newest, key=lambda one: one.about.began, reverse=True)[:_MOST_SERIES]
    return sorted(newest, key=lambda one: (one.about.origin != LOCAL, one.about.job, one.about.rank))


def _job(job: str) -> str:
    """Returns the name of a job, of a folder its last part."""
    return PurePath(job).name or job


def _ago(at: float) -> str:
    seconds = max(time.time() - at, 0.0)
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"
