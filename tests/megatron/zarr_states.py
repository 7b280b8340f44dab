"""A sharded state with everything that checkpoints of backend zarr had, for megatron-core 0.15 and later releases.

What is in ``tests/data/megatron`` was written by megatron-core 0.15.3, torch 2.8.0 and zarr below 3 on two ranks:
``dist_checkpointing.save(sharded_state(rank, 2, vocabulary=10), folder, (backend, 1))``.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from placed import digest

#: Written by megatron-core 0.15.3 with 10 rows of a vocabulary that is padded to 12.
WRITTEN = Path(__file__).resolve().parents[1] / "data" / "megatron" / "zarr-0.15"

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "bfloat16")
#: Key and shape of the tensors that are sharded; all dimensions can be divided by 1, 2 and 4.
SHARDED = {"rows": (8, 5), "columns": (6, 8), "layers": (4, 3, 8), "vocabulary": (12, 4)}
#: How many rows of the vocabulary there are before it is padded.
VOCABULARY = 10


def rank_and_world():
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def whole(key, dtype=torch.float32):
    """The whole tensor ``key``; every element says where it belongs."""
    shape = SHARDED.get(key, (3, 7))
    numbers = (torch.arange(math.prod(shape)) * 3 + len(key)) % 251
    return numbers.reshape(shape).to(dtype)


def sharded_state(rank, world, make=lambda part: part, vocabulary=SHARDED["vocabulary"][0]):
    """The state of a rank. ``make`` makes the data of each leaf from what it should be."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    def shard(key, part, *offsets, **options):
        return ShardedTensor.from_rank_offsets(key, make(part.contiguous()), *offsets, **options)

    state = {
        "rows": shard("rows", whole("rows").chunk(world)[rank], (0, rank, world)),
        "columns": shard("columns", whole("columns", torch.bfloat16).chunk(world, 1)[rank], (1, rank, world)),
        "layers": [
            shard("layers", whole("layers")[number], (0, number, 4), prepend_axis_num=1)
            for number in range(rank * 4 // world, (rank + 1) * 4 // world)
        ],
        "dtypes": {
            name: shard(f"dtypes.{name}", whole(name, getattr(torch, name)), replica_id=rank) for name in DTYPES
        },
        "objects": {
            "random": ShardedObject("random", {"rank": rank, "seed": torch.arange(rank + 3)}, (world,), (rank,)),
            "extra": ShardedObject("layers.extra_state", [1, "two", {"three": 3.0}], (1, 1), (0, 0), replica_id=rank),
        },
        "iteration": 7,
        "names": ["a", "b"],
    }
    rows = torch.zeros(vocabulary, 4)
    rows[: min(vocabulary, VOCABULARY)] = whole("vocabulary")[: min(vocabulary, VOCABULARY)]
    state["vocabulary"] = shard("vocabulary", rows.chunk(world)[rank], (0, rank, world), allow_shape_mismatch=True)
    return state


def expected(rank, world, vocabulary=SHARDED["vocabulary"][0]):
    """What a load of :func:`sharded_state` gives."""
    state = sharded_state(rank, world, vocabulary=vocabulary)

    def value(part):
        if isinstance(part, dict):
            return {key: value(one) for key, one in part.items()}
        if isinstance(part, list):
            return [value(one) for one in part]
        return part.data if hasattr(part, "replica_id") else part

    return value(state)


def differences(found, wanted):
    """What two states hold, if that differs."""
    return [] if digest(found) == digest(wanted) else [digest(found), digest(wanted)]
