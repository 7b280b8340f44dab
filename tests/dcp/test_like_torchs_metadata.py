"""What a reader says about a checkpoint is what torch's own reader says about the same state."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties, TensorStorageMetadata

from tensorferry._native import _file_entries
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter, index
from tensorferry.pickles.allowlist import Allowed
from tensorferry.storage import reserved

# The writer of torch 2.8 warns of its own storages.
pytestmark = pytest.mark.filterwarnings(
    *("ignore:torch.distributed is:UserWarning", "ignore:TypedStorage is:UserWarning", "ignore::FutureWarning")
)

STATE = {
    "plain": torch.arange(24.0).reshape(2, 3, 4),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "every_second": torch.arange(10)[::2],
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "text": "x",
}
HAS_STRIDES = any(field.name == "strides" for field in dataclasses.fields(TensorProperties))


def properties(metadata: Metadata) -> dict:
    return {
        key: value.properties if isinstance(value, TensorStorageMetadata) else None
        for key, value in metadata.state_dict_metadata.items()
    }


@pytest.fixture
def torchs(tmp_path) -> Metadata:
    dcp.save(STATE, storage_writer=filesystem.FileSystemWriter(tmp_path / "torch"))
    return filesystem.FileSystemReader(tmp_path / "torch").read_metadata()


def check(found: Metadata, theirs: Metadata) -> None:
    assert properties(found) == properties(theirs)
    assert getattr(found, "version", None) == getattr(theirs, "version", None)
    for name in ("save_id", "load_id"):
        if hasattr(StorageMeta(), name):
            assert isinstance(getattr(found.storage_meta, name), str), name


def test_of_files_and_of_peers(tmp_path, torchs):
    dcp.save(STATE, storage_writer=FileWriter(tmp_path / "a"))
    first, second = (FileReader(tmp_path / "a").read_metadata() for _ in range(2))
    check(first, torchs)
    assert first.storage_meta.save_id == second.storage_meta.save_id
    assert first.storage_meta.load_id != second.storage_meta.load_id
    dcp.save(STATE, storage_writer=FileWriter(tmp_path / "a"))
    assert FileReader(tmp_path / "a").read_metadata().storage_meta.save_id != first.storage_meta.save_id
    writer = PeerWriter()
    dcp.save(STATE, storage_writer=writer)
    check(PeerReader(writer.metadata()).read_metadata(), torchs)
    writer.shutdown()


def test_of_a_folder_of_torchs(tmp_path, torchs):
    found = FileReader(tmp_path / "torch").read_metadata()
    check(found, torchs)
    assert found.storage_meta.save_id == torchs.storage_meta.save_id


def test_an_index_of_an_earlier_version_knows_no_strides(tmp_path):
    dcp.save(STATE, storage_writer=FileWriter(tmp_path))
    (text,) = _file_entries(tmp_path / "index.safetensors", [reserved.INDEX])
    fields = json.loads(text)
    assert fields.pop("save")
    if HAS_STRIDES:
        assert fields.pop("strides") == {"turned": [1, 4], "every_second": [2]}
    found = index.decode(json.dumps(fields).encode(), "here", Allowed())
    assert all(getattr(one, "strides", None) is None for one in properties(found).values())
    # A torch that has no strides reads none.
    wrongs = ({"plain": [1]}, {"plain": [1, 2, "3"]}, {"plain": [-1, 2, 3]}, [], {"plain": [2**63, 1, 1]}, 5)
    for wrong in wrongs if HAS_STRIDES else ():
        with pytest.raises(index.ProtocolError):
            index.decode(json.dumps({**fields, "strides": wrong}).encode(), "here", Allowed())
