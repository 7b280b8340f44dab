"""Ranks of one job in threads of one process, which agree on saves without ``torch.distributed``."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from tensorferry.checkpointing import SyncCheckpointer, checkpointers
from tensorferry.checkpointing.ranks import Ranks


class Meeting:
    """What ranks have said, by the number of the call."""

    def __init__(self) -> None:
        self._said: dict[int, dict[int, Any]] = defaultdict(dict)
        self._changed = threading.Condition()

    def exchange(self, number: int, rank: int, value: Any, speakers: list[int]) -> list[Any]:
        with self._changed:
            said = self._said[number]
            said[rank] = value
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: all(one in said for one in speakers), 60), "a rank says nothing"
            return [said[one] for one in speakers]


class ThreadRanks(Ranks):
    def __init__(self, rank: int, world_size: int, meeting: Meeting) -> None:
        super().__init__(0, 1)
        self.rank, self.world_size = rank, world_size
        self._meeting, self._calls = meeting, itertools.count()

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.exchange(next(self._calls), self.rank, value, list(range(self.world_size)))

    def from_first(self, value: Any) -> Any:
        return self._meeting.exchange(next(self._calls), self.rank, value, [0])[0]


def checkpointers_of(world_size: int, kind: Any = SyncCheckpointer, **options: Any) -> list[Any]:
    """Makes the checkpointer of each rank."""
    meeting = Meeting()

    def make(rank: int) -> Any:
        with mock.patch.object(checkpointers, "Ranks", return_value=ThreadRanks(rank, world_size, meeting)):
            return kind(**options)

    return [make(rank) for rank in range(world_size)]


def on_all(world_size: int, work: Any) -> list[Any]:
    """Calls ``work`` with each rank on a thread of its own; returns what each returned or raised."""

    def one(rank: int) -> Any:
        try:
            return work(rank)
        except Exception as e:
            return e

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))
