"""States whose values follow from their names, in many layouts over the ranks, and what jobs do with them."""

from __future__ import annotations

import functools
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
#: Rows and columns: divided evenly, unevenly, by fewer rows than ranks; long rows, whose parts are runs of their own.
SHAPES = [(24, 12), (13, 7), (3, 50), (5, 2000)]
TIMEOUT = timedelta(seconds=60)


def whole(name, dtype, shape):
    """Returns the tensor of that name, which is the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    size = dtype.itemsize * max(1, torch.Size(shape).numel())
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)[: torch.Size(shape).numel()].reshape(shape).clone()


@functools.cache
def layouts(world):
    """Returns meshes and placements for a job of that size, by name."""
    line = init_device_mesh("cpu", (world,))
    found = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "replicated": (line, [Replicate()]),
    }
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2))
        found |= {
            "rows-columns": (grid, [Shard(0), Shard(1)]),
            "columns-rows": (grid, [Shard(1), Shard(0)]),
            "replicated-rows": (grid, [Replicate(), Shard(0)]),
            "columns-replicated": (grid, [Shard(1), Replicate()]),
        }
    return found


def _sharded(value):
    """Returns the same tensor, sharded by rows over all ranks with torch's older class."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first, end = len(value) * rank // world, len(value) * (rank + 1) // world
    offsets = [first] + [0] * (value.dim() - 1)
    shard = TensorShard.from_tensor_and_offsets(value[first:end].clone(), offsets, rank)
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    return init_from_local_shards([shard], value.size()) if dist.is_initialized() else value


def state(turn, blank):
    """Returns every dtype and shape in placements chosen by ``turn``; zeros, to be overwritten, with ``blank``."""
    world = dist.get_world_size()
    kinds = list(layouts(world).items())
    found = {}
    for d, dtype in enumerate(DTYPES):
        for s, shape in enumerate(SHAPES):
            for k in range(3):
                name = f"{str(dtype).removeprefix('torch.')}-{'x'.join(map(str, shape))}-{k}"
                _, (mesh, placements) = kinds[(d * len(SHAPES) + s + turn + k) % len(kinds)]
                value = torch.zeros(shape, dtype=dtype) if blank else whole(name, dtype, shape)
                found[name] = distribute_tensor(value, mesh, placements, src_data_rank=None)
    for name, dtype, shape in (("sharded", torch.float32, (17, 5)), ("sharded-1d", torch.int64, (40,))):
        found[name] = _sharded(torch.zeros(shape, dtype=dtype) if blank else whole(name, dtype, shape))
    for name, shape in (("plain", (11, 3)), ("scalar", ()), ("nothing", (0, 4))):
        found[name] = torch.zeros(shape) if blank else whole(name, torch.float32, shape)
    found["object"] = {"text": ["a", None], "number": 0 if blank else 7, "deep": [{"x": (0 if blank else 3.5, "z")}]}
    return found


def local(value):
    """Returns the part of a tensor that is on this rank."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        return value.local_shards()[0].tensor
    return value


def same_bits(a, b):
    """Whether two tensors are equal to the last bit."""
    a, b = local(a), local(b)
    same = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    return same and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def compare(found, expected):
    """Returns the names of tensors and values that differ."""
    differ = [k for k, v in expected.items() if isinstance(v, torch.Tensor) and not same_bits(found[k], v)]
    return differ + [k for k, v in expected.items() if not isinstance(v, torch.Tensor) and found[k] != v]


def save(kept, turn, ours, theirs):
    """Saves the state of ``turn`` to files, also with torch's writer, and publishes it; returns the metadata."""
    held = state(turn, blank=False)
    dcp.save(held, storage_writer=FileWriter(ours))
    if theirs is not None:
        dcp.save(held, storage_writer=dcp.FileSystemWriter(theirs))
    writer = PeerWriter(TIMEOUT)
    dcp.save(held, storage_writer=writer)
    kept["writer"], kept["state"] = writer, held
    return writer.metadata()


def load(kept, turn, ours, theirs, metadata):
    """Loads what ``save`` saved into placements of ``turn``, from files and peers; returns what differs."""
    del kept
    expected = state(turn, blank=False)
    problems = []
    oracle = state(turn, blank=True)
    dcp.load(oracle, storage_reader=dcp.FileSystemReader(theirs))
    problems += [f"torch: {name}" for name in compare(oracle, expected)]
    readers = {
        "files": FileReader(ours),
        "torch's files": FileReader(theirs),
        "peers": PeerReader(metadata, timeout=TIMEOUT),
    }
    for kind, reader in readers.items():
        found = state(turn, blank=True)
        places = {name: local(value).data_ptr() for name, value in found.items() if isinstance(value, torch.Tensor)}
        dcp.load(found, storage_reader=reader)
        problems += [f"{kind}: {name}" for name in compare(found, oracle)]
        moved = [name for name, at in places.items() if local(found[name]).data_ptr() != at]
        problems += [f"{kind}: {name} is another tensor now" for name in moved]
    return problems


def end(kept):
    """Ends the publication that ``save`` began."""
    kept["writer"].withdraw()
    kept["writer"].shutdown()
