"""Overlapping saves, tensors without memory, and paths that are not folders."""

from __future__ import annotations

import threading

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


class Slow(FileWriter):
    """Pauses a save that has begun, before or after its data is written."""

    def __init__(self, path, when):
        super().__init__(path)
        self._when = when
        self.reached, self.go = threading.Event(), threading.Event()

    def _stop(self, when):
        if when == self._when:
            self.reached.set()
            assert self.go.wait(60)

    def write_data(self, plan, planner):
        self._stop("planned")
        return super().write_data(plan, planner)

    def finish(self, metadata, results):
        self._stop("written")
        super().finish(metadata, results)


@pytest.mark.parametrize("when", ["planned", "written"])
@pytest.mark.parametrize("older_first", [True, False])
def test_saves_into_one_folder_that_overlap_lose_nothing(when, older_first, tmp_path):
    save(tmp_path, 1)
    older = Slow(tmp_path, "planned" if older_first else when)
    newer = Slow(tmp_path, when if older_first else "none")
    running = []
    for number, writer in ((2, older), (3, newer)):
        running.append(dcp.async_save({"a": torch.full((1000,), float(number))}, storage_writer=writer))
        assert writer is newer or writer.reached.wait(60)
    if older_first:
        assert newer.reached.wait(60)
        older.go.set()
        running[0].result()
        assert loaded(tmp_path) == 2
        newer.go.set()
        running[1].result()
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
