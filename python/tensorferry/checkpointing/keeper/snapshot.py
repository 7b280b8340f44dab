"""The description of a snapshot in a keeper, whose it is, and which one a load takes."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ... import _validate
from ...errors import IncompleteCheckpoint, InvalidArgument, ProtocolError
from ...storage.folder import Index
from ...storage.peers import publication_metadata
from ...storage.places import place_of

#: Longest text, as it stands in a message: a path of the file system has up to 4096 bytes.
_LONGEST = 8192
_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_RANKS = 1 << 24
#: The latest time of a save, and the most memory of a snapshot: a few of them can be added up in 64 bits.
_MOST = 1 << 62
#: Where a snapshot comes from that a trainer of this node gave.
LOCAL = "local"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
#: What names a snapshot: its job, where its path is, the path, the save, the rank and how many ranks there are.
Key = tuple[str, str, str, str, int, int]


@dataclass(frozen=True)
class Snapshot:
    """A kept snapshot.

    Attributes:
        job: snapshots of one job and rank replace each other. It was chosen, or is the folder in which that of the
            checkpoint lies
        path: where the checkpoint is, or would be, on disk
        save_id: the same for all ranks of a save, and for no other save
        rank: the trainer's number in its job
        world_size: how many trainers saved with it
        step: the number under which a receiver asks for it: that of the save, 0 without one
        began: when the save began, in nanoseconds since the epoch, by the clock of the trainer with rank 0
        nbytes: memory that it takes
        origin: ``"local"``, or the address of the keeper that it was copied from
        metadata: what a receiver is given to fetch it over HTTP; empty while it is not served
        complete: whether the snapshots of all ranks of this save are known here
        remote: whether another keeper holds it, and this one does not
        location: tells the folder above ``path`` from any other that has the same path, see :func:`location_of`
    """

    job: str
    path: str
    save_id: str
    rank: int
    world_size: int
    step: int
    began: int
    nbytes: int = 0
    origin: str = LOCAL
    metadata: str = ""
    complete: bool = False
    remote: bool = False
    location: str = ""

    @property
    def save(self) -> tuple[str, str, str, int]:
        """What all ranks of a save have in common."""
        return self.job, self.path, self.save_id, self.world_size

    @property
    def key(self) -> Key:
        """What no other snapshot has."""
        return self.job, self.location, self.path, self.save_id, self.rank, self.world_size

    @property
    def owner(self) -> tuple[str, str]:
        """The job; one that was not given a name is that of a folder of one machine."""
        return self.job, self.location if self.job == default_job(self.path) else ""

    @property
    def series(self) -> tuple[str, str, int]:
        """What the snapshots that replace each other have in common."""
        return *self.owner, self.rank

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a message that describes it."""
        return asdict(self)


def default_job(path: str) -> str:
    """Returns the job of the checkpoint at ``path`` where none was chosen: the folder that its folder lies in."""
    return str(place_of(path).parent)


def location_of(path: str | os.PathLike[str]) -> str:
    """Returns 16 hexadecimal digits for the folder in which the checkpoint's folder ``path`` lies.

    They are the same in all processes and containers of this machine that have that very folder at this path. On
    another machine, and for another folder at the same path, they differ.
    """
    folder, missing = place_of(path).parent, []
    while not folder.exists():
        missing.append(folder.name)
        folder = folder.parent
    about = folder.stat()
    names = [_machine(), str(about.st_dev), str(about.st_ino), *missing]
    return hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()[:16]


@functools.cache
def _machine() -> str:
    """Returns what no other running system has; where the system does not say, each process has another."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return secrets.token_hex(16)


def snapshot(fields: Any) -> Snapshot:
    """Returns what ``fields``, of a message of a process that is not trusted, describe.

    Raises:
        ProtocolError: they do not describe a snapshot
    """
    if not isinstance(fields, dict):
        raise ProtocolError("a snapshot is not described")
    try:
        world_size = _validate.integer("world_size", fields.get("world_size"), 1, _MOST_RANKS)
        save_id = _text(fields, "save_id")
        if not _ID.fullmatch(save_id):
            raise InvalidArgument("save_id must be 1 to 64 letters, digits, '.', '_' or '-'")
        path = _text(fields, "path")
        if not path.startswith("/"):
            raise InvalidArgument("path must be absolute")
        step = fields.get("step")
        return Snapshot(
            job=_text(fields, "job"),
            path=path,
            save_id=save_id,
            rank=_validate.integer("rank", fields.get("rank"), 0, world_size - 1),
            world_size=world_size,
            step=0 if step is None else _validate.step_number(step),
            began=_validate.integer("began", fields.get("began"), 0, _MOST),
            nbytes=_validate.integer("nbytes", fields.get("nbytes", 0), 0, _MOST),
            origin=_text(fields, "origin", LOCAL),
            metadata=_text(fields, "metadata", ""),
            complete=fields.get("complete") is True,
            remote=fields.get("remote") is True,
            location=_text(fields, "location"),
        )
    except InvalidArgument as e:
        raise ProtocolError(f"a snapshot is not described: {e}") from e


def most_trusted(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """Returns each snapshot once: as this node's trainer gave it, else as the keeper has copied it, else a buddy's.

    A buddy may list a snapshot that this keeper holds, and say anything about it.
    """
    found: dict[tuple[str, str, str, int, int], Snapshot] = {}
    for one in sorted(snapshots, key=lambda one: (one.remote, one.origin != LOCAL)):
        found.setdefault((*one.save, one.rank), one)
    return list(found.values())


def choose(
    known: Iterable[Snapshot],
    index: Index | None,
    world_size: int,
    location: str,
    *,
    has_name: bool,
    agreed: str | None = None,
) -> Snapshot | None:
    """Returns the snapshot with which a rank loads the checkpoint at a path, ``None`` if it has to load from disk.

    All ranks take the same. What is committed on the disk decides, since all ranks see it: a snapshot of that very save
    is as good, wherever it comes from. Otherwise the path has to mean the folder where the snapshot was saved. Then one
    that began later is taken where there is one rank; and where nothing is committed, one if the snapshots of all ranks
    are known. The latter is also taken from another folder of this path if the job was given a name: that names what is
    one job.
    Ranks that have agreed on a save take that one and no other.

    Args:
        known: the snapshots of this job, path and rank
        index: the checkpoint on the disk, ``None`` if there is none
        world_size: how many ranks load
        location: that of the path here, see :func:`location_of`
        has_name: whether the job was given a name
        agreed: the id of the save that all ranks have agreed to load, if they have
    """
    candidates = most_trusted(one for one in known if one.world_size == world_size)
    for one in sorted(candidates, key=lambda one: one.began, reverse=True):
        if agreed is not None:
            if one.save_id == agreed:
                return one
        elif index is None:
            if one.complete and (has_name or one.location == location):
                return one
        elif one.save_id == index.save_id or (world_size == 1 and one.location == location and one.began > index.began):
            return one
    return None


def peer_metadata(snapshots: Iterable[Snapshot], job: str | None = None) -> str:
    """Returns the string with which a ``tensorferry.dcp.PeerReader`` loads what keepers hold.

    Args:
        snapshots: what :meth:`Keeper.held` of one keeper returned, or of the keepers of several nodes, together
        job: only those of this job; needed where several jobs have such a save

    Returns:
        The string for the newest save of which the snapshots of all ranks are among them.

    Raises:
        IncompleteCheckpoint: there is no such save
        InvalidArgument: there are such saves of several jobs
    """
    saves: dict[tuple[str, str, str, int], dict[int, Snapshot]] = {}
    for one in most_trusted(one for one in snapshots if one.metadata):
        if job is None or one.job == job:
            saves.setdefault(one.save, {})[one.rank] = one
    whole = [ranks for ranks in saves.values() if len(ranks) == ranks[min(ranks)].world_size]
    if not whole:
        raise IncompleteCheckpoint(
            f"of none of the {len(saves)} saves in the keepers there are the snapshots of all ranks: ask the keepers "
            "of all nodes, or wait for the next save"
        )
    if len({ranks[0].owner for ranks in whole}) > 1:
        jobs = ", ".join(sorted({ranks[0].job for ranks in whole}))
        raise InvalidArgument(
            f"the keepers hold saves of several jobs, {jobs}: pass the job= to load, and give those with the same path "
            "a name each, with Keeper(job=...)"
        )
    newest = max(whole, key=lambda ranks: ranks[0].began)
    return publication_metadata(newest[0].step, [newest[rank].metadata for rank in sorted(newest)])


def _text(fields: dict[str, Any], name: str, default: str | None = None) -> str:
    text = _validate.string(name, fields.get(name, default))
    if len(json.dumps(text)) > _LONGEST or not text.isprintable() or not (text or default == ""):
        raise InvalidArgument(f"{name} must be a text of printable characters, neither empty nor longer than a path")
    return text
