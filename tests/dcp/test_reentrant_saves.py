"""Saves and loads in the middle of a save or load of the same object: the other one is refused, or this one."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter, own_errors
from tensorferry.errors import InvalidArgument
from tensorferry.storage import commits

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore::FutureWarning"),
]


def state(value: float) -> dict:
    return {"w": torch.full((1000,), value), "step": int(value)}


class Once:
    """Makes a call the first time that it is called, and keeps what it raises."""

    def __init__(self, call=None) -> None:
        self.call, self.raised = call, []

    def __call__(self, *_: object) -> None:
        call, self.call = self.call, None
        if call is not None:
            try:
                with own_errors():
                    call()
            except Exception as e:
                self.raised.append(e)


class Hooked:
    """Calls its hook while it is being pickled."""

    def __init__(self, hook) -> None:
        self.hook = hook

    def __reduce__(self):
        self.hook()
        return set, ()


@contextlib.contextmanager
def handled_by(call):
    before = signal.signal(signal.SIGUSR1, lambda *_: call())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupted(planner):
    """A planner during whose planning a signal arrives."""

    class Planner(planner):
        def finish_plan(self, plan):
            signal.raise_signal(signal.SIGUSR1)
            return super().finish_plan(plan)

    return Planner()


def loaded(path) -> float:
    found = state(0)
    with own_errors():
        dcp.load(found, storage_reader=FileReader(path))
    assert (found["w"] == found["step"]).all()
    return found["step"]


def refused(once) -> bool:
    [error] = once.raised
    # Callers may catch either.
    return isinstance(error, InvalidArgument) and isinstance(error, RuntimeError) and "in the middle" in str(error)


def test_a_file_writer_is_not_used_again_in_its_own_progress_and_another_one_is(tmp_path):
    once = Once()
    writer = FileWriter(tmp_path / "a", progress=once)
    once.call = lambda: dcp.save(state(2), storage_writer=writer, checkpoint_id=tmp_path / "b")
    with own_errors():
        dcp.save(state(1), storage_writer=writer)
    assert refused(once)
    once.call = lambda: dcp.save(state(4), storage_writer=FileWriter(tmp_path / "c"))
    dcp.save(state(3), storage_writer=writer, checkpoint_id=tmp_path / "d")
    assert len(once.raised) == 1
    assert [loaded(tmp_path / name) for name in "acd"] == [1, 4, 3]
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("where", ["by a handler", "in a thread, before the end"])
def test_a_save_that_another_one_with_its_writer_has_replaced_commits_nothing(tmp_path, where):
    def other():
        dcp.save(state(2), storage_writer=writer, checkpoint_id=tmp_path / "b", no_dist=True)

    late = threading.Thread(target=other)

    class Late(FileWriter):
        def finish(self, metadata, results):
            if threading.current_thread() is not late and where != "by a handler":
                late.start()
                late.join()
            super().finish(metadata, results)

    writer = Late(tmp_path / "a")
    planner = interrupted(dcp.DefaultSavePlanner) if where == "by a handler" else dcp.DefaultSavePlanner()
    with (
        handled_by(other),
        pytest.raises(InvalidArgument, match="has begun in the middle of this one"),
        own_errors(),
    ):
        dcp.save(state(1), storage_writer=writer, planner=planner)
    assert not (tmp_path / "a" / "index.safetensors").exists()
    assert loaded(tmp_path / "b") == 2


def test_the_end_of_a_save_is_not_entered_by_a_signal_handler_of_the_same_thread(tmp_path, monkeypatch):
    once = Once(lambda: dcp.save(state(2), storage_writer=FileWriter(tmp_path / "b")))
    monkeypatch.setattr(commits, "reached", lambda moment, _: once() if moment == "checked" else None)
    dcp.save(state(1), storage_writer=FileWriter(tmp_path / "a"))
    assert loaded(tmp_path / "a") == 1
    assert refused(once)


@contextlib.contextmanager
def two_checkpoints(kind, path):
    """The ids of two checkpoints, and what makes a reader."""
    with contextlib.ExitStack() as opened:
        ids = []
        for number in (1, 2):
            if kind == "peers":
                writer = PeerWriter(interface="127.0.0.1")
                opened.callback(writer.shutdown)
                dcp.save(state(number), storage_writer=writer)
                ids.append(writer.metadata())
            else:
                dcp.save(state(number), storage_writer=FileWriter(path / str(number)))
                ids.append(str(path / str(number)))
        yield ids, lambda **more: (PeerReader if kind == "peers" else FileReader)(ids[0], **more)


@pytest.mark.parametrize("kind", ["files", "peers"])
def test_a_reader_that_is_used_again_in_the_middle_of_a_load_mixes_nothing(tmp_path, kind):
    with two_checkpoints(kind, tmp_path) as (ids, make):
        # In a read, the other load is refused.
        once, other, mine = Once(), state(0), state(0)
        reader = make(progress=once)
        once.call = lambda: dcp.load(other, storage_reader=reader, checkpoint_id=ids[1])
        dcp.load(mine, storage_reader=reader)
        assert refused(once)
        assert (mine["step"], float(mine["w"][0]), other["step"]) == (1, 1.0, 0)
        # Between two steps, the other load is done, and this one is refused.
        mine = state(0)
        with (
            handled_by(lambda: dcp.load(other, storage_reader=reader, checkpoint_id=ids[1])),
            pytest.raises(InvalidArgument, match="in the middle of this one"),
            own_errors(),
        ):
            dcp.load(mine, storage_reader=reader, checkpoint_id=ids[0], planner=interrupted(dcp.DefaultLoadPlanner))
        assert (float(mine["w"][0]), other["step"]) == (0.0, 2)


def planned(writer, folder, rank, value):
    """A save that has begun: its planner and the plan of the rank."""
    planner = dcp.DefaultSavePlanner()
    writer.reset(folder)
    planner.set_up_planner({"ab"[rank]: torch.full((4,), value)}, writer.storage_meta(), rank == 0)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    return planner, writer.prepare_local_plan(planner.create_local_plan())


def test_a_rank_without_an_index_writes_nothing_into_the_save_in_the_middle_of_its_own(tmp_path):
    """Two ranks in one process: rank 1 begins a save in the middle of another one, and rank 0 commits it."""
    first, second = FileWriter(tmp_path / "outer"), FileWriter(tmp_path / "inner")
    outer_planner, outer = planned(first, tmp_path / "outer", 1, 1.0)
    [outer], _ = outer_planner.create_global_plan([outer])
    [outer] = second.prepare_global_plan([outer])
    begun = [planned(writer, tmp_path / "inner", rank, 2.0) for rank, writer in [(0, second), (1, first)]]
    planners = [planner for planner, _ in begun]
    plans, metadata = planners[0].create_global_plan([plan for _, plan in begun])
    plans = second.prepare_global_plan(plans)
    results = [writer.write_data(plans[rank], planners[rank]).wait() for rank, writer in enumerate([second, first])]
    second.finish(metadata, results)
    with pytest.raises(InvalidArgument, match="in the middle of this one"):
        first.write_data(outer, outer_planner)
    found = {"a": torch.zeros(4), "b": torch.zeros(4)}
    dcp.load(found, storage_reader=FileReader(tmp_path / "inner"), no_dist=True)
    assert found["b"].tolist() == [2.0] * 4


@pytest.mark.parametrize("other", ["ours", "torch"])
def test_what_another_save_has_committed_meanwhile_is_not_overwritten(tmp_path, other):
    def written(writer, planner, plan):
        [plan], metadata = planner.create_global_plan([plan])
        [plan] = writer.prepare_global_plan([plan])
        results = writer.write_data(plan, planner).wait()
        return lambda: writer.finish(metadata, [results])

    writer, earlier = (FileWriter(tmp_path, overwrite=False) for _ in range(2))
    # It begins earlier, and ends earlier.
    other_save = planned(earlier, tmp_path, 0, 2.0)
    finish = written(writer, *planned(writer, tmp_path, 0, 1.0))
    if other == "ours":
        written(earlier, *other_save)()
    else:
        dcp.save({"a": torch.full((4,), 2.0)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    with pytest.raises(InvalidArgument, match="Checkpoint already exists"):
        finish()
    found = {"a": torch.zeros(4)}
    dcp.load(found, storage_reader=FileReader(tmp_path), no_dist=True)
    assert found["a"].tolist() == [2.0] * 4
    assert len(list(tmp_path.glob("rank*.safetensors"))) == (other == "ours")


def test_a_peer_writer_is_not_used_again_in_the_middle_of_its_save(monkeypatch):
    writer = PeerWriter()
    once = Once(lambda: dcp.save(state(2), storage_writer=writer))
    with own_errors():
        dcp.save(state(1) | {"hooked": Hooked(once)}, storage_writer=writer)
    assert refused(once)
    found = state(0)
    dcp.load(found, storage_reader=PeerReader(writer.metadata()))
    assert found["step"] == 1

    # Between two steps of the save.
    finish = writer.finish

    def withdrawn(*args, **kwargs):
        writer.withdraw()
        finish(*args, **kwargs)

    monkeypatch.setattr(writer, "finish", withdrawn)
    with pytest.raises(InvalidArgument, match="in the middle of this save"), own_errors():
        dcp.save(state(3), storage_writer=writer)
    writer.shutdown()


def test_a_save_without_collectives_of_a_group_that_the_writer_does_not_know_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"give dcp.save's process_group to FileWriter"):
        FileWriter(tmp_path).set_up_storage_writer(True, rank=1, use_collectives=False)
