"""Plans that do not describe what is saved: those of earlier saves, and of planners that change what they write."""

from __future__ import annotations

import dataclasses
import re
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType

from tensorferry import errors
from tensorferry._native import Index
from tensorferry.dcp import FileReader, FileWriter, index, own_errors

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is", "ignore:torch.quantize", "ignore::FutureWarning", "ignore:TypedStorage is"
    ),
]


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch):
    for cache in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        monkeypatch.setattr(SavePlanner, f"_cached_{cache}", {})


def numbers(dtype=torch.float32, count=8):
    return torch.arange(count).to(dtype)


#: What is saved in turn into one folder.
SAVES = {
    "there and back": lambda: [{"a": numbers(d)} for d in (torch.float32, torch.bfloat16, torch.float32)],
    "a dtype that containers lack": lambda: [{"a": numbers()}, {"a": numbers(torch.complex128)}],
    "sparse": lambda: [{"a": numbers()}, {"a": numbers(torch.float64).to_sparse()}],
    "another shape": lambda: [{"a": numbers().view(2, 4)}, {"a": numbers().view(4, 2)}],
    "a key more, an object": lambda: [{"a": numbers()}, {"a": 5, "b": numbers()}],
    "a key fewer, no object": lambda: [{"a": 5, "b": numbers()}, {"a": numbers(torch.bfloat16)}],
    "not flattened": lambda: [{"a": numbers(d), "o": {"x": numbers(d)}} for d in (torch.float32, torch.float16)],
}


@pytest.mark.parametrize("name", SAVES)
def test_the_index_describes_what_was_written(name, tmp_path):
    for state in SAVES[name]():
        planner = dcp.DefaultSavePlanner(flatten_state_dict=name != "not flattened", enable_plan_caching=True)
        dcp.save(state, storage_writer=FileWriter(tmp_path), planner=planner, no_dist=True)
    expected, reader = state, FileReader(tmp_path)
    about = reader.read_metadata().state_dict_metadata
    assert about.keys() == expected.keys()
    found = {key: target(value) for key, value in expected.items()}
    dcp.load(found, storage_reader=reader, no_dist=True)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert about[key].properties.dtype == value.dtype
            assert torch.equal(found[key].to_dense(), value.to_dense())
        else:
            assert str(found[key]) == str(value)


def target(value):
    if not isinstance(value, torch.Tensor):
        return None
    zeros = torch.zeros(value.shape, dtype=value.dtype)
    return zeros.to_sparse() if value.is_sparse else zeros


class Wrong(dcp.DefaultSavePlanner):
    """Describes something else than it writes."""

    def __init__(self, how):
        super().__init__()
        self._how = how

    def create_global_plan(self, plans):
        plans, metadata = super().create_global_plan(plans)
        known = metadata.state_dict_metadata
        if self._how == "other sizes":
            known["a"].chunks[0] = dataclasses.replace(known["a"].chunks[0], sizes=torch.Size([1, 4]))
        elif self._how == "a tensor for an object":
            known["o"] = known["a"]
        elif self._how == "a key that is not there":
            known["b"] = known["a"]
        elif self._how == "a key that is not described":
            del known["a"]
        return plans, metadata

    def transform_object(self, write_item, value):
        value = super().transform_object(write_item, value)
        return value.view(4, 2) if self._how == "turned" and isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("other sizes", r"names a\[0:1, 0:4\], which no rank has written"),
        ("a tensor for an object", r"o: the planner's metadata says that it is .*, and what was written is an object"),
        ("a key that is not there", r"names b, which no rank has written"),
        ("a key that is not described", r"a was written, and the planner's metadata does not describe it"),
        ("turned", r"its shape was \(2, 4\) when the save was planned, and is \(4, 2\) now"),
    ],
)
def test_what_contradicts_what_was_written_is_not_committed(how, says, tmp_path):
    state = {"a": numbers().view(2, 4), "o": 1}
    dcp.save({"a": numbers()}, storage_writer=FileWriter(tmp_path), no_dist=True)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(state, storage_writer=FileWriter(tmp_path), planner=Wrong(how), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, errors.InvalidArgument | errors.UnsupportedLeaf)
    assert re.search(says, str(error))
    found = {"a": torch.zeros(8)}
    dcp.load(found, storage_reader=FileReader(tmp_path), no_dist=True)
    assert torch.equal(found["a"], numbers())


class Half(dcp.DefaultSavePlanner):
    """Writes the second half of a tensor in another dtype."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        (item,) = plan.items
        halves = []
        for at in (0, 4):
            chunk = ChunkStorageMetadata(torch.Size([at]), torch.Size([4]))
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            index = MetadataIndex("a", chunk.offsets)
            halves.append(dataclasses.replace(item, type=WriteItemType.SHARD, index=index, tensor_data=data))
        return dataclasses.replace(plan, items=halves)

    def resolve_data(self, write_item):
        return numbers(torch.float32 if write_item.index.offset[0] else torch.float64, 4)


def test_parts_that_were_written_in_different_dtypes_are_refused(tmp_path):
    with pytest.raises(errors.InvalidArgument, match=r"a: its parts have different dtypes"), own_errors():
        dcp.save({"a": numbers()}, storage_writer=FileWriter(tmp_path), planner=Half(), no_dist=True)
    with pytest.raises(errors.InvalidArgument, match=r"a: rank 0 has .*float32.*, and rank 1 has .*float64"):
        encoded({0: 4}, {4: 4}, dtypes=("float32", "float64"))


@pytest.mark.parametrize("value", [1, torch.ones(2)], ids=["object", "tensor"])
def test_a_key_that_is_no_text_is_refused_by_the_save(value, tmp_path):
    with pytest.raises(errors.UnsupportedLeaf, match="UnicodeEncodeError"), own_errors():
        dcp.save({"\ud800": value}, storage_writer=FileWriter(tmp_path), no_dist=True)


def encoded(*ranks, dtypes=("float32", "float32")):
    """Encodes the index of a tensor of 8 elements; each rank has parts of it: where they begin, and their lengths."""
    parts = []
    for rank, dtype in zip(ranks, dtypes, strict=False):
        part = Index()
        part.add("a", dtype, [8], spread=True)
        for at, length in rank.items():
            part.add_chunk([at], [length], 0, 16, index.ELEMENTS)
        parts.append(index.RankPart(f"f{len(parts)}", 1, zlib.compress(part.encode())))
    chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([n])) for rank in ranks for at, n in rank.items()]
    about = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([8]), chunks)
    return index.encode(Metadata({"a": about}), parts, [part.container for part in parts])


@pytest.mark.parametrize(
    ("ranks", "says"),
    [([{0: 3}, {4: 4}], r"7 of the 8 elements .* rank 0, rank 1"), ([{0: 5}, {4: 4}], r"rank 1 has \[4:8\].*overlap")],
)
def test_parts_of_ranks_that_make_up_no_whole_are_refused(ranks, says):
    with pytest.raises(errors.InvalidArgument, match=says):
        encoded(*ranks)
    # What one rank saves alone may be its part.
    assert Index.decode(encoded(ranks[0]), 1).keys == ["a"]
    assert [chunk[2] for chunk in Index.decode(encoded({0: 4}, {4: 4}), 2).chunks(0)] == [0, 1]


class Asking(dcp.DefaultLoadPlanner):
    """Asks for what the checkpoint does not have."""

    def __init__(self, key):
        super().__init__()
        self._key = key

    def create_local_plan(self):
        items = super().create_local_plan().items
        return dcp.LoadPlan([dataclasses.replace(item, storage_index=MetadataIndex(self._key)) for item in items])


@pytest.mark.parametrize(
    ("key", "says"),
    [("z", "the plan asks for .*z.*does not have"), ("o", "asks for a tensor o, and the index says an object")],
)
def test_a_load_of_what_is_not_there_is_refused(key, says, tmp_path):
    dcp.save({"a": numbers(), "o": 1}, storage_writer=FileWriter(tmp_path), no_dist=True)
    with pytest.raises(errors.ProtocolError, match=says), own_errors():
        dcp.load({"a": numbers()}, storage_reader=FileReader(tmp_path), planner=Asking(key), no_dist=True)
