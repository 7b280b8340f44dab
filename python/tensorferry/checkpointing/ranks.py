"""The processes that save together, and what they agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import _validate
from ..errors import InvalidArgument
from ..state.ranks import WITHOUT_NUMPY, lack_numpy
from ..storage.folder_save import SaveId
from ..storage.places import AnyPlace
from ..storage.series import KnownSaves

#: Seconds that a store may take to say which checkpoints lie beside a new one: trainers stand still meanwhile.
_ASK_S = 5.0


class Ranks:
    """The processes that save together.

    Args:
        rank: the rank of this process; by default that of ``torch.distributed``, or 0 without it
        world_size: how many there are; likewise
        agree: returns on every rank what rank 0 passes to it; by default a broadcast of ``torch.distributed``
        group: the process group of the broadcast

    Raises:
        InvalidArgument: the arguments do not make sense, or several ranks have no way to agree
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        agree: Callable[[Any], Any] | None = None,
        group: Any = None,
    ) -> None:
        dist = torch.distributed
        started = dist.is_available() and dist.is_initialized()
        if (rank is None) != (world_size is None):
            raise InvalidArgument("rank and world_size go together")
        if rank is None or world_size is None:
            rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if started else (0, 1)
        self.world_size = _validate.integer("world_size", world_size, 1)
        self.rank = _validate.integer("rank", rank, 0, self.world_size - 1)
        self._agree = _validate.function("agree", agree)
        self._group = group
        self._saves = KnownSaves(_ASK_S)
        if self.world_size > 1 and agree is None and not (started and dist.get_world_size(group) == self.world_size):
            raise InvalidArgument(
                f"{self.world_size} ranks have to agree on each save: initialise torch.distributed with as many, or "
                "pass agree=, a function that returns on every rank what rank 0 passes to it"
            )

    def new_save(self, step: int | None, folder: AnyPlace, known: Iterable[int] = ()) -> SaveId:
        """Returns the id of a new save into ``folder``, after agreeing on it with all other ranks.

        It begins after the saves that rank 0 finds in the folder and in the folders of its series; where a store does
        not tell of them within seconds, by the clock. All ranks have to call it, as :meth:`gather` and
        :meth:`from_first`.

        Args:
            step: the number that the caller gave the state
            folder: the folder
            known: when other saves began after which it is to begin; those that rank 0 passes count

        Raises:
            InvalidArgument: ``torch.distributed`` cannot collect without NumPy, which is not installed
            Exception: what ``agree`` or the process group raises
        """
        if self.rank != 0:
            own = SaveId.new(self.rank, self.world_size, step)
        else:
            own = SaveId.new(0, self.world_size, step, [*self._saves.beginnings(folder), *known])
            self._saves.add(own.began)
        if self.world_size == 1:
            return own
        agreed = self.from_first([own.save, own.began])
        return SaveId(str(agreed[0]), int(agreed[1]), self.rank, self.world_size, step)

    def gather(self, value: Any) -> list[Any] | None:
        """Returns what each rank passes, by rank; ``None`` where ranks agree by a function, which cannot collect."""
        if self.world_size == 1:
            return [value]
        if self._agree is not None:
            return None
        self._check_numpy()
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def _check_numpy(self) -> None:
        if lack_numpy(self._group):
            raise InvalidArgument(WITHOUT_NUMPY)

    def from_first(self, value: Any) -> Any:
        """Returns on every rank what rank 0 passes."""
        if self.world_size == 1:
            return value
        if self._agree is not None:
            return self._agree(value)
        self._check_numpy()
        dist = torch.distributed
        values = [value]
        first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        dist.broadcast_object_list(values, src=first, group=self._group)
        return values[0]
