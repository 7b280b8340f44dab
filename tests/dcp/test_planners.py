"""The planners whose plans travel packed plan what torch's default ones do, and cost a fraction."""

from __future__ import annotations

import itertools
import pickle
import random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tensorferry.dcp import FileReader, FileWriter, LoadPlanner, SavePlanner
from tensorferry.errors import InvalidArgument

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Part(torch.Tensor):
    """A rank's boxes of a tensor that is spread over ranks, as frameworks describe theirs to torch's planner."""

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        del value
        return [
            WriteItem(
                MetadataIndex(fqn, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    TensorProperties.create_from_tensor(torch.empty(sizes, dtype=self.dtype)),
                    torch.Size(self.whole),
                ),
            )
            for offsets, sizes in self.boxes
        ]


def part(shape: list[int], boxes: list[tuple[list[int], list[int]]], dtype: torch.dtype) -> Part:
    made = torch.empty(0, dtype=dtype).as_subclass(Part)
    made.whole, made.boxes = shape, boxes
    return made


def cuts(rng: random.Random, size: int) -> list[tuple[int, int]]:
    edges = [0, *sorted(rng.sample(range(1, size), min(size - 1, rng.randrange(3)))), size]
    return [(start, end - start) for start, end in itertools.pairwise(edges)]


def random_states(rng: random.Random, world: int, fault: str = "") -> list[dict[str, Any]]:
    """A nested state for each rank: spread tensors, replicas, objects, and what only some ranks have."""
    states: list[dict[str, Any]] = [{"model": {}, "list": [{}, {}]} for _ in range(world)]
    for number in range(rng.randint(1, 9)):
        where = rng.choice([lambda s: s["model"], lambda s: s["list"][0], lambda s: s["list"][1], lambda s: s])
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
        shape = [rng.randint(1, 6) for _ in range(rng.randint(0, 3))]
        some = [rank for rank in range(world) if rng.random() < 0.8] or [0]
        kind = rng.choice(["spread", "spread", "replica", "object", "unusual", "differing"])
        if kind == "spread" and shape:
            boxes: list[list[Any]] = [[] for _ in range(world)]
            grid: list[tuple[list[int], list[int]]] = [([], [])]
            for size in shape:
                grid = [([*o, a], [*s, n]) for o, s in grid for a, n in cuts(rng, size)]
            for box in grid:
                for rank in rng.sample(range(world), rng.choice([1, 1, world])):
                    boxes[rank].append(box)
            empty = (shape, [0] * len(shape))
            for rank in range(world):
                own = boxes[rank] if boxes[rank] or rng.random() < 0.5 else [empty]
                where(states[rank])[f"key-{number}"] = part(shape, own, dtype)
            continue
        unusual = rng.choice([torch.zeros(4, 3).t(), torch.zeros(3, requires_grad=True), torch.eye(3).to_sparse()])
        for rank in some:
            value: Any = torch.zeros(shape, dtype=dtype)
            if kind == "object":
                value = rank
            elif kind == "unusual":
                value = unusual
            elif kind == "differing":
                value = torch.zeros([rank + 1 for _ in shape], dtype=dtype)
            where(states[rank])[f"key-{number}"] = value
    if fault:
        box = {"gap": ([1], [3]), "overlap": ([1], [3]), "outside": ([2], [9])}[fault]
        for rank in range(world):
            states[rank]["faulty"] = part([4], [([0], [2])] if rank == 0 and fault != "gap" else [box], torch.float32)
    return states


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def planned(planner_class: Any, states: list[dict[str, Any]], **options: Any) -> tuple[Metadata, list[Any]]:
    """What the coordinator plans, as other ranks get it, and the items that each rank writes."""
    planners = [planner_class(**options) for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, None, rank == 0)
    plans, metadata = planners[0].create_global_plan([sent(planner.create_local_plan()) for planner in planners])
    finished = [planner.finish_plan(sent(plan)) for planner, plan in zip(planners, plans, strict=True)]
    assert [list(plan.items) for plan in plans] == [plan.items for plan in finished]
    return metadata, [plan.items for plan in finished]


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_is_that_of_torchs_default_planner(seed):
    rng = random.Random(seed)
    options = {
        "flatten_state_dict": rng.random() < 0.7,
        "flatten_sharded_tensors": rng.random() < 0.7,
        "dedup_save_to_lowest_rank": rng.random() < 0.3,
    }
    states = random_states(rng, rng.randint(1, 6))
    if not options["flatten_state_dict"]:
        states = [{**state["model"], **state["list"][1], **state} for state in states]
        for state in states:
            del state["model"], state["list"]
    expected, items = planned(DefaultSavePlanner, states, **options)
    metadata, ours = planned(SavePlanner, states, **options)
    assert ours == items
    for found in (metadata, sent(metadata)):
        assert found.planner_data == (expected.planner_data or None)
        assert list(found.state_dict_metadata) == list(expected.state_dict_metadata)
        for key, value in expected.state_dict_metadata.items():
            assert vars(sent(found.state_dict_metadata[key])) == vars(value), key


@pytest.mark.parametrize(("fault", "reason"), [("gap", "elements"), ("overlap", "overlap"), ("outside", "not inside")])
def test_parts_that_make_up_no_whole_are_refused(fault, reason):
    states = random_states(random.Random(fault), 3, fault)
    with pytest.raises(InvalidArgument, match=f"faulty.*{reason}"):
        planned(SavePlanner, states)


def test_a_rank_with_another_planner_is_named():
    planner = SavePlanner()
    planner.set_up_planner({"a": 1}, None, True)
    other = DefaultSavePlanner()
    other.set_up_planner({"a": 1}, None, False)
    with pytest.raises(InvalidArgument, match="rank 1 plans with another class"):
        planner.create_global_plan([planner.create_local_plan(), other.create_local_plan()])


def test_what_travels_is_small_and_holds_no_items():
    state = {f"model.layers.{n}.weight": torch.zeros(8, 8) for n in range(500)}
    made, torchs = SavePlanner(), DefaultSavePlanner()
    for planner in (made, torchs):
        planner.set_up_planner(state, None, True)
    plan = made.create_local_plan()
    packed = pickle.dumps(plan)
    assert len(packed) < len(pickle.dumps(torchs.create_local_plan())) / 4
    (back,), metadata = made.create_global_plan([pickle.loads(packed)])
    assert len(pickle.dumps(back)) < 2000
    assert len(pickle.dumps(metadata)) < len(packed) + 100
    loading = LoadPlanner()
    loading.set_up_planner(state, metadata, True)
    assert len(loading.create_local_plan().items) == 500
    assert len(pickle.dumps(loading.create_local_plan())) < 300


@pytest.mark.parametrize("writer", [FileWriter, dcp.FileSystemWriter])
def test_what_is_saved_is_loaded_by_any_planner(tmp_path, writer):
    # torch's writer writes no sparse tensors.
    eye = torch.eye(3).to_sparse() if writer is FileWriter else torch.eye(3)
    state = {"a": {"b": [torch.arange(6.0).reshape(2, 3).t(), eye]}, "n": 3}
    dcp.save(state, storage_writer=writer(tmp_path), planner=SavePlanner(), no_dist=True)
    readers = [FileReader(tmp_path), *([dcp.FileSystemReader(tmp_path)] if writer is dcp.FileSystemWriter else [])]
    for reader in readers:
        for planner in (LoadPlanner(), DefaultLoadPlanner()):
            found = {"a": {"b": [torch.zeros(3, 2), torch.zeros_like(eye)]}, "n": 0}
            dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
            assert found["n"] == 3
            assert torch.equal(found["a"]["b"][0], state["a"]["b"][0])
            assert torch.equal(found["a"]["b"][1].to_dense(), torch.eye(3))


def test_a_changed_metadata_is_what_is_written(tmp_path):
    class Noting(SavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = {"a": ("other",)}
            return plans, metadata

    dcp.save({"a": 1}, storage_writer=FileWriter(tmp_path), planner=Noting(), no_dist=True)
    assert FileReader(tmp_path).read_metadata().planner_data == {"a": ("other",)}
