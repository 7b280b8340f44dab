"""Our errors out of torch's, and torch's arguments for our writer."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tensorferry import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedLeaf
from tensorferry.dcp import FileReader, FileWriter, own_errors
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
