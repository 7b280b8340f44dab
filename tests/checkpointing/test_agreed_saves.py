"""Ranks that have agreed on a save by ``latest`` load that save, or none."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch

from keepers import KeeperAtWork, offered
from tensorferry import SourceChanged, TensorferryError
from tensorferry.checkpointing import Keeper, SyncCheckpointer

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


class Ranks:
    """Two ranks in this process, which agree through a queue."""

    def __init__(self, **options) -> None:
        said: queue.Queue = queue.Queue()

        def say(value):
            said.put(value)
            return value

        def hear(_):
            return said.get(timeout=60)

        self.both = [SyncCheckpointer(rank=rank, world_size=2, agree=(say, hear)[rank], **options) for rank in range(2)]

    def do(self, what):
        """Returns what both ranks return; raises what one of them raises."""
        found: dict = {}

        def run(rank):
            try:
                found[rank] = what(self.both[rank])
            except BaseException as e:
                found[rank] = e

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in found.values():
            if isinstance(one, BaseException):
                raise one
        return [found[0], found[1]]

    def save(self, path, value) -> None:
        self.do(lambda one: one.save(path, {"w": torch.full((1000,), float(value))}, step=value))

    def latest(self, folder):
        return self.do(lambda one: one.latest(folder))


def value(checkpointer, path) -> float:
    return float(checkpointer.load(path)["w"][0])


def test_a_save_that_replaces_it_is_not_loaded_by_one_rank_alone(tmp_path):
    path = tmp_path / "run" / "last"
    ranks, others = Ranks(), Ranks()
    others.save(path, 1)
    assert ranks.latest(tmp_path / "run") == [str(path)] * 2
    assert value(ranks.both[0], path) == 1
    others.save(path, 2)
    with pytest.raises(SourceChanged, match="call latest"):
        value(ranks.both[1], path)
    assert ranks.latest(tmp_path / "run") == [str(path)] * 2
    assert [value(one, path) for one in ranks.both] == [2, 2]
    # The agreement is about one load.
    others.save(path, 3)
    assert [value(one, path) for one in ranks.both] == [3, 3]
    ranks.latest(tmp_path / "run")
    ranks.save(path, 4)
    assert [value(one, path) for one in ranks.both] == [4, 4]


def test_a_snapshot_that_is_lost_is_not_replaced_by_what_is_on_the_disk(folder, tmp_path):
    path = tmp_path / "run" / "last"
    Ranks().save(path, 1)
    with KeeperAtWork(folder) as process:
        with Keeper() as keeper:
            state = {"w": torch.full((1000,), 2.0)}
            fields = {"save_id": "a" * 12, "world_size": 2, "began": time.time_ns(), "step": 2}
            for rank in range(2):
                offered(keeper, state, str(path), rank=rank, **fields)
        ranks = Ranks(keeper="default")
        assert ranks.latest(tmp_path / "run") == [str(path)] * 2
        assert value(ranks.both[0], path) == 2
        process.kill()
        with pytest.raises(TensorferryError, match="call latest"):
            value(ranks.both[1], path)
        ranks = Ranks()
        assert ranks.latest(tmp_path / "run") == [str(path)] * 2
        assert [value(one, path) for one in ranks.both] == [1, 1]
