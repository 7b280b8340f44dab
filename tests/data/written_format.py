"""States whose bytes are kept beside this file.

`tests/state/test_written_format.py` reads those bytes with the code in the tree, and compares them with what that
writes for the same states. `python tests/data/written_format.py` writes the files again: only where
docs/reference/format.md changes, too.

Writing has a process of its own: a pickle holds equal texts once or twice depending on how the modules were imported
whose names they are.

What is random is fixed while they are written, in :func:`fixed`: the id in the names of a save's files, the random
`tensorferry.file` in their headers, and the time at which a save began. The body of `/checkpoint/N.safetensors` has
nothing random in it.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import shutil
import sys
import urllib.request
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

from tensorferry import HTTPTransport
from tensorferry.dcp import FileWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
CONTAINER = HERE / "state.safetensors"
DIGESTS = HERE / "state.digests"
STOCK = HERE / "state.torchft"
FOLDER = HERE / "dcp"
#: torch's part of these bytes (what a pickle of a tensor names, how an archive is laid out) is that of this version.
TORCH = "2.15"
STEP = 7


class Moments(NamedTuple):
    """A namedtuple of a user's own."""

    mean: torch.Tensor
    count: int


class Tagged(torch.Tensor):
    """A subclass of a user's own."""


#: What a receiver has to allow for these states.
SAFE_GLOBALS = [Moments, Tagged]


def ramp(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The bits 0, 1, 2, ... as elements of ``dtype``."""
    nbytes = count * dtype.itemsize
    return (torch.arange(nbytes) % 120).to(torch.uint8).view(dtype).clone()


def in_order(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns the same, contiguous in memory: a manifest lists leaves that share memory in the order of addresses."""
    memory, at, placed = bytearray(sum(one.nbytes + 64 for one in tensors)), 0, []
    for one in tensors:
        placed.append(torch.frombuffer(memory, dtype=one.dtype, count=one.numel(), offset=at).copy_(one))
        at += (one.nbytes + 63) // 64 * 64
    return placed


def transport_state() -> dict[str, Any]:
    """Returns a state that uses every element of the format. It needs a process group of one process."""
    mesh = DeviceMesh("cpu", [0])
    base, weights, column = in_order(torch.arange(24.0), ramp(12), torch.arange(3.0))
    tied = torch.nn.Parameter(weights.view(3, 4))
    tagged = torch.arange(3.0)
    tagged.sharding = "row"
    attributed = torch.nn.Parameter(torch.arange(4.0))
    attributed.tp_dim = 1
    module = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.arange(float(weight.numel())).view(weight.shape))
    ordered = collections.OrderedDict(weight=ramp(5), bias=ramp(3))
    return {
        "plain": {
            "f32": torch.arange(6.0).view(2, 3),
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 3),
            "needs_grad": torch.arange(2.0).requires_grad_(),
            "pages": ramp(4096, torch.uint8),
            "bool": torch.tensor([True, False, True]),
            **{
                str(dtype).removeprefix("torch."): ramp(4, dtype)
                for dtype in (
                    torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
                    torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
                )
            },
        },
        "parameter": torch.nn.Parameter(torch.arange(4.0)),
        "frozen": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "tied": {"encoder": tied, "decoder": tied, "data": tied.data},
        "views": {"a": base[:12].view(3, 4), "b": base[6:18], "transposed": base[:6].view(2, 3).t()},
        "strided": torch.arange(64.0).view(8, 8)[::2, 1::3],
        "expanded": column.expand(4, 3),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "complex128": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128),
        "float8_fnuz_with_grad": ramp(6, torch.float8_e5m2fnuz).requires_grad_(),
        "uint16_view": ramp(8, torch.uint16)[2:5],
        "coo": torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3), check_invariants=True),
        "csr": torch.eye(3).to_sparse_csr(),
        "dtensor": DTensor.from_local(torch.arange(8.0).view(2, 4), mesh, [Shard(0)], run_check=False),
        "dtensor_over_view": DTensor.from_local(torch.arange(12.0)[4:], mesh, [Replicate()], run_check=False),
        "subclass": torch.arange(4.0).as_subclass(Tagged),
        "tagged": tagged,
        "attributed": attributed,
        "meta": torch.empty(2, 2, device="meta"),
        "state_dict": module.state_dict(),
        "ordered": ordered,
        "keys": {1: "int", False: "bool", None: "none", (1, "a"): "tuple", 2.5: "float", -3: ramp(1)},
        "same.name": {"x": ramp(2)},
        "same": {"name.x": ramp(2), "name": {"x": ramp(3)}},
        "__tensorferry__/manifest": ramp(2),
        "": ramp(1),
        "n\u00fcl": {"\0": ramp(1)},
        "namedtuple": Moments(torch.arange(3.0), 3),
        "size": torch.Size([2, 3]),
        "list": [1, 2.5, "text", b"bytes", None, True, 2**70, [ramp(1), (ramp(1), ())]],
        "deque": collections.deque([1, ramp(1)], maxlen=3),
        "defaultdict": collections.defaultdict(list, {"a": [1], "b": []}),
        "objects": {
            "namespace": SimpleNamespace(lr=0.1, buffer=base[3:5], tied=tied),
            "when": datetime.timedelta(seconds=3),
            "counter": collections.Counter("aab"),
            "dtype": torch.float16,
            "device": torch.device("cpu"),
            "storage": ramp(4, torch.uint8).untyped_storage(),
            "range": range(3),
        },
        "deep": deep(100),
    }  # fmt: skip


def stock_state() -> dict[str, Any]:
    """Returns a state that torchft's own transport can send as well."""
    base = torch.arange(12.0)
    weight = torch.nn.Parameter(torch.arange(4.0))
    user = {"weight": weight, "again": weight, "views": [base[:8], base[4:]], "scalar": torch.tensor(1)}
    return {"user": {"default": user}, "torchft": {"step": 3, "batches": 6}}


def deep(levels: int) -> Any:
    """Returns lists nested deeper than the tree represents."""
    value: Any = torch.arange(2.0)
    for _ in range(levels):
        value = [value]
    return value


def job_state() -> dict[str, Any]:
    """Returns a state for ``torch.distributed.checkpoint``. It needs a process group of one process."""
    mesh = DeviceMesh("cpu", [0])
    return {
        "model": {
            "weight": torch.arange(12.0).view(3, 4),
            "half": ramp(5, torch.bfloat16),
            "column": torch.arange(12.0).view(3, 4)[:, 1],
            "scalar": torch.tensor(1.5),
            "empty": torch.zeros(0),
            "complex128": torch.tensor([1 + 2j], dtype=torch.complex128),
            "sharded": DTensor.from_local(torch.arange(8.0).view(2, 4), mesh, [Shard(0)], run_check=False),
        },
        "optimizer": {"state": [{"step": torch.tensor(3.0)}, {"exp_avg": ramp(4)}], "lr": 0.1, "betas": (0.9, 0.95)},
        "when": datetime.timedelta(seconds=3),
        "__tensorferry__/x": ramp(2),
    }


def served(state: Any, *names: str) -> list[bytes]:
    """Returns a transport's answers to requests for these names when it has published ``state``."""
    transport: HTTPTransport[Any] = HTTPTransport(timedelta(seconds=30), interface="127.0.0.1")
    bodies = []
    try:
        transport.send_checkpoint([], STEP, state, timedelta(seconds=30))
        transport.allow_checkpoint(STEP)
        for name in names:
            with urllib.request.urlopen(transport.address() + name, timeout=30) as answer:
                bodies.append(answer.read())
    finally:
        transport.shutdown()
    return bodies


def container() -> list[bytes]:
    """Returns the container of :func:`transport_state` and the checksums of its blocks, as they are sent."""
    return served(transport_state(), f"{STEP}.safetensors", f"{STEP}/digests?blocks=0-1")


def stock_body() -> bytes:
    """Returns the body that a receiver of torchft's own class gets for :func:`stock_state`."""
    return served(stock_state(), f"{STEP}/full")[0]


@contextlib.contextmanager
def fixed() -> Iterator[None]:
    """Fixes everything random in a save into a folder."""
    with (
        mock.patch("tensorferry.dcp.file_writer.new_id", return_value="0123456789abcdef0123"),
        mock.patch("secrets.token_hex", lambda nbytes: "5a" * nbytes),
        mock.patch("time.time_ns", return_value=1_700_000_000_000_000_000),
    ):
        yield


def write_folder(path: Path) -> None:
    """Saves :func:`job_state` into ``path``."""
    with fixed():
        dcp.save(job_state(), storage_writer=FileWriter(path))


def main(folder: Path = HERE) -> None:
    """Writes all of the files into ``folder``."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        for path, data in zip((CONTAINER, DIGESTS), container(), strict=True):
            (folder / path.name).write_bytes(data)
        (folder / STOCK.name).write_bytes(stock_body())
        shutil.rmtree(folder / FOLDER.name, ignore_errors=True)
        write_folder(folder / FOLDER.name)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    # Pickles name the module of a class, which must not be that of the program that was run.
    sys.path.insert(0, str(HERE))
    import written_format

    written_format.main(*map(Path, sys.argv[1:]))
