"""One rank of a job with DTensors: ``rank_worker.py save|load rank world folder``. Both load, ``save`` saves before."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tensorferry.checkpointing import SyncCheckpointer

#: By name the whole tensor, and how each of the two jobs places it.
TENSORS = {
    "rows": (torch.arange(70.0).reshape(10, 7), Shard(0), Shard(1)),
    "columns": (torch.arange(800.0).reshape(2, 400), Shard(1), Shard(0)),
    "replicated": (torch.arange(12.0).reshape(3, 4), Replicate(), Shard(0)),
    "whole": (torch.arange(9.0).to(torch.bfloat16), Shard(0), Replicate()),
    "uneven": (torch.arange(5), Shard(0), Shard(0)),
}


def state(which: int, mesh: object, blank: bool) -> dict:
    rank = dist.get_rank()
    tensors = {
        name: distribute_tensor(torch.zeros_like(value[0]) if blank else value[0], mesh, [value[1 + which]])
        for name, value in TENSORS.items()
    }
    return {**tensors, "plain": torch.full((3,), float(-1 if blank else rank)), "note": -1 if blank else rank}


def load(checkpointer: SyncCheckpointer, folder: str, asked: dict) -> None:
    rank, given = dist.get_rank(), dict(asked)
    checkpointer.load(folder, asked, strict=True)
    for name, (value, *_) in TENSORS.items():
        found = asked[name]
        assert found is given[name]
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), value), (name, found.full_tensor())
    expected = rank if rank < 2 else 0
    assert asked["plain"].tolist() == [float(expected)] * 3
    assert asked["note"] == expected


def main(what: str, rank: int, world: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}-{what}-{world}.store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    checkpointer = SyncCheckpointer()
    if what == "save":
        checkpointer.save(folder, state(0, mesh, False))
        dist.barrier()
        load(checkpointer, folder, state(0, mesh, True))
    load(checkpointer, folder, state(1, mesh, True))
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
