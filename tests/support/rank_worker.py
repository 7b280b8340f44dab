"""What one rank of a job with DTensors does: :func:`main`.

``save`` saves and loads; ``save-below`` saves the same below the key ``model``; ``load`` loads; ``keep`` saves with a
keeper, and kills itself; ``fetch`` loads with a ``PeerReader`` what the environment variable ``KEPT`` names.
"""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tensorferry.checkpointing import SyncCheckpointer
from tensorferry.dcp import PeerReader

#: By name the whole tensor, and how each of the two jobs places it.
TENSORS = {
    "rows": (torch.arange(70.0).reshape(10, 7), Shard(0), Shard(1)),
    "columns": (torch.arange(800.0).reshape(2, 400), Shard(1), Shard(0)),
    "replicated": (torch.arange(12.0).reshape(3, 4), Replicate(), Shard(0)),
    "whole": (torch.arange(9.0).to(torch.bfloat16), Shard(0), Replicate()),
    "uneven": (torch.arange(5), Shard(0), Shard(0)),
}


#: Saved as a ShardedTensor; each rank has some rows of the upper half and some of the lower one.
SHARDED = torch.arange(120.0).reshape(24, 5)
#: Saved as a plain tensor, and loaded into a DTensor.
PLAIN = torch.arange(42.0).reshape(6, 7)


def sharded(blank: bool) -> ShardedTensor:
    rank, rows = dist.get_rank(), 12 // dist.get_world_size()
    shards = []
    for start in (rank * rows, 12 + rank * rows):
        local = SHARDED[start : start + rows].clone()
        about = ShardMetadata([start, 0], [rows, 5], f"rank:{rank}/cpu")
        shards.append(LocalShard(local.zero_() if blank else local, about))
    return init_from_local_shards(shards, *SHARDED.shape)


def check_others(asked: dict) -> None:
    for shard in asked["sharded"].local_shards():
        start = shard.metadata.shard_offsets[0]
        assert torch.equal(shard.tensor, SHARDED[start : start + shard.tensor.shape[0]]), shard.tensor
    if isinstance(asked["to spread"], DTensor):
        assert torch.equal(asked["to spread"].full_tensor(), PLAIN)


def state(which: int, mesh: object, blank: bool) -> dict:
    rank = dist.get_rank()
    spread = distribute_tensor(torch.zeros_like(PLAIN), mesh, [Shard(0)]) if blank else PLAIN.clone()
    tensors = {
        name: distribute_tensor(torch.zeros_like(value[0]) if blank else value[0], mesh, [value[1 + which]])
        for name, value in TENSORS.items()
    }
    tensors |= {"sharded": sharded(blank), "to spread": spread}
    return {**tensors, "plain": torch.full((3,), float(-1 if blank else rank)), "note": -1 if blank else rank}


def load(checkpointer: SyncCheckpointer, folder: str, asked: dict) -> None:
    rank, given = dist.get_rank(), dict(asked)
    checkpointer.load(folder, asked, strict=True)
    for name, (value, *_) in TENSORS.items():
        found = asked[name]
        assert found is given[name]
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), value), (name, found.full_tensor())
    check_others(asked)
    expected = rank if rank < 2 else 0
    assert asked["plain"].tolist() == [float(expected)] * 3
    assert asked["note"] == expected


def fetch() -> None:
    for which in (0, 1):
        asked = state(which, init_device_mesh("cpu", (dist.get_world_size(),)), True)
        given = dict(asked)
        dcp.load(asked, storage_reader=PeerReader(os.environ["KEPT"]))
        for name, (value, *_) in TENSORS.items():
            assert asked[name] is given[name]
            assert torch.equal(asked[name].full_tensor(), value), (name, asked[name].full_tensor())
        check_others(asked)
        # What is not spread over ranks is the first rank's.
        assert (asked["plain"].tolist(), asked["note"]) == ([0.0] * 3, 0)


def main(rank: int, what: str, world: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}-{what}-{world}.store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    if what == "fetch":
        fetch()
        dist.barrier()
        dist.destroy_process_group()
        return
    checkpointer = SyncCheckpointer(keeper="default" if what == "keep" else None)
    if what == "keep":
        checkpointer.save(folder, state(0, mesh, False))
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "save":
        checkpointer.save(folder, state(0, mesh, False))
        dist.barrier()
        load(checkpointer, folder, state(0, mesh, True))
    if what == "save-below":
        checkpointer.save(folder, {"model": state(0, mesh, False), "rows": distribute_tensor(PLAIN, mesh, [Shard(0)])})
    else:
        load(checkpointer, folder, state(1, mesh, True))
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()
