"""The description of a snapshot in a keeper, as trainers on this node and keepers on others receive it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ... import _validate
from ...errors import IncompleteCheckpoint, InvalidArgument, ProtocolError
from ...storage.peers import publication_metadata
from ...storage.places import place_of

#: Longest text, as it stands in a message: a path of the file system has up to 4096 bytes.
_LONGEST = 8192
#: An id, and what ``location_of`` returns.
_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LOCATION = re.compile(r"[0-9a-f]{16}")
_MOST_RANKS = 1 << 24
#: The latest time of a save, and the most memory of a snapshot: a few of them can be added up in 64 bits.
_MOST = 1 << 62
#: Where a snapshot comes from that a trainer of this node gave.
LOCAL = "local"
#: What names a snapshot: its job, where its path is, the path, the save, the rank and how many ranks there are.
_KEY = ("job", "location", "path", "save_id", "rank", "world_size")
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
        step: the number under which a receiver asks for it
        began: when the save began, in nanoseconds since the epoch, by the clock of the trainer with rank 0
        nbytes: memory that it takes
        origin: ``"local"``, or the address of the keeper that it was copied from
        metadata: what a receiver is given to fetch it over HTTP; empty while it is not served
        complete: whether the snapshots of all ranks of this save are known here
        remote: whether another keeper holds it, and this one does not
        location: tells ``path`` from the same path on the disk of another machine, see ``location.location_of``
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
        """The job, of which one that was not given a name is another on each machine with a disk of its own."""
        return self.job, self.location if self.job == default_job(self.path) else ""

    @property
    def series(self) -> tuple[str, str, int]:
        """What the snapshots that replace each other have in common."""
        return *self.owner, self.rank

    def named(self) -> dict[str, Any]:
        """Returns the fields of a message that names it."""
        return dict(zip(_KEY, self.key, strict=True))

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a message that describes it."""
        return asdict(self)

    def served(self, metadata: str, nbytes: int, step: int) -> Snapshot:
        """Returns it as it is served."""
        return replace(self, metadata=metadata, nbytes=nbytes, step=step)


def default_job(path: str) -> str:
    """Returns the job of the checkpoint at ``path`` where none was chosen: the folder that its folder lies in."""
    return str(place_of(path).parent)


def key_of(fields: dict[str, Any]) -> Key | None:
    """Returns the key in a message with the fields of :meth:`Snapshot.named`; ``None`` if it names nothing."""
    job, location, path, save_id, rank, world_size = (fields.get(name) for name in _KEY)
    if all(type(text) is str for text in (job, location, path, save_id)) and type(rank) is type(world_size) is int:
        return job, location, path, save_id, rank, world_size  # type: ignore[return-value]  # just checked
    return None


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
        location = _validate.string("location", fields.get("location"))
        if not _LOCATION.fullmatch(location):
            raise InvalidArgument("location must be 16 hexadecimal digits")
        step = fields.get("step")
        return Snapshot(
            job=_text(fields, "job"),
            path=path,
            save_id=save_id,
            rank=_validate.integer("rank", fields.get("rank"), 0, world_size - 1),
            world_size=world_size,
            step=-1 if step is None else _validate.step_number(step),
            began=_validate.integer("began", fields.get("began"), 0, _MOST),
            nbytes=_validate.integer("nbytes", fields.get("nbytes", 0), 0, _MOST),
            origin=_text(fields, "origin", LOCAL),
            metadata=_text(fields, "metadata", ""),
            complete=fields.get("complete") is True,
            remote=fields.get("remote") is True,
            location=location,
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


def peer_metadata(snapshots: Iterable[Snapshot], job: str | None = None) -> str:
    """Returns the string with which a ``tensorferry.dcp.PeerReader`` loads what keepers hold.

    Args:
        snapshots: what :meth:`Keeper.held` of one keeper returned, or of the keepers of several nodes, together
        job: only those of this job; needed where several jobs have such a save

    Returns:
        The string for the newest save of which the snapshots of all ranks are among them.

    Raises:
        IncompleteCheckpoint: there is no such save
        InvalidArgument: there are such saves of several jobs; or the ranks of one are served as different steps
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
        jobs = sorted({ranks[0].job for ranks in whole})
        if len(jobs) > 1:
            raise InvalidArgument(f"the keepers hold saves of several jobs, {', '.join(jobs)}: pass the job= to load")
        raise InvalidArgument(
            f"the keepers hold saves of several jobs with the path {whole[0][0].path}, each on a disk of its own: give "
            "each a name, with Keeper(job=...)"
        )
    newest = max(whole, key=lambda ranks: ranks[0].began)
    if len(steps := {one.step for one in newest.values()}) > 1:
        raise InvalidArgument(
            f"the ranks of {newest[0].path} are served as different steps, {sorted(steps)}: pass step= to save()"
        )
    return publication_metadata(newest[0].step, [newest[rank].metadata for rank in sorted(newest)])


def _text(fields: dict[str, Any], name: str, default: str | None = None) -> str:
    text = _validate.string(name, fields.get(name, default))
    if len(json.dumps(text)) > _LONGEST or not text.isprintable() or not (text or default == ""):
        raise InvalidArgument(f"{name} must be a text of printable characters, neither empty nor longer than a path")
    return text
