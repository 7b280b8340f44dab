"""The processes that save together, and what they agree on."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch

from .. import _validate
from ..errors import InvalidArgument, TensorferryError
from ..state.together import Together
from ..storage import commits
from ..storage.folder import INDEX
from ..storage.folder_save import SaveId
from ..storage.objects.place import ObjectPlace
from ..storage.places import AnyPlace, begun

#: Seconds that a store may take to say what is in the folder of a new save: trainers stand still meanwhile.
_ASK_S = 5.0
_AGREE = "agree on a checkpoint"


class Ranks:
    """The processes that save together.

    Args:
        rank: the rank of this process; by default that of ``torch.distributed``, or 0 without it
        world_size: how many there are; likewise
        group: the process group in which they agree

    Raises:
        InvalidArgument: the arguments do not make sense, or ``torch.distributed`` has another number of ranks
    """

    def __init__(self, rank: int | None = None, world_size: int | None = None, group: Any = None) -> None:
        dist = torch.distributed
        started = dist.is_available() and dist.is_initialized()
        if (rank is None) != (world_size is None):
            raise InvalidArgument("rank and world_size go together")
        if rank is None or world_size is None:
            rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if started else (0, 1)
        self.world_size = _validate.integer("world_size", world_size, 1)
        self.rank = _validate.integer("rank", rank, 0, self.world_size - 1)
        self._group = group
        #: When the newest save began that this process knows of, and the lineage of what it has loaded, by parent.
        self._newest = 0
        self._lineages: dict[AnyPlace, str | None] = {}
        if self.world_size > 1 and not (started and dist.get_world_size(group) == self.world_size):
            raise InvalidArgument(
                f"{self.world_size} ranks have to agree on each save: initialise torch.distributed with as many"
            )

    def new_save(self, step: int | None, folder: AnyPlace) -> SaveId:
        """Returns the id of a new save into ``folder``, after agreeing on it with all other ranks.

        It begins after the save that rank 0 finds in the folder, and after those that this process has found, loaded or
        saved. All ranks have to call it, as :meth:`gather` and :meth:`from_first`.

        Args:
            step: the number that the caller gave the state
            folder: the folder

        Raises:
            RankFailed: as for :meth:`gather`
        """
        own = SaveId.new(self.rank, self.world_size, step)
        if self.rank == 0:
            asked = folder.begun(_ASK_S) if isinstance(folder, ObjectPlace) else folder
            known = [*commits.beginnings(asked / INDEX), self._newest]
            own = SaveId.new(0, self.world_size, step, known, self._lineages.get(folder.parent))
            self.note_beginning(own.began)
        if self.world_size == 1:
            return own
        agreed = self.from_first([own.save, own.began])
        return replace(own, save=str(agreed[0]), began=int(agreed[1]))

    def note_beginning(self, began: int) -> None:
        """Notes when a save began, for those that begin later."""
        self._newest = max(self._newest, began)

    def go_on_from(self, checkpoint: AnyPlace) -> None:
        """Notes that the state of a checkpoint was loaded: what is saved beside it is of its lineage."""
        if self.rank == 0:
            with contextlib.suppress(TensorferryError):
                commit = commits.files_of(begun(checkpoint) / INDEX)
                self.note_beginning(commit.began)
                self._lineages[checkpoint.parent] = commit.lineage

    def gather(self, value: Any) -> list[Any]:
        """Returns what each rank passes, by rank: over the store of the process group, whatever its backend.

        Raises:
            RankFailed: a rank did not come before the time-out of the group; the message names it
        """
        return [value] if self.world_size == 1 else Together(self._group).every(_AGREE, lambda: value)

    def from_first(self, value: Any) -> Any:
        """Returns on every rank what rank 0 passes; the ranks agree as in :meth:`gather`."""
        if self.world_size == 1:
            return value
        return Together(self._group).step(_AGREE, lambda: value, lambda values: values[0])
