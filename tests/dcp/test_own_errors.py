"""Our errors out of torch's, and torch's arguments for our writer."""

from __future__ import annotations

import dataclasses
import pickle
import traceback

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tensorferry import CorruptCheckpoint, IncompleteCheckpoint
from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter, failures, own_errors
from tensorferry.errors import UnsupportedLeaf
from tensorferry.state import ranks
from tensorferry.storage.folder import INDEX

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def state():
    return {"w": torch.arange(1000.0)}


def load(folder, wanted=None):
    dcp.load(state() if wanted is None else wanted, storage_reader=FileReader(folder), no_dist=True)


def test_an_error_of_the_index_keeps_its_class_and_is_said_once(tmp_path):
    with pytest.raises(CheckpointException) as theirs:
        load(tmp_path)
    # torch 2.8 reads the index once. 2.15 tries again for an index of the rank, and raises an AssertionError of both.
    said = 1 if torch.__version__ < (2, 9) else 2
    assert str(theirs.value).count("there is no checkpoint in") == said, "torch has changed: is own_errors needed?"
    with pytest.raises(IncompleteCheckpoint) as caught, own_errors():
        load(tmp_path)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("there is no checkpoint in") == 1
    assert caught.value.__notes__ == ["on ranks 0 of the job"]


def test_an_error_of_a_save_and_one_of_the_bytes_keep_their_class(tmp_path):
    with pytest.raises(UnsupportedLeaf, match="cannot be saved"), own_errors():
        dcp.save({"f": (n for n in ())}, storage_writer=FileWriter(tmp_path), no_dist=True)
    dcp.save(state(), storage_writer=FileWriter(tmp_path), no_dist=True)
    (file,) = (path for path in tmp_path.iterdir() if path.suffix == ".safetensors" and path.name != INDEX)
    damaged = bytearray(file.read_bytes())
    at = damaged.find(torch.arange(1000.0)[500:].numpy().tobytes()[:64])
    damaged[at] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CorruptCheckpoint), own_errors():
        load(tmp_path)


def test_errors_of_others_are_left_as_they_are(tmp_path):
    dcp.save(state(), storage_writer=FileWriter(tmp_path), no_dist=True)
    with pytest.raises(CheckpointException), own_errors():
        load(tmp_path, {"other": torch.zeros(3)})
    with pytest.raises(KeyError), own_errors():
        raise KeyError
    # What a block has seen is forgotten by the next one.
    with pytest.raises(IncompleteCheckpoint), own_errors():
        load(tmp_path / "none")
    with pytest.raises(CheckpointException), own_errors():
        load(tmp_path, {"other": torch.zeros(3)})


def test_without_numpy_each_save_and_load_says_once_what_to_do(tmp_path, monkeypatch, caplog):
    # torch goes its own way through writer and reader, without the collectives that would fail.
    monkeypatch.setattr(failures, "lack_numpy", lambda: True)
    writer, reader = {"storage_writer": FileWriter(tmp_path)}, {"storage_reader": FileReader(tmp_path)}
    for act, through in ((dcp.save, writer), (dcp.load, reader)):
        caplog.clear()
        act(state(), **through, no_dist=True)
        assert [record.getMessage() for record in caplog.records].count(ranks.WITHOUT_NUMPY) == 1


STATE = {
    "plain": torch.arange(24.0).reshape(2, 3, 4),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "every_second": torch.arange(10)[::2],
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "text": "x",
}


def properties(metadata: Metadata) -> dict:
    return {
        key: value.properties if isinstance(value, TensorStorageMetadata) else None
        for key, value in metadata.state_dict_metadata.items()
    }


def test_what_is_said_of_tensors_and_saves_is_what_torch_says(tmp_path):
    dcp.save(STATE, storage_writer=filesystem.FileSystemWriter(tmp_path / "torch"))
    dcp.save(STATE, storage_writer=FileWriter(tmp_path / "a"))
    theirs = filesystem.FileSystemReader(tmp_path / "torch").read_metadata()
    writer = PeerWriter()
    dcp.save(STATE, storage_writer=writer)
    for reader in (FileReader(tmp_path / "torch"), FileReader(tmp_path / "a"), PeerReader(writer.metadata())):
        found = reader.read_metadata()
        assert properties(found) == properties(theirs)
        assert getattr(found, "version", None) == getattr(theirs, "version", None)
    writer.shutdown()
    first, second = (FileReader(tmp_path / "a").read_metadata() for _ in range(2))
    assert first.storage_meta.save_id == second.storage_meta.save_id
    assert first.storage_meta.load_id != second.storage_meta.load_id
    copied = pickle.loads(pickle.dumps(first))
    assert copied.storage_data == dict(first.storage_data)
    assert copied.state_dict_metadata["plain"] == theirs.state_dict_metadata["plain"]
    assert (copied.planner_data, len(first.storage_data)) == (theirs.planner_data, len(theirs.storage_data))
    assert dataclasses.replace(first, planner_data=None).planner_data is None
    dcp.save(STATE, storage_writer=FileWriter(tmp_path / "a"))
    assert FileReader(tmp_path / "a").read_metadata().storage_meta.save_id != first.storage_meta.save_id
