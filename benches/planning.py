"""What planning a checkpoint costs the coordinator, with torch's planner and writer and with ours.

One process plays all ranks. Of the coordinator, what it does between the collectives is measured: it unpickles what the
ranks have sent, plans, pickles the answers, unpickles what the ranks have written, writes the index, and pickles what
torch sends to all. Then one rank opens the checkpoint and plans to load its share. Nothing of the tensors is written.

    python benches/planning.py --sizes 256x500,2048x1000 --json build/bench/planning.json
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from tensorferry.dcp import FileReader, FileWriter, LoadPlanner, SavePlanner
from tensorferry.dcp.save_plan import PlanSnapshot
from tensorferry.storage.container import Container, Table
from tensorferry.storage.names import new_id

ROWS, COLUMNS = 4, 64
SAVE = new_id()


class Rows(torch.Tensor):
    """The rows that a rank has of a tensor, as frameworks describe theirs to torch's planners."""

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([self.rank * ROWS, 0]), torch.Size([ROWS, COLUMNS]))]

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(value), self.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the whole."""
        whole = torch.Size([self.world * ROWS, COLUMNS])
        return whole if dim is None else whole[dim]


def state_of(rank: int, world: int, tensors: int) -> dict[str, Any]:
    """A nested state, as FSDP2 has it."""
    names = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1"]
    layers: dict[str, Any] = {}
    for number in range(tensors):
        value = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16).as_subclass(Rows)
        value.rank, value.world = rank, world
        layers[f"layers.{number // len(names)}.{names[number % len(names)]}.weight"] = value
    return {"model": layers, "step": 1}


def results_of_torch(rank: int, items: list[WriteItem]) -> list[WriteResult]:
    place = f"__{rank}_0.distcp"
    return [WriteResult(item.index, 512, _StorageInfo(place, 512 * n, 512)) for n, item in enumerate(items)]


def results_of_ours(rank: int, items: list[WriteItem], folder: Path) -> list[WriteResult]:
    name = f"rank{rank:05d}-{SAVE}.safetensors"
    written = Container(Table(), None, True).write(folder / name, partial=folder / f"{name}.partial")
    snapshot = object.__new__(PlanSnapshot)
    snapshot._items = items
    snapshot._dtypes = [item.tensor_data and item.tensor_data.properties.dtype for item in items]
    snapshot._kinds = ["b" if item.tensor_data is None else "t" for item in items]
    snapshot.rows = type("Rows", (), {"sizes": [512] * len(items)})
    return snapshot.part(name, written.header).results(512)


class Costs(dict[str, float]):
    """Seconds of CPU, by step."""

    def timed(self, step: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call returns, which is a part of a step."""
        gc.collect()
        began = time.process_time()
        value = call(*arguments)
        self[step] = self.get(step, 0.0) + time.process_time() - began
        return value


def pickled(values: list[Any]) -> list[bytes]:
    return [pickle.dumps(value) for value in values]


def unpickled(values: list[bytes]) -> list[Any]:
    return [pickle.loads(value) for value in values]


def run(kind: str, world: int, tensors: int, folder: Path) -> dict[str, float]:
    """Plays a save and a load; returns the seconds and bytes of each step."""
    save_planner, load_planner, writer_class, reader_class = {
        "torch": (DefaultSavePlanner, DefaultLoadPlanner, FileSystemWriter, FileSystemReader),
        "tensorferry": (SavePlanner, LoadPlanner, FileWriter, FileReader),
    }[kind]
    writer, planner = writer_class(folder), save_planner()
    cost = Costs()
    sent = []
    for rank in range(world):
        one = save_planner()
        one.set_up_planner(state_of(rank, world, tensors), None, rank == 0)
        if rank == 0:
            planner = one
            writer.reset()
            writer.set_up_storage_writer(True, rank=0, use_collectives=True)
            local = writer.prepare_local_plan(cost.timed("rank plans", one.create_local_plan))
        else:
            local = one.create_local_plan()
        sent.append(pickle.dumps(local))
    del one, local
    plans = cost.timed("unpickle plans", unpickled, sent)
    gathered = sum(map(len, sent))
    sent.clear()
    plans, metadata = cost.timed("plan", planner.create_global_plan, plans)
    plans = cost.timed("plan", writer.prepare_global_plan, plans)
    answers = cost.timed("pickle plans", pickled, plans)
    planner.global_plan = plans = None
    scattered = sum(map(len, answers))
    wrote = []
    for rank, answer in enumerate(answers):
        one = save_planner()
        one.set_up_planner(state_of(rank, world, tensors), None, rank == 0)
        one.create_local_plan()
        items = one.finish_plan(pickle.loads(answer)).items
        results = results_of_torch(rank, items) if kind == "torch" else results_of_ours(rank, items, folder)
        wrote.append(pickle.dumps(results))
    del answers, one, items, results
    results = cost.timed("unpickle results", unpickled, wrote)
    gathered += sum(map(len, wrote))
    wrote.clear()
    cost.timed("index", writer.finish, metadata, results)
    results.clear()
    (broadcast,) = cost.timed("pickle metadata", pickled, [metadata])
    coordinator = sum(seconds for step, seconds in cost.items() if step != "rank plans")
    index = (folder / (".metadata" if kind == "torch" else "index.safetensors")).stat().st_size
    del metadata, planner, writer

    reader, planner, state = reader_class(folder), load_planner(), state_of(world // 2, world, tensors)
    metadata = cost.timed("open", reader.read_metadata)

    def plan() -> Any:
        planner.set_up_planner(state, metadata, False)
        reader.set_up_storage_reader(metadata, False, rank=world // 2, use_collectives=True)
        return reader.prepare_local_plan(planner.create_local_plan())

    assert len(cost.timed("plan share", plan).items) == tensors + 1
    opening = cost["open"] + cost["plan share"]
    sizes = {"gathered": gathered, "scattered": scattered, "broadcast": len(broadcast), "index bytes": index}
    return {**cost, "coordinator": coordinator, "opening": opening, **sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="256x500", help="ranks x tensors, with commas between")
    parser.add_argument("--kinds", default="torch,tensorferry", help="which to run")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for size in options.sizes.split(","):
        world, tensors = map(int, size.split("x"))
        of_size = figures[size] = {}
        for kind in options.kinds.split(","):
            with tempfile.TemporaryDirectory() as folder:
                of_size[kind] = run(kind, world, tensors, Path(folder))
        print(f"\n{size} (ranks x tensors): seconds of CPU, or bytes")
        print("| | " + " | ".join(of_size) + (" | ratio |" if len(of_size) > 1 else " |"))
        print("|---" * (len(of_size) + 1 + (len(of_size) > 1)) + "|")
        for step in next(iter(of_size.values())):
            values = [one[step] for one in of_size.values()]
            ratio = f" {values[0] / values[1]:.1f} |" if len(values) > 1 and values[1] else ""
            print(
                f"| {step} | "
                + " | ".join(f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" for value in values)
                + f" |{ratio}"
            )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
