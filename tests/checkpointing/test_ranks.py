"""Ranks that save together: what is incomplete is refused, and all load the save that they have agreed on."""

from __future__ import annotations

import time

import pytest
import torch

from checkpoint_loads import load_state, save_states
from keepers import KeeperAtWork, offered
from tensorferry import SourceChanged, TensorferryError
from tensorferry.checkpointing import Keeper
from tensorferry.errors import IncompleteCheckpoint
from tensorferry.storage.folder import read_index
from thread_ranks import checkpointers_of, on_all

pytestmark = pytest.mark.process


class Ranks:
    """Two ranks in this process."""

    def __init__(self, *keepers: str) -> None:
        self.both = checkpointers_of(2)
        for one, name in zip(self.both, keepers, strict=False):
            one._keeper = Keeper(name)

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
    with KeeperAtWork(folder, name="node0"), KeeperAtWork(folder, name="node1") as lost:
        fields = {"save_id": "a" * 12, "world_size": 2, "began": time.time_ns(), "step": 2}
        for rank in range(2):
            with Keeper(f"node{rank}") as keeper:
                offered(keeper, {"w": torch.full((1000,), 2.0)}, str(path), rank=rank, **fields)
        ranks = Ranks("node0", "node1")
        assert ranks.latest(tmp_path / "run") == [str(path)] * 2
        assert value(ranks.both[0], path) == 2
        lost.kill()
        with pytest.raises(TensorferryError, match="call latest"):
            value(ranks.both[1], path)
        ranks = Ranks("node0", "node1")
        assert ranks.latest(tmp_path / "run") == [str(path)] * 2
        assert [value(one, path) for one in ranks.both] == [1, 1]


def test_each_rank_loads_its_own_state_and_none_what_lacks_the_file_of_one(tmp_path):
    save_states(tmp_path / "c", [{"rank": rank} for rank in range(2)])
    for rank, expected in ((0, 0), (1, 1), (2, 0)):
        assert load_state(tmp_path / "c", rank=rank, world_size=2 if rank < 2 else 3)["rank"] == expected
    name = read_index(tmp_path / "c").files[1][0]
    (tmp_path / "c" / name).unlink()
    with pytest.raises(IncompleteCheckpoint, match=name):
        load_state(tmp_path / "c", rank=0, world_size=2)


def test_all_ranks_hear_that_the_first_one_cannot_find_the_latest(tmp_path):
    (tmp_path / "file").write_text("")
    ranks = Ranks()
    first, other = on_all(2, lambda rank: ranks.both[rank].latest(tmp_path / "file"))
    assert "is a file" in str(first)
    assert "rank 0 cannot find the newest checkpoint: InvalidArgument" in str(other)
