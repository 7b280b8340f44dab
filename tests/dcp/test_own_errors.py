"""Our errors out of torch's, and torch's arguments for our writer."""

from __future__ import annotations

import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tensorferry import CorruptCheckpoint, IncompleteCheckpoint, InvalidArgument, UnsupportedLeaf
from tensorferry.dcp import FileReader, FileWriter, PeerReader, own_errors
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


@pytest.mark.parametrize(
    "theirs",
    [
        {"thread_count": 2, "single_file_per_rank": True},
        {"sync_files": True, "per_thread_copy_ahead": 10_000_000, "cache_staged_state_dict": False},
    ],
)
def test_calls_of_torchs_writer_can_be_kept(tmp_path, theirs):
    dcp.save(state(), storage_writer=FileWriter(tmp_path, **theirs), no_dist=True)
    found = {"w": torch.zeros(1000)}
    load(tmp_path, found)
    assert torch.equal(found["w"], state()["w"])


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"single_file_per_rank": False}, r"single_file_per_rank=False .* one file"),
        ({"cache_staged_state_dict": True}, r"AsyncCheckpointer"),
        ({"_extensions": [1]}, r"FileSystemWriter"),
        ({"thread_count": 2, "threads": 2}, r"the same"),
        ({"thread_count": 0}, r"thread_count must be 1 or more"),
    ],
)
def test_what_cannot_be_followed_says_what_to_do(tmp_path, theirs, message):
    with pytest.raises(InvalidArgument, match=message):
        FileWriter(tmp_path, **theirs)


def test_what_nobody_knows_is_a_type_error(tmp_path):
    with pytest.raises(TypeError, match="no argument 'treads'"):
        FileWriter(tmp_path, treads=2)


def test_a_timeout_that_is_a_setting_is_not_negative():
    with pytest.raises(InvalidArgument, match="timeout must not be negative"):
        PeerReader("x", timeout=timedelta(seconds=-1))
