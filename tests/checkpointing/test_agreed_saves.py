"""Ranks that have agreed on a save by ``latest`` load that save, or none."""

from __future__ import annotations

import time

import pytest
import torch

from keepers import KeeperAtWork, offered
from tensorferry import SourceChanged, TensorferryError
from tensorferry.checkpointing import Keeper
from thread_ranks import checkpointers_of, on_all

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


class Ranks:
    """Two ranks in this process."""

    def __init__(self, **options) -> None:
        self.both = checkpointers_of(2, **options)

    def do(self, what):
        """Returns what both ranks return; raises what one of them raises."""
        found = on_all(2, lambda rank: what(self.both[rank]))
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found

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
