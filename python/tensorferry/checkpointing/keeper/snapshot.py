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

#: Longest text, as it stands in a message: a path of the file system has up to 4096 bytes.
_LONGEST = 8192
#: An id.
_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_RANKS = 1 << 24
#: Where a snapshot comes from that a trainer of this node gave.
LOCAL = "local"


@dataclass(frozen=True)
class Snapshot:
    """A kept snapshot.

    Attributes:
        job: snapshots of one job and rank replace each other
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

    @property
    def save(self) -> tuple[str, str]:
        """What all ranks of a save have in common."""
        return self.job, self.save_id

    @property
    def key(self) -> tuple[str, str, int]:
        """What no other snapshot has."""
        return self.job, self.save_id, self.rank

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a message that describes it."""
        return asdict(self)

    def served(self, metadata: str, nbytes: int, step: int) -> Snapshot:
        """Returns it as it is served."""
        return replace(self, metadata=metadata, nbytes=nbytes, step=step)


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
        step = fields.get("step")
        return Snapshot(
            job=_text(fields, "job"),
            path=_text(fields, "path"),
            save_id=save_id,
            rank=_validate.integer("rank", fields.get("rank"), 0, world_size - 1),
            world_size=world_size,
            step=-1 if step is None else _validate.step_number(step),
            began=_validate.integer("began", fields.get("began"), 0),
            nbytes=_validate.integer("nbytes", fields.get("nbytes", 0), 0),
            origin=_text(fields, "origin", LOCAL),
            metadata=_text(fields, "metadata", ""),
            complete=fields.get("complete") is True,
            remote=fields.get("remote") is True,
        )
    except InvalidArgument as e:
        raise ProtocolError(f"a snapshot is not described: {e}") from e


def peer_metadata(snapshots: Iterable[Snapshot]) -> str:
    """Returns the string with which a ``tensorferry.dcp.PeerReader`` loads what keepers hold.

    Args:
        snapshots: what :meth:`Keeper.held` of one keeper returned, or of the keepers of several nodes, together

    Returns:
        The string for the newest save of which the snapshots of all ranks are among them.

    Raises:
        IncompleteCheckpoint: there is no such save
        InvalidArgument: the ranks of such a save are served as different steps
    """
    saves: dict[tuple[str, str], dict[int, Snapshot]] = {}
    for one in snapshots:
        if one.metadata:
            saves.setdefault(one.save, {})[one.rank] = one
    whole = [ranks for ranks in saves.values() if len(ranks) == next(iter(ranks.values())).world_size]
    if not whole:
        raise IncompleteCheckpoint(
            f"of none of the {len(saves)} saves in the keepers there are the snapshots of all ranks: ask the keepers "
            "of all nodes, or wait for the next save"
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
