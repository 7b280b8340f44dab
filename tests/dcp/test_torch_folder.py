"""Checkpoints of torch's own writer, read by ``FileReader``: as torch reads them, but without running their code."""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import tensorferry
from tensorferry.dcp import FileReader

pytestmark = pytest.mark.filterwarnings("ignore")


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def state(fill):
    return {
        "model": {"weight": torch.arange(12.0).reshape(3, 4) * fill, "odd": (torch.arange(20) * fill)[::2]},
        "list": [torch.full((2,), fill), {"lr": 0.1 * fill}, (fill, None)],
        "half": torch.full((5,), fill, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(fill),
        "object": collections.OrderedDict(a=[fill, "x"]),
    }


def fails(call):
    with pytest.raises(dcp.CheckpointException) as caught:
        call()
    return caught.value


def test_a_folder_of_torchs_loads_as_torch_loads_it_and_the_log_says_so(tmp_path, caplog):
    dcp.save(state(3), storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=2))
    expected, found = state(0), state(0)
    dcp.load(expected, storage_reader=dcp.FileSystemReader(tmp_path))
    places = [leaf.data_ptr() for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
    reader = FileReader(tmp_path)
    with caplog.at_level(logging.INFO, "tensorferry"):
        dcp.load(found, storage_reader=reader)
    assert f"{tmp_path} holds a checkpoint of torch's own writer" in caplog.text
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, (expected, found)), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    after = [leaf.data_ptr() for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
    assert places == after
    stored = dcp.FileSystemReader(tmp_path).read_metadata().storage_data.items()
    read = sum(info.length for key, info in stored if key.fqn != "none")
    assert reader.report == {"bytes": read, "relayed": 0, "wanted": read}, (
        "nothing is read for a tensor without elements"
    )
    # Everything by name, as a converter or an exporter reads it.
    nested = _load_state_dict_from_keys(None, storage_reader=FileReader(tmp_path))
    assert nested["list"][1] == {"lr": pytest.approx(0.3)}
    assert torch.equal(nested["model"]["weight"], expected["model"]["weight"])


@pytest.mark.parametrize("where", ["index", "path", "object", "tensor", "planner"])
def test_a_hostile_folder_runs_nothing(where, tmp_path):
    folder, ran = tmp_path / "ck", tmp_path / "ran"
    dcp.save({"a": torch.ones(4), "b": [1]}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    if where == "index":
        metadata.storage_meta = Evil(ran)
    elif where == "path":
        metadata.storage_meta.checkpoint_id = Evil(ran)
    elif where == "planner":
        metadata.planner_data["a"] = Evil(ran)
    else:
        file = io.BytesIO()
        torch.save(Evil(ran), file)
        (folder / "evil").write_bytes(file.getvalue())
        key = MetadataIndex("b") if where == "object" else MetadataIndex("a", [0])
        metadata.storage_data[key].relative_path = "evil"
        metadata.storage_data[key].offset, metadata.storage_data[key].length = 0, len(file.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    if where != "tensor":
        with contextlib.suppress(dcp.CheckpointException):
            dcp.load({"a": torch.zeros(4), "b": [0]}, storage_reader=dcp.FileSystemReader(folder))
        assert ran.exists(), "torch's own reader runs it"
        ran.rmdir()
    error = fails(lambda: dcp.load({"a": torch.zeros(4), "b": [0]}, storage_reader=FileReader(folder)))
    assert "UnsafePickle" in str(error) or "allow-list" in str(error)
    assert not ran.exists()


def entries(**fields):
    """Changes what the index says of all entries."""

    def change(_, metadata):
        for info in metadata.storage_data.values():
            for name, value in fields.items():
                setattr(info, name, value)

    return change


#: Changes a folder and its metadata, and what is said of that.
DAMAGE = [
    (lambda folder, _: os.truncate(folder / "__0_0.distcp", 100), "is cut off"),
    (lambda folder, _: (folder / "__0_0.distcp").unlink(), "there is no such file"),
    (entries(relative_path="../secret"), "outside of its folder"),
    (entries(relative_path="/etc/passwd"), "outside of its folder"),
    (lambda _, about: setattr(about.state_dict_metadata["a"].chunks[0], "sizes", torch.Size([4, 5])), "has a chunk of"),
    (entries(length=1 << 50), "SystemRefused"),
    (entries(transform_descriptors=["zstd"]), "extensions of torch's writer"),
    (lambda _, about: setattr(about, "storage_data", {1: 2}), "cannot be read"),
]


@pytest.mark.parametrize(("change", "words"), DAMAGE)
def test_damage_is_named(change, words, tmp_path):
    dcp.save({"a": torch.ones(4, 4), "b": [1]}, checkpoint_id=tmp_path)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    change(tmp_path, metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    asked = {"a": torch.zeros(4, 4), "b": [0]}
    assert words in str(fails(lambda: dcp.load(asked, storage_reader=FileReader(tmp_path))))


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", pickle.dumps([1]), b"PK"])
def test_what_is_no_index_of_torchs_is_named(content, tmp_path):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises((tensorferry.errors.ProtocolError, tensorferry.errors.UnsafePickle)):
        FileReader(tmp_path).read_metadata()
    with pytest.raises(tensorferry.errors.ProtocolError, match="cannot be read"):
        FileReader(tmp_path, trust_pickle=True).read_metadata()
