"""Names out of an index: those of ranks' files are believed, and an index with any other is no checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint
from tensorferry.cli import main
from tensorferry.dcp import FileReader, FileWriter
from tensorferry.dcp.save_plan import ABOUT
from tensorferry.errors import CorruptCheckpoint, ProtocolError, TensorferryError
from tensorferry.memory.tensors import no_rows
from tensorferry.storage import commits, folder, names, reserved
from tensorferry.storage.container import Container
from tensorferry.storage.names import new_id

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is", "ignore::FutureWarning"),
]

GOOD = "rank00000-0123456789abcdef0123.safetensors"
HOSTILE = [
    "../home/victim", "{outside}/victim", "victim", "..", ".", "", "index.safetensors", "../" + GOOD, GOOD + "/",
    GOOD + "\n", GOOD + ".partial", "rank\u0660\u0660\u0660\u0660\u0660-0123456789ab.safetensors",
    "rank" + "0" * 300 + "-0123456789ab.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_only_the_names_of_ranks_files_pass(name) -> None:
    assert names.checked_files([GOOD], "it") == [GOOD]
    for wrong in (name, [name], None, 5, name.encode()):
        with pytest.raises(ProtocolError, match="not the name of a rank's file"):
            names.checked_files([GOOD, wrong], "it")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "../a", "a/b", "a/", "a\0", "a" * 256, "\ud800", b"a", None]
)
def test_what_is_no_plain_name_does_not_pass(name) -> None:
    for good in ("__0_0.distcp", "a" * 255):
        assert names.checked_plain(good, "it") == good
    with pytest.raises(ProtocolError, match="a file outside of its folder"):
        names.checked_plain(name, "it")


@pytest.fixture
def outside(tmp_path):
    """A folder with files that are none of the checkpoint's."""
    found = tmp_path / "home"
    (found / "sub").mkdir(parents=True)
    for name in ("victim", GOOD, "sub/victim"):
        (found / name).write_text("mine")
    return found


def untouched(outside) -> bool:
    return all((outside / name).read_text() == "mine" for name in ("victim", GOOD, "sub/victim"))


@pytest.mark.parametrize("name", ["../home/victim", "{outside}/victim", "sub/victim", "victim", "../home/" + GOOD])
def test_a_checkpointers_folder_with_such_a_name_is_none_and_nothing_is_removed(name, tmp_path, outside) -> None:
    name = name.format(outside=outside)
    saver = SyncCheckpointer(keep_last=1)
    saver.save(tmp_path / "step-1", {"a": torch.ones(10)})
    where = tmp_path / "step-1"
    (where / "victim").write_text("mine")
    path = where / "index.safetensors"
    index = folder.read_index(where)
    fields = {"version": 1, "save": index.save_id, "files": [name], "shards": {}}
    control = [
        (reserved.CHECKPOINT, json.dumps(fields).encode()),
        (reserved.INDEX_FILES, commits.Commit({name: 1}, 1).encode()),
    ]
    Container(no_rows(), None, True, control).write(path, partial=where / "p")
    with pytest.raises(ProtocolError, match="not the name of a rank's file"):
        saver.load(where)
    with pytest.raises(CorruptCheckpoint, match="step-1"):
        latest_checkpoint(tmp_path)
    for verb in (["inspect", where], ["verify", where], ["convert", where, tmp_path / "out.pt"]):
        assert main([str(part) for part in verb]) != 0
    # Neither as an old checkpoint of a series nor as one that is replaced.
    saver.save(tmp_path / "step-2", {"a": torch.ones(10)})
    shutil.copytree(where, tmp_path / "other")
    saver.save(where, {"a": torch.ones(10)})
    dcp.save({"a": torch.ones(10)}, storage_writer=FileWriter(tmp_path / "other"), no_dist=True)
    assert untouched(outside)
    assert (where / "victim").read_text() == "mine"
    saver.close()


def test_links_are_removed_and_what_they_lead_to_stays(tmp_path, outside) -> None:
    """In every way in which a name is used: replaced, cleaned up, written to."""
    where = tmp_path / "ck"
    dcp.save({"a": torch.ones(10)}, storage_writer=FileWriter(where), no_dist=True)
    (old,) = where.glob("rank*")
    old.unlink()
    old.symlink_to(outside / "victim")
    left = where / f"rank00001-{new_id()}.safetensors.partial"
    left.symlink_to(outside / "victim")
    os.utime(left, (1, 1), follow_symlinks=False)
    dcp.save({"a": torch.ones(10)}, storage_writer=FileWriter(where), no_dist=True)
    assert not old.is_symlink()
    assert untouched(outside)
    dcp.load({"a": torch.zeros(10)}, storage_reader=FileReader(where), no_dist=True)


@pytest.mark.parametrize("began", [-1, 1 << 63, 10**30, True, "5", None, 1.5])
def test_an_index_whose_save_began_at_no_time_is_none(began, tmp_path) -> None:
    dcp.save({"a": torch.ones(10), "b": torch.ones(10)}, storage_writer=FileWriter(tmp_path), no_dist=True)
    text, commit = commits.read(path := tmp_path / "index.safetensors")
    files = json.dumps(json.loads(commit.encode()) | {"began": began}).encode()
    control = [(reserved.INDEX, text), (reserved.INDEX_FILES, files)]
    Container(no_rows(), None, True, control, ABOUT).write(path, partial=tmp_path / "p")
    with pytest.raises(TensorferryError):
        commits.read(path)
    dcp.save({"a": torch.ones(10)}, storage_writer=FileWriter(tmp_path), no_dist=True)
    dcp.load({"a": torch.zeros(10)}, storage_reader=FileReader(tmp_path), no_dist=True)


def test_a_save_begins_after_those_that_are_known_whatever_the_clock_says() -> None:
    now = time.time_ns()
    assert commits.begin_after([]) >= now
    assert commits.begin_after([1, now]) > now
    hour = now + 3600 * 10**9
    assert commits.begin_after([5, hour, 7]) == hour + 1
    # However far in the future: the index of such a save can be read.
    assert commits.begin_after([10**40]) <= commits._LAST
