"""Two ranks of ``torch.distributed`` save together: what the index says of DTensors, and a rank that fails."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint_files import tensors_of
from checkpoint_ranks import ranks_of
from tensorferry.checkpointing import AsyncCheckpointer
from tensorferry.errors import IncompleteCheckpoint, UnsupportedLeaf
from tensorferry.storage.folder import read_index

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
