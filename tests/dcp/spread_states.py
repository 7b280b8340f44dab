"""Random states whose tensors are spread over ranks in every way, and what the ranks of a job do with them.

A state is a list of :class:`Spread`; each rank makes its part of every tensor from the whole one, which all compute.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata, init_from_local_shards
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

from tensorferry import HTTPTransport
from tensorferry.checkpointing import AsyncCheckpointer, SyncCheckpointer
from tensorferry.dcp import FileReader, FileWriter, LoadPlanner, PeerReader, PeerWriter, SavePlanner
from tensorferry.errors import RankFailed

TIMEOUT = timedelta(seconds=60)
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]
#: Before torch 2.14, a _StridedShard divides evenly or not at all.
PLACEMENTS = ["Shard", "Shard", "Replicate", *(["_StridedShard"] if hasattr(dcp, "CheckpointableTensor") else [])]
#: What a target has before a load.
BLANK = 1

#: The meshes of a job of each size: their ranks, and their shapes.
MESHES = {
    1: [([0], (1,)), ([0], (1, 1))],
    2: [([0, 1], (2,)), ([1, 0], (2,)), ([1], (1,)), ([0, 1], (1, 2)), ([0, 1], (2, 1))],
    3: [([0, 1, 2], (3,)), ([2, 0, 1], (3,)), ([0, 1], (2,)), ([2, 1], (2,)), ([1], (1,)), ([0, 1, 2], (3, 1))],
    4: [
        *[([0, 1, 2, 3], shape) for shape in ((4,), (2, 2), (2, 2), (4, 1))],
        *[([3, 1, 0, 2], (4,)), ([1, 0, 3, 2], (2, 2)), ([0, 1], (2,)), ([3, 1], (2,)), ([2, 0, 1], (3,)), ([3], (1,))],
    ],
}


@dataclasses.dataclass(frozen=True)
class Spread:
    """A tensor and how its ranks have it.

    Attributes:
        shape: of the whole
        dtype: likewise
        kind: ``dtensor``, ``sharded``, ``hooks``, ``attributes`` or ``plain``
        mesh: ranks and shape of the mesh of a DTensor
        placements: its placements: class, dimension and split factor
        edges: the rows at which the parts of the ranks begin and end, if they are no DTensor's
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "plain"
    mesh: tuple[Any, ...] = ()
    placements: tuple[Any, ...] = ()
    edges: tuple[int, ...] = ()

    @property
    def has_gaps(self) -> bool:
        return any(one[0] == "_StridedShard" for one in self.placements)

    @property
    def is_seen_by_torch(self) -> bool:
        """Whether torch's planner saves it: a part with gaps is one box to it, and an empty part may hide another."""
        return not self.has_gaps and self.kind != "attributes"


def whole(name: str, spread: Spread) -> torch.Tensor:
    """The whole tensor, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    size = max(1, torch.Size(spread.shape).numel())
    values = torch.randint(2 if spread.dtype is not torch.bool else 0, 120, (size,), generator=generator)
    values = values % 2 if spread.dtype is torch.bool else values
    return values[: torch.Size(spread.shape).numel()].to(spread.dtype).reshape(spread.shape)


def random_spread(rng: random.Random, world: int, shape: tuple[int, ...], dtype: torch.dtype, saved: bool) -> Spread:
    """How a job of ``world`` ranks has a tensor; ``saved`` tells whether a checkpointer is to save it."""
    kinds = ["dtensor"] * 5 + ["plain", "sharded"] + ([] if saved else ["hooks"])
    kinds += ["attributes"] if hasattr(dcp, "CheckpointableTensor") else []
    kind = rng.choice(kinds) if shape and shape[0] else rng.choice(["plain", "dtensor"])
    if kind in ("sharded", "hooks", "attributes"):
        edges = sorted([0, shape[0], *(rng.randint(0, shape[0]) for _ in range(world - 1))])
        return Spread(shape, dtype, kind, (list(range(world)), (world,)), (), tuple(edges))
    if kind == "plain":
        return Spread(shape, dtype)
    ranks, size = rng.choice(MESHES[world])
    if not shape:
        return Spread(shape, dtype, kind, (tuple(ranks), size), (("Replicate", 0, 1),) * len(size))
    ways = [[rng.choice(PLACEMENTS), rng.randrange(len(shape)), rng.choice([1, 2, 2, 3])] for _ in size]
    return Spread(shape, dtype, kind, (tuple(ranks), size), tuple(map(tuple, ways)))


def random_states(seed: int, saving: int, loading: int) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """How a job saves some tensors, and how another one loads them."""
    rng = random.Random(seed)
    saved, asked = {}, {}
    for number in range(6):
        dims = rng.choice([1, 1, 2, 2, 3, 0])
        shape = tuple(rng.choice([0, 1, 2, 3, 5, 8, 13, 24]) if rng.random() < 0.9 else 300 for _ in range(dims))
        dtype = rng.choice(DTYPES)
        name = f"{seed}-{number}"
        saved[name] = random_spread(rng, saving, shape, dtype, True)
        asked[name] = random_spread(rng, loading, shape, dtype, False)
    return saved, asked


def placed(way: str, dim: int, factor: int) -> Any:
    if way == "Replicate":
        return Replicate()
    return Shard(dim) if way == "Shard" else _StridedShard(dim, split_factor=factor)


def mesh_of(kept: dict, ranks: Any, size: tuple[int, ...]) -> DeviceMesh:
    key = "mesh", tuple(ranks), size
    if key not in kept:
        kept[key] = DeviceMesh("cpu", torch.tensor(ranks).reshape(size))
    return kept[key]


def make(kept: dict, spread: Spread, value: torch.Tensor) -> Any:
    """This rank's part of ``value``."""
    value = value.clone()
    if spread.kind == "plain":
        return value
    mesh = mesh_of(kept, *spread.mesh)
    if spread.kind == "dtensor":
        return distribute_tensor(value, mesh, [placed(*one) for one in spread.placements], src_data_rank=None)
    rank = dist.get_rank()
    start, end = spread.edges[rank : rank + 2]
    rest = (0,) * (value.dim() - 1)
    local = value[start:end].clone()
    if spread.kind == "sharded":
        about = ShardMetadata([start, *rest], [*local.shape], f"rank:{rank}/cpu")
        return init_from_local_shards([LocalShard(local, about)] if end > start else [], *value.shape)
    if spread.kind == "attributes":
        buffer = torch.full((local.shape[0] + 2, *value.shape[1:]), BLANK, dtype=value.dtype)
        buffer[1:-1] = local
        buffer.global_shape, buffer.global_offsets = tuple(value.shape), ((start, *rest),)
        buffer.local_offsets, buffer.local_sizes = ((1, *rest),), (tuple(local.shape),)
        return buffer
    found = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())
    chunk = ChunkStorageMetadata(torch.Size((start, *rest)), local.shape)

    def items(fqn: str, itself: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local)
        data = TensorWriteData(chunk, properties, itself.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    # As Megatron-FSDP does.
    found._local_tensor.__create_chunk_list__ = lambda: [chunk]
    found._local_tensor.__create_write_items__ = items
    return found


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("no such thing")


def special(kept: dict, kind: str, blank: bool) -> dict[str, Any]:
    """A state with one tensor, ``w``, that not every door can take, or torch neither; ``ok`` is a plain one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    line = mesh_of(kept, range(world), (world,))
    pairs = [mesh_of(kept, pair, (2,)) for pair in ((0, 1), (2, 3))] if world == 4 else []
    rows = torch.full((12, 2), BLANK) if blank else torch.arange(24).reshape(12, 2) + 2
    own = rows if blank else rows * (rank // 2 + 1)
    match kind:
        case "partial":
            value: Any = DTensor.from_local(rows, line, [Partial()], run_check=False)
        case "uneven":
            part = rows[7 * rank : 7 + 5 * rank]
            value = DTensor.from_local(part, line, [Shard(0)], run_check=False, shape=rows.shape, stride=(2, 1))
        case "experts" | "twice":
            of = own if kind == "experts" else rows
            value = distribute_tensor(of, pairs[rank // 2], [Shard(0)], src_data_rank=None)
        case "two kinds":
            value = own if rank >= 2 else distribute_tensor(rows, pairs[0], [Shard(0)], src_data_rank=None)
        case "two shapes":
            value = distribute_tensor(rows[:6] if rank >= 2 else rows, pairs[rank // 2], [Shard(0)], src_data_rank=None)
        case "overlap":
            way = Shard(0) if rank < 2 else Replicate()
            value = distribute_tensor(rows, pairs[rank // 2], [way], src_data_rank=None)
        case "stages":
            # Of a pipeline: each stage has keys of its own.
            value = distribute_tensor(own, pairs[rank // 2], [Shard(0)], src_data_rank=None)
            return {f"stage {rank // 2}": {"w": value}}
        case "wrapper":
            # As TorchRec shards its tables.
            edges = [12 * n // (2 * world) for n in range(2 * rank, 2 * rank + 3)]
            parts = [rows[a:b].clone() for a, b in itertools.pairwise(edges)]
            local = LocalShardsWrapper(parts, [(edges[0], 0), (edges[1], 0)])
            value = DTensor.from_local(local, line, [Shard(0)], run_check=False, shape=rows.shape, stride=(2, 1))
        case "raising":
            value = Unpicklable() if rank == 1 else 1
        case "whole":
            value = rows
        case "rows" | "lacking":
            value = distribute_tensor(rows, line, [Shard(0)], src_data_rank=None)
    return {"ok": torch.full((3,), BLANK if blank else 9)} | ({} if kind == "lacking" and rank == 1 else {"w": value})


def state_of(kept: dict, spreads: dict[str, Spread] | str, blank: bool) -> dict[str, Any]:
    if isinstance(spreads, str):
        return special(kept, spreads, blank)
    found = {}
    for name, spread in spreads.items():
        value = whole(name, spread)
        found[name] = make(kept, spread, torch.full_like(value, BLANK) if blank else value)
    return found


def wait_for_one(kept: dict, door: str, folder: str) -> str:
    """Saves on all ranks but the second; returns the error."""
    if "short" not in kept:
        kept["short"] = dist.new_group(timeout=timedelta(seconds=1))
    group, state = kept["short"], special(kept, "whole", False)
    if dist.get_rank() == 1:
        return ""
    try:
        if door == "files alone":
            writer = FileWriter(folder, process_group=group)
            dcp.save(state, storage_writer=writer, process_group=group, use_collectives=False)
        else:
            with_closed(SyncCheckpointer(process_group=group), lambda made: made.save(folder, state))
    except RankFailed as e:
        return str(e)
    return "saved"


def memory(value: Any) -> list[torch.Tensor]:
    """The memory that this rank has of a tensor."""
    if isinstance(value, DTensor):
        local = value._local_tensor
        return local.local_shards() if isinstance(local, LocalShardsWrapper) else [local]
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value.detach()]


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names of the tensors that do not have the same elements on this rank."""
    names = []
    for name, value in expected.items():
        pair = memory(found[name]), memory(value)
        if len(pair[0]) != len(pair[1]) or not all(map(torch.equal, *pair)):
            names.append(f"{name}: {pair[0]} and not {pair[1]}")
    return names


def save(kept: dict, door: str, spreads: dict[str, Spread], folder: str) -> tuple[str, str]:
    """Saves a state; returns the metadata of what is served, and an error."""
    state = state_of(kept, spreads, False)
    metadata = ""
    alone = {"use_collectives": False} if door.endswith(" alone") else {}
    try:
        match door:
            case "sync":
                with_closed(SyncCheckpointer(patience=30), lambda made: made.save(folder, state))
            case "async":
                with_closed(AsyncCheckpointer(patience=30), lambda made: made.save(folder, state)[1].result(60))
            case "files" | "files alone":
                dcp.save(state, storage_writer=FileWriter(folder), **alone)
            case "files planned":
                dcp.save(state, storage_writer=FileWriter(folder), planner=SavePlanner())
            case "peers" | "peers alone":
                kept["server"] = PeerWriter(TIMEOUT, interface="127.0.0.1")
                dcp.save(state, storage_writer=kept["server"], **alone)
                metadata = kept["server"].metadata()
            case "torch":
                dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
            case "states":
                kept["server"] = HTTPTransport(TIMEOUT, interface="127.0.0.1")
                kept["server"].send_checkpoint([], 1, state, TIMEOUT)
                metadata = kept["server"].metadata()
    except BaseException as e:  # torch's CheckpointException is no Exception
        return metadata, f"{type(e).__name__}: {e}"
    return metadata, ""


def with_closed(made: Any, use: Any) -> None:
    try:
        use(made)
    finally:
        made.close()


def end(kept: dict) -> None:
    server = kept.pop("server", None)
    if server is not None:
        server.shutdown()


def load(kept: dict, door: str, spreads: dict[str, Spread], where: str) -> tuple[str, list[str]]:
    """Loads into a state; returns an error, and the tensors that differ, then from what they were before."""
    expected, asked, before = (state_of(kept, spreads, blank) for blank in (False, True, True))
    try:
        match door:
            case "sync" | "async":
                with_closed(SyncCheckpointer(), lambda made: made.load(where, asked, strict=True))
            case "files" | "files alone" | "torch":
                dcp.load(asked, storage_reader=FileReader(where))
            case "files planned":
                dcp.load(asked, storage_reader=FileReader(where), planner=LoadPlanner())
            case _:
                dcp.load(asked, storage_reader=PeerReader(where, timeout=TIMEOUT))
    except BaseException as e:
        return f"{type(e).__name__}: {e}", differing(asked, before)
    return "", differing(asked, expected)
