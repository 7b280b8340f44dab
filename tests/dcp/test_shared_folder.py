"""Folders with several writers, several checkpoints, or files that another job has left behind."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import Job

import tensorferry
from states import fails, loaded, save
from tensorferry.dcp import FileReader, FileWriter, PeerWriter, file_writer, marker
from tensorferry.dcp.save_plan import ABOUT
from tensorferry.memory.tensors import no_rows
from tensorferry.storage import commits, leftovers, reserved
from tensorferry.storage.container import Container
from tensorferry.storage.names import new_id

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is", "ignore::FutureWarning"),
]


def names(folder):
    """Returns the names of the files of a folder, without the marker, which test_marker.py looks after."""
    found = (path.name for path in folder.iterdir() if not marker.is_marker(path))
    return sorted(found)


def age(path, seconds):
    now = time.time() - seconds
    os.utime(path, (now, now))


def test_leftovers_go_when_their_writer_is_dead(tmp_path):
    save(tmp_path, 1)
    here, elsewhere = new_id(), f"{'0' * 8}{'1' * 12}"
    old = [
        f"rank00003-{elsewhere}.safetensors",
        "rank00003-0123456789ab.safetensors.partial",
        "index.safetensors.partial",
    ]
    dead = [
        f"rank00001-{here}.safetensors",
        f"rank00002-{here}.safetensors.partial",
        f"index.safetensors.{here}.partial",
    ]
    foreign = ["model.safetensors", "rank.txt", "rank00001-notes.safetensors", f"index.safetensors.{here}"]
    locked = f"rank00004-{new_id()}.safetensors.partial"
    young = f"rank00005-{new_id()}.safetensors.partial"
    for name in (*old, *dead, *foreign, locked, young):
        (tmp_path / name).write_text(name)
        age(tmp_path / name, 0 if name == young else 120)
    (tmp_path / f"rank00006-{here}.safetensors").symlink_to(tmp_path / "model.safetensors")
    with (tmp_path / locked).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        save(tmp_path, 2)
        assert set(dead).isdisjoint(names(tmp_path))
        assert {*old, *foreign, locked, young} <= set(names(tmp_path))
        for name in (*old, locked, young):
            age(tmp_path / name, 25 * 3600)
        save(tmp_path, 3)
        assert {*foreign, locked} <= set(names(tmp_path))
        assert {*old, young}.isdisjoint(names(tmp_path))
    save(tmp_path, 4)
    assert locked not in names(tmp_path)
    assert loaded(tmp_path) == 4
    assert len(names(tmp_path)) == 2 + len(foreign) + 1


def test_nothing_is_removed_while_the_index_cannot_be_read(tmp_path, monkeypatch):
    left = f"rank00001-{new_id()}.safetensors"
    (tmp_path / left).write_text("x")
    age(tmp_path / left, 120)

    def refuse(path):
        raise tensorferry.errors.SystemRefused(f"{path}: stale")

    with monkeypatch.context() as broken:
        broken.setattr(commits, "files_of", refuse)
        save(tmp_path, 1)
    assert left in names(tmp_path)
    save(tmp_path, 2)
    assert left not in names(tmp_path)


def test_the_files_of_a_save_that_goes_on_elsewhere_are_not_leftovers(tmp_path):
    """The coordinator was thought dead: its ranks have written their files, but its index is still to come."""
    held, go = threading.Event(), threading.Event()

    class Paused(FileWriter):
        def finish(self, metadata, results):
            held.set()
            assert go.wait(60)
            super().finish(metadata, results)

    save(tmp_path, 1)
    state = {"a": torch.full((1000,), 2.0)}
    saving = dcp.async_save(state, storage_writer=Paused(tmp_path))
    assert held.wait(60)
    for path in tmp_path.iterdir():
        age(path, 48 * 3600)
    try:
        save(tmp_path, 3)
        assert loaded(tmp_path) == 3
        assert len(names(tmp_path)) == 3, "the file of the save that is paused"
    finally:
        go.set()
    error = fails(saving.result)
    assert isinstance(error, tensorferry.IncompleteCheckpoint)
    assert "began later" in str(error)
    assert loaded(tmp_path) == 3
    assert len(names(tmp_path)) == 2, "the rank file of the refused save is left behind"


def test_a_file_that_was_removed_is_noticed_before_the_index_names_it(tmp_path):
    class Robbed(FileWriter):
        def finish(self, metadata, results):
            for path in tmp_path.glob(f"{results[0][0].storage_data.container}"):
                path.unlink()
            super().finish(metadata, results)

    save(tmp_path, 1)
    error = fails(lambda: save(tmp_path, 2, Robbed(tmp_path)))
    assert isinstance(error, tensorferry.IncompleteCheckpoint)
    assert "was removed by another process" in str(error)
    assert loaded(tmp_path) == 1


@pytest.mark.parametrize(
    "entry",
    [b"", b"[]", b"{}", b'{"began":0,"files":{}}', b'{"began":0,"files":[1]}', b'{"began":"x","files":{"a":"0"}}',
     b'{"began":0,"files":{"a":"' + b"f" * 17 + b'"}}', b"[" * 100_000],
)  # fmt: skip
def test_an_index_with_an_invalid_list_of_files_is_refused(entry, tmp_path):
    save(tmp_path, 1)
    text, _ = commits.read(tmp_path / "index.safetensors")
    Container(no_rows(), None, True, [(reserved.INDEX, text), (reserved.INDEX_FILES, entry)], ABOUT).write(
        tmp_path / "index.safetensors", partial=tmp_path / "p"
    )
    with pytest.raises(dcp.CheckpointException, match=r"index\.safetensors"):
        loaded(tmp_path)
    save(tmp_path, 2)
    assert loaded(tmp_path) == 2


class Between(FileReader):
    """A reader during whose load another save is made, before or after the index is read."""

    def __init__(self, folder, step):
        super().__init__(folder)
        self._step, self._folder = step, folder

    def read_metadata(self, *args, **kwargs):
        if self._step == "before":
            save(self._folder, 2)
        found = super().read_metadata(*args, **kwargs)
        if self._step == "after":
            save(self._folder, 2)
        return found


def test_a_save_while_a_checkpoint_is_loaded_is_reported_as_such(tmp_path):
    save(tmp_path, 1)
    assert loaded(tmp_path, Between(tmp_path, "before")) == 2
    error = fails(lambda: loaded(tmp_path, Between(tmp_path, "after")))
    assert isinstance(error, tensorferry.SourceChanged)
    assert "load again" in str(error)


def test_ranks_that_read_different_checkpoints_load_none(tmp_path, monkeypatch):
    """Two ranks in one process, between whose reads of the index a save is made."""
    # The files that the first rank has seen stay readable, as for a while on network file systems.
    monkeypatch.setattr(leftovers, "remove", lambda *_: None)
    plans = []
    for rank in range(2):
        save(tmp_path, rank)
        reader, planner = FileReader(tmp_path), dcp.DefaultLoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner({"a": torch.zeros(1000)}, metadata, rank == 1)
        reader.set_up_storage_reader(metadata, rank == 1)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    with pytest.raises(tensorferry.SourceChanged, match="a save has replaced the checkpoint while it was being loaded"):
        reader.prepare_global_plan(plans)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_checkpoint_of_torch_is_replaced_or_kept_as_overwrite_says(tmp_path):
    def torch_saves(value):
        save(None, value, dcp.FileSystemWriter(tmp_path, thread_count=1))

    torch_saves(1)
    (tmp_path / "notes.txt").write_text("mine")
    there = names(tmp_path)
    error = fails(lambda: save(None, 2, FileWriter(tmp_path, overwrite=False)))
    assert isinstance(error, tensorferry.errors.InvalidArgument)
    assert ".metadata" in str(error)
    assert names(tmp_path) == there
    save(tmp_path, 2)
    assert loaded(tmp_path) == 2
    left = names(tmp_path)
    assert left[:2] == ["index.safetensors", "notes.txt"]
    assert len(left) == 3
    # In the other direction, torch's writer does not know our files. The older checkpoint is not loaded silently.
    torch_saves(3)
    with pytest.raises(dcp.CheckpointException, match=r"holds two checkpoints, and torch's \.metadata is newer"):
        loaded(tmp_path)
    assert loaded(None, dcp.FileSystemReader(tmp_path)) == 3
    age(tmp_path / ".metadata", 3600)
    assert loaded(tmp_path) == 2, "a save that was killed before it removed torch's"
    save(tmp_path, 4)
    assert loaded(tmp_path) == 4
    assert len(names(tmp_path)) == 3


def test_every_new_folder_is_synchronised_with_the_one_above(tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(file):
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(file_writer.os, "fsync", fsync)
    for folder, times in (("a/b", 1), ("a/b", 0)):
        synced.clear()
        save(tmp_path / folder, 1)
        assert synced[: 2 * times] == [str(tmp_path), str(tmp_path / "a")][: 2 * times]
        index, *marked = synced[2 * times :]
        assert index == str(tmp_path / "a/b"), "the name of the index"
        # The marker, which stays, and the folder with its name.
        assert [Path(one).name.partition("-")[0][:10] for one in marked] == [".metadata.", "b"][: 2 * times]


def test_a_folder_whose_name_is_not_valid_text(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/ck-\xff\xfe"))
    for value in (1, 2):
        save(folder, value)
        assert loaded(folder) == value
    next(folder.glob("rank*")).unlink()
    assert isinstance(fails(lambda: loaded(folder)), tensorferry.IncompleteCheckpoint)


def test_a_writer_that_was_shut_down_publishes_nothing():
    writer = PeerWriter()
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
    writer.shutdown()
    error = fails(lambda: dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True))
    assert isinstance(error, tensorferry.errors.TransportClosed)
    with pytest.raises(tensorferry.errors.InvalidArgument, match="nothing is published"):
        writer.metadata()


def _save_installed_on(kept, path, rank):
    if dist.get_rank() == rank:
        kept["installed"] = tensorferry.install()
    state = {f"of_{dist.get_rank()}": torch.ones(3)}
    try:
        dcp.save(state, checkpoint_id=path)
    except dcp.CheckpointException as e:
        return str(e)
    finally:
        if "installed" in kept:
            kept.pop("installed").undo()
    return None


@pytest.mark.process
def test_ranks_without_it_beside_ranks_with_it_fail_the_save(tmp_path):
    with Job(2) as job:
        for rank in (0, 1):
            said = job.run(_save_installed_on, tmp_path / str(rank), rank)
            assert all(said), said
            assert not (tmp_path / str(rank) / ".metadata").exists()
        assert any("call tensorferry.install() in every process" in one for one in said)
