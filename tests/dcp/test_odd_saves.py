"""Overlapping saves, tensors without memory, and paths that are not folders."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import Job

import tensorferry
from tensorferry.dcp import FileReader, FileWriter, PeerWriter

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def loaded(folder):
    state = {"a": torch.zeros(1000)}
    dcp.load(state, storage_reader=FileReader(folder), no_dist=True)
    return state["a"][0].item()


def save(folder, value, **options):
    dcp.save({"a": torch.full((1000,), float(value))}, storage_writer=FileWriter(folder), no_dist=True, **options)


def fails(call):
    """Returns the exception that the only rank raised."""
    with pytest.raises(dcp.CheckpointException) as caught:
        call()
    return caught.value.failures[0][0]


class Slow(dcp.DefaultSavePlanner):
    """Pauses a save that has begun, either before or after its data is written."""

    def __init__(self, when):
        super().__init__()
        self._when = when
        self.reached, self.go = threading.Event(), threading.Event()

    def _stop(self, when):
        if when == self._when:
            self.reached.set()
            assert self.go.wait(60)

    def create_local_plan(self):
        self._stop("begun")
        return super().create_local_plan()

    def resolve_data(self, item):
        self._stop("planned")
        return super().resolve_data(item)


class SlowWriter(FileWriter):
    """Pauses a save between writing its data and writing its index."""

    def __init__(self, path, planner):
        super().__init__(path)
        self._planner = planner

    def finish(self, metadata, results):
        self._planner._stop("written")
        super().finish(metadata, results)


@pytest.mark.parametrize("when", ["planned", "written"])
@pytest.mark.parametrize("older_first", [True, False])
def test_saves_into_one_folder_that_overlap_lose_nothing(when, older_first, tmp_path):
    save(tmp_path, 1)
    older, newer = Slow("planned" if older_first else when), Slow(when if older_first else "none")
    state = [{"a": torch.full((1000,), float(n))} for n in (2, 3)]
    running = [dcp.async_save(state[0], storage_writer=SlowWriter(tmp_path, older), planner=older)]
    assert older.reached.wait(60)
    running.append(dcp.async_save(state[1], storage_writer=SlowWriter(tmp_path, newer), planner=newer))
    if older_first:
        assert newer.reached.wait(60)
        older.go.set()
        running[0].result()
        assert loaded(tmp_path) == 2
        newer.go.set()
        running[1].result()
        assert loaded(tmp_path) == 3
    else:
        running[1].result()
        assert loaded(tmp_path) == 3
        older.go.set()
        error = fails(running[0].result)
        assert isinstance(error, tensorferry.IncompleteCheckpoint)
        assert "began later" in str(error)
        assert loaded(tmp_path) == 3
    save(tmp_path, 4)
    assert loaded(tmp_path) == 4
    assert len(list(tmp_path.glob("*.safetensors"))) == len(list(tmp_path.iterdir())) - 1 == 2


def test_one_writer_in_two_saves_at_once_writes_two_files(tmp_path):
    first, second = Slow("begun"), Slow("none")
    writer = FileWriter(tmp_path)
    running = dcp.async_save({"a": torch.full((1000,), 1.0)}, storage_writer=writer, planner=first)
    assert first.reached.wait(60)
    dcp.save({"a": torch.full((1000,), 2.0)}, storage_writer=writer, planner=second, no_dist=True)
    assert loaded(tmp_path) == 2
    (written,) = tmp_path.glob("rank*")
    first.go.set()
    running.result()
    assert loaded(tmp_path) == 1
    assert list(tmp_path.glob("rank*")) != [written]


class Shrinking(dcp.DefaultSavePlanner):
    """Another thread gives a tensor another shape once the save is planned."""

    def resolve_data(self, write_item):
        return super().resolve_data(write_item).resize_(10)


@pytest.mark.parametrize("make", [FileWriter, lambda _: PeerWriter()], ids=["files", "peers"])
def test_a_tensor_of_another_shape_than_planned_is_not_committed(make, tmp_path):
    save(tmp_path, 1)
    writer, planner = make(tmp_path), Shrinking()
    state = {"a": torch.full((1000,), 2.0)}
    error = fails(lambda: dcp.save(state, storage_writer=writer, planner=planner, no_dist=True))
    assert isinstance(error, tensorferry.UnsupportedLeaf)
    assert "a cannot be saved (ValueError: its shape was (1000,) when the save was planned, and is (10,)" in str(error)
    getattr(writer, "shutdown", lambda: None)()
    assert loaded(tmp_path) == 1


@pytest.mark.parametrize("happens", ["freed", "given other memory"])
def test_a_tensor_that_goes_during_a_save_is_saved_as_it_was(happens, tmp_path):
    # The allocator gives memory of this size back to the system.
    state = {"a": torch.full((1 << 22,), 2.0), "b": torch.zeros(1)}

    class Letting(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            found = super().resolve_data(write_item)
            if write_item.index.fqn == "b":
                if happens == "freed":
                    self.state_dict.pop("a")
                else:
                    state["a"].data = torch.zeros(1 << 22)
                state.pop("a")
            return found

    writer = FileWriter(tmp_path)
    dcp.save(state, storage_writer=writer, planner=Letting(), no_dist=True)
    loaded = {"a": torch.zeros(1 << 22)}
    dcp.load(loaded, storage_reader=FileReader(tmp_path), no_dist=True)
    assert bool((loaded["a"] == 2).all())


@pytest.mark.parametrize("make", [FileWriter, lambda _: PeerWriter()], ids=["files", "peers"])
def test_tensors_without_memory_are_refused_by_name(make, tmp_path):
    freed = torch.zeros(8)
    freed.untyped_storage().resize_(0)
    for gone in (torch._efficientzerotensor(8), freed, torch.empty(8, device="meta")):
        writer = make(tmp_path)
        error = fails(lambda gone=gone, w=writer: dcp.save({"x": {"a": gone}}, storage_writer=w, no_dist=True))
        assert isinstance(error, tensorferry.UnsupportedLeaf)
        assert "x.a cannot be saved" in str(error)
        getattr(writer, "shutdown", lambda: None)()
    save(tmp_path, 1)
    target = torch.zeros(1000)
    target.untyped_storage().resize_(0)
    error = fails(lambda: dcp.load({"a": target}, storage_reader=FileReader(tmp_path), no_dist=True))
    assert isinstance(error, tensorferry.StateMismatch)
    assert "was freed" in str(error)


def test_folders_that_are_none(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/below", "dangling", "n" * 300):
        error = fails(lambda name=name: save(tmp_path / name, 1))
        assert isinstance(error, tensorferry.SystemRefused)
        assert name in str(error)
    (tmp_path / "linked").symlink_to(tmp_path / "real", target_is_directory=True)
    (tmp_path / "real").mkdir()
    for folder in (tmp_path / "linked", tmp_path / "with space/%20/ü", Path(os.path.relpath(tmp_path)) / "relative"):
        save(folder, 2)
        assert loaded(str(folder)) == 2


@pytest.mark.parametrize("damage", ["missing", "folder", "pipe"])
def test_a_file_the_index_names_that_is_none(damage, tmp_path):
    save(tmp_path, 1)
    (rank,) = tmp_path.glob("rank*")
    rank.unlink()
    {"missing": lambda: None, "folder": rank.mkdir, "pipe": lambda: os.mkfifo(rank)}[damage]()
    error = fails(lambda: loaded(tmp_path))
    assert isinstance(error, tensorferry.IncompleteCheckpoint)
    assert rank.name in str(error)


def test_the_default_device_is_not_where_bytes_go(tmp_path):
    saved = {"a": torch.arange(64.0).view(8, 8), "object": {"empty": b""}}
    found = {"a": torch.zeros(8, 8, dtype=torch.float64), "object": {"empty": b"x"}}
    with torch.device("meta"):
        dcp.save(saved, storage_writer=FileWriter(tmp_path), no_dist=True)
        dcp.load(found, storage_reader=FileReader(tmp_path), no_dist=True)
    assert torch.equal(found["a"], saved["a"].double())
    assert found["object"] == {"empty": b""}


def test_a_writer_that_was_shut_down_publishes_nothing():
    writer = PeerWriter()
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
    writer.shutdown()
    error = fails(lambda: dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True))
    assert isinstance(error, tensorferry.TransportClosed)
    with pytest.raises(tensorferry.InvalidArgument, match="nothing is published"):
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
