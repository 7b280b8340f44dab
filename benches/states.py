"""The shapes of training state that are measured, how each is built, and the digest that proves a copy equal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MIB = 1 << 20
GIB = 1 << 30
State = Any


def _filled(elements: int, seed: int) -> torch.Tensor:
    """Return float32 whose bits count up from `seed`: cheap to make, and a misplaced byte changes the digest."""
    tensor = torch.empty(elements, dtype=torch.float32)
    torch.arange(seed, seed + elements, dtype=torch.int32, out=tensor.view(torch.int32))
    return tensor


def _equal_tensors(count: int, nbytes: int, seed: int) -> State:
    elements = max(1, nbytes // 4)
    stride = min(elements, (1 << 30) // max(1, count))
    return {"user": {"model": {f"layer{i}.weight": _filled(elements, seed + i * stride) for i in range(count)}}}


class _Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        half = torch.bfloat16
        self.attention_norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width, dtype=half)
        self.out = torch.nn.Linear(width, width, dtype=half)
        self.mlp_norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width, dtype=half)
        self.down = torch.nn.Linear(4 * width, width, dtype=half)


class _Transformer(torch.nn.Module):
    """A decoder's parameters: embeddings and norms in float32, the wide matrices in bfloat16."""

    def __init__(self, vocabulary: int, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.positions = torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList(_Block(width) for _ in range(depth))
        self.norm = torch.nn.LayerNorm(width)


def _transformer(scale: float, seed: int) -> State:
    """Model, AdamW after one step and its schedule: 81 million parameters at scale 1, in torchft's wrapping."""
    width = max(32, int(640 * scale**0.5) // 32 * 32)
    with torch.device("meta"):  # initial values are replaced below, so computing them would only cost time
        model = _Transformer(max(64, int(32_000 * scale)), width, depth=12, context=1024)
    model.to_empty(device="cpu")
    for i, parameter in enumerate(model.parameters()):
        torch.linspace(-1.0, 1.0 + seed, parameter.numel(), out=parameter.data.view(-1))
        parameter.grad = torch.full_like(parameter, 1e-3 * (seed + i))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    optimizer.step()
    schedule.step()
    user = {"model": model.state_dict(), "optim": optimizer.state_dict(), "sched": schedule.state_dict()}
    return {"user": user, "torchft": {"step": seed, "batches_committed": 2 * seed}}


def _sharded(scale: float, seed: int) -> State:
    """A model of FSDP2 and its AdamW after one step, as torchtitan keeps them: for each of 64 parameters 3 DTensors.

    It needs a process group of one. The options of the optimizer stand beside each parameter: 640 numbers.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    width = max(8, int(256 * scale**0.5))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(32)))
    for i, parameter in enumerate(model.parameters()):
        torch.linspace(-1.0, 1.0 + seed, parameter.numel(), out=parameter.data.view(-1)).add_(i)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3 * seed)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {"user": {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, options=options)}}


#: What is told apart in a row, and the state of the memory that the bytes come into.
LINES = {
    "first": "backed",
    "cold": "cold",
    "second": "used before",
    "in place": "its own",
    "in place, second": "its own",
}


@dataclass(frozen=True)
class Row:
    """One shape of state: `build(scale, seed)` makes it; the rest says how it is measured.

    Attributes:
        table: its lines of the table, of those in `LINES`; the others are in the JSON and in the details
        in_place: received in place, too
        again: received a second time by the same process
        cold: received into cold memory, too (see `memory.py`)
        floor: beside raw sockets, and with more of torchft's chunks if everything is measured
        job: while training loops run in both processes, as the first receive of a fresh process: nothing warms it up
        sharded: holds DTensors, so that both processes need a process group
        has_optimizer: building it takes torch's optimizers
        repeats: the receives of one sample, whose median counts
        rounds: a cap on the rounds asked for
        default: measured without `--full`, too
    """

    name: str
    title: str
    build: Callable[[float, int], State]
    table: tuple[str, ...] = ("first",)
    in_place: bool = False
    again: bool = False
    cold: bool = False
    floor: bool = False
    job: bool = False
    sharded: bool = False
    has_optimizer: bool = False
    repeats: int = 1
    rounds: int | None = None
    default: bool = True


def _count(wanted: int, scale: float) -> int:
    return max(64, int(wanted * scale))


_LARGE: dict[str, Any] = {"in_place": True, "again": True, "floor": True}
_JOB: dict[str, Any] = {
    "in_place": True,
    "again": True,
    "job": True,
    "has_optimizer": True,
    "table": ("first", "in place"),
}

ROWS = {
    row.name: row
    for row in (
        Row(
            "large",
            "8 x 128 MiB",
            lambda scale, seed: _equal_tensors(8, int(128 * MIB * scale), seed),
            table=("first", "cold", "second", "in place"),
            cold=True,
            **_LARGE,
        ),
        Row(
            "one",
            "one tensor of 1 GiB",
            lambda scale, seed: _equal_tensors(1, int(GIB * scale), seed),
            table=("first", "in place"),
            default=False,
            **_LARGE,
        ),
        Row(
            "transformer",
            "transformer + Adam",
            _transformer,
            table=("first", "cold", "second", "in place"),
            has_optimizer=True,
            cold=True,
            **_LARGE,
        ),
        Row(
            "small", "100,000 x 1 KiB", lambda scale, seed: _equal_tensors(_count(100_000, scale), 1024, seed), rounds=3
        ),
        Row("tiny", "16 KiB in total", lambda scale, seed: _equal_tensors(16, 1024, seed), repeats=50),  # noqa: ARG005
        Row("fsdp", "25 MB of FSDP2", _sharded, sharded=True, has_optimizer=True, repeats=5),
        Row("job28", "28 MB, in a job", lambda scale, seed: _transformer(0.0625 * scale, seed), **_JOB),
        Row("job154", "154 MB, in a job", lambda scale, seed: _transformer(0.31 * scale, seed), **_JOB),
        Row(
            "million",
            "1,000,000 x 64 B",
            lambda scale, seed: _equal_tensors(_count(1_000_000, scale), 64, seed),
            rounds=1,
            default=False,
        ),
    )
}


def warm_up_state() -> State:
    """Return a state small enough that moving it only pays for imports, threads and connections."""
    return {"user": {"weight": torch.arange(4, dtype=torch.float32), "step": 1}}


def _walk(node: Any, path: str, visit: Callable[[str, Any], None]) -> None:
    if isinstance(node, Mapping):
        for key, child in node.items():
            _walk(child, f"{path}/{key!r}", visit)
    elif isinstance(node, (list, tuple)):
        for i, child in enumerate(node):
            _walk(child, f"{path}/{i}", visit)
    else:
        visit(path, node)


def measure(state: State) -> dict[str, int]:
    """Return the payload's bytes and its number of tensors."""
    total = {"bytes": 0, "tensors": 0}

    def visit(_path: str, leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            total["bytes"] += leaf.nbytes
            total["tensors"] += 1

    _walk(state, "", visit)
    return total


def digest(state: State) -> str:
    """Return SHA-256 over every leaf's path, type, shape and bytes."""
    sha = hashlib.sha256()

    def visit(path: str, leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            sha.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
            leaf = getattr(leaf, "_local_tensor", leaf)
            if leaf.numel():
                sha.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            sha.update(f"{path} {leaf!r}\n".encode())

    _walk(state, "", visit)
    return sha.hexdigest()
