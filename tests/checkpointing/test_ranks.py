"""Two ranks of ``torch.distributed`` save together: what the index says of DTensors, and a rank that fails."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint_files import tensors_of
from checkpoint_loads import load_state, save_states
from checkpoint_ranks import ranks_of, run
from keepers import KeeperAtWork, offered
from rank_worker import SHARDED, TENSORS
from tensorferry import SourceChanged, TensorferryError
from tensorferry.checkpointing import AsyncCheckpointer, Keeper, latest_checkpoint
from tensorferry.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedLeaf
from tensorferry.storage.folder import read_index
from thread_ranks import checkpointers_of, on_all

pytestmark = pytest.mark.process


def save_and_fail(rank: int, root: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(20.0).reshape(5, 4)
    state = {"w": torch.full((100,), float(rank)), "sharded": distribute_tensor(whole, mesh, [Shard(0)])}
    checkpointer = AsyncCheckpointer()
    for step in range(3):
        checkpointer.save(f"{root}/a", state, step=step)[1].result(60)
    try:
        checkpointer.save(f"{root}/b", {"bad": threading.Lock()} if rank else state)[1].result(60)
    except UnsupportedLeaf:
        print("own", flush=True)
    except IncompleteCheckpoint as e:
        print("other" if "rank 1 has failed" in str(e) else e, flush=True)
    checkpointer.close()
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_two_ranks_agree_commit_and_fail_together(tmp_path) -> None:
    with ranks_of(2, save_and_fail, str(tmp_path)) as ranks:
        # Gloo of torch 2.8 writes to stdout too.
        said = [rank.end()[-1] for rank in ranks]
    assert said == ["other", "own"]
    index = read_index(tmp_path / "a")
    assert (index.world_size, index.step) == (2, 2)
    assert [tensors_of(tmp_path / "a", rank)["w"].unique().tolist() for rank in range(2)] == [[0.0], [1.0]]
    (sharded,) = index.shards.values()
    assert (sharded["dtype"], sharded["global_shape"]) == ("torch.float32", [5, 4])
    assert [(p["rank"], p["offsets"], p["shape"]) for p in sharded["parts"]] == [
        (0, [0, 0], [3, 4]),
        (1, [3, 0], [2, 4]),
    ]


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


def test_spread_tensors_are_put_together_for_other_ranks_and_placements(tmp_path):
    folder = tmp_path / "c"
    # With its own placements and with others, and then with another number of ranks.
    run("save", 2, folder)
    run("load", 3, folder)
    # In a process without ranks, every DTensor is whole.
    state = load_state(folder)
    for name, (value, *_) in TENSORS.items():
        assert torch.equal(torch.as_tensor(state[name]), value), name
    assert (state["note"], state["plain"].tolist()) == (0, [0, 0, 0])
    assert torch.equal(state["sharded"], SHARDED)
    asked = {name: torch.zeros_like(value[0]) for name, value in TENSORS.items()}
    asked["sharded"] = torch.zeros_like(SHARDED)
    load_state(folder, asked)
    assert torch.equal(asked.pop("sharded"), SHARDED)
    for name, (value, *_) in TENSORS.items():
        assert torch.equal(asked[name], value), name
    # Damage in the file of another rank is noticed by whoever reads it.
    file = folder / read_index(folder).files[1][0]
    data = bytearray(file.read_bytes())
    at = data.find(TENSORS["rows"][0][5:].contiguous().numpy().tobytes())
    data[at + 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint):
        load_state(folder, {"rows": torch.zeros(10, 7)})
    assert load_state(folder, {"note": None})["note"] == 0


def test_a_folder_that_lacks_the_file_of_a_rank_is_refused_by_all(tmp_path):
    save_states(tmp_path / "c", [{"rank": rank, "w": torch.full((4,), float(rank))} for rank in range(2)])
    for rank, expected in ((0, 0), (1, 1), (2, 0)):
        loaded = load_state(tmp_path / "c", rank=rank, world_size=2 if rank < 2 else 3)
        assert loaded["rank"] == expected
        assert loaded["w"].eq(expected).all()
    name = read_index(tmp_path / "c").files[1][0]
    (tmp_path / "c" / name).unlink()
    for rank in range(2):
        with pytest.raises(IncompleteCheckpoint, match=name):
            load_state(tmp_path / "c", rank=rank, world_size=2)
    assert latest_checkpoint(tmp_path) is None
