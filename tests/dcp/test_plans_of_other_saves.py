"""Plans that do not describe what is saved: those of earlier saves, and of planners that change what they write."""

from __future__ import annotations

import dataclasses
import re

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
from torch.distributed.checkpoint.planner import SavePlanner

from tensorferry import errors
from tensorferry.dcp import FileReader, FileWriter, index, own_errors
from tensorferry.dcp.index import ELEMENTS, EntryRef

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
            known["a"].chunks[0] = dataclasses.replace(known["a"].chunks[0], sizes=torch.Size([4, 2]))
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
        ("other sizes", r"a: the planner's metadata says that the part at \[0, 0\] is a tensor of \[4, 2\], and what "),
        ("a key that is not there", r"no rank has written"),
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


def test_parts_that_were_written_in_different_dtypes_are_refused():
    chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([2])) for at in (0, 2)]
    about = TensorStorageMetadata(TensorProperties(dtype=torch.float64), torch.Size([4]), chunks)
    stored = {
        MetadataIndex("w", chunk.offsets): EntryRef("f", str(number), "U8", 8, ELEMENTS, 1, (dtype, [2]))
        for number, (chunk, dtype) in enumerate(zip(chunks, ("float32", "float64"), strict=True))
    }
    with pytest.raises(errors.InvalidArgument, match=r"its parts have different dtypes \(float32, float64\)"):
        index.encode(Metadata({"w": about}), stored)


class Asking(dcp.DefaultLoadPlanner):
    """Asks for what the checkpoint does not have."""

    def create_local_plan(self):
        items = super().create_local_plan().items
        return dcp.LoadPlan([dataclasses.replace(item, storage_index=MetadataIndex("z")) for item in items])


def test_a_load_of_what_is_not_there_is_refused(tmp_path):
    dcp.save({"a": numbers()}, storage_writer=FileWriter(tmp_path), no_dist=True)
    with pytest.raises(errors.ProtocolError, match=r"the plan asks for .*z.*does not have"), own_errors():
        dcp.load({"a": numbers()}, storage_reader=FileReader(tmp_path), planner=Asking(), no_dist=True)
