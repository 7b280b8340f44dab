"""Saves and loads in the middle of a save or load of the same thread: of the same object they are refused."""

from __future__ import annotations

import contextlib
import inspect
import signal
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter, own_errors
from tensorferry.errors import InvalidArgument

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore::FutureWarning"),
]

#: Whether torch saves without the ranks' knowing of each other.
ALONE = "use_collectives" in inspect.signature(dcp.save).parameters


def state(value: float) -> dict:
    return {"w": torch.full((1000,), value), "step": int(value)}


class Once:
    """Makes a call the first time that it is called, and keeps what it raises."""

    def __init__(self) -> None:
        self.call, self.raised = None, []

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


def loaded(path) -> float:
    found = state(0)
    with own_errors():
        dcp.load(found, storage_reader=FileReader(path))
    assert (found["w"] == found["step"]).all()
    return found["step"]


def test_a_file_writer_is_not_used_again_in_its_own_progress_and_another_one_is(tmp_path):
    once = Once()
    writer = FileWriter(tmp_path / "a", progress=once)
    once.call = lambda: dcp.save(state(2), storage_writer=writer, checkpoint_id=tmp_path / "b")
    with own_errors():
        dcp.save(state(1), storage_writer=writer)
    [error] = once.raised
    assert isinstance(error, InvalidArgument)
    assert "in the middle" in str(error)
    once.call = lambda: dcp.save(state(4), storage_writer=FileWriter(tmp_path / "c"))
    dcp.save(state(3), storage_writer=writer, checkpoint_id=tmp_path / "d")
    assert len(once.raised) == 1
    assert [loaded(tmp_path / name) for name in "acd"] == [1, 4, 3]
    assert not (tmp_path / "b").exists()


def test_a_file_writer_that_a_signal_handler_used_between_two_steps_of_a_save_commits_nothing_wrong(tmp_path):
    writer = FileWriter(tmp_path / "a")

    class Planner(dcp.DefaultSavePlanner):
        def finish_plan(self, plan):
            signal.raise_signal(signal.SIGUSR1)
            return super().finish_plan(plan)

    before = signal.signal(
        signal.SIGUSR1, lambda *_: dcp.save(state(2), storage_writer=writer, checkpoint_id=tmp_path / "b")
    )
    try:
        with pytest.raises(InvalidArgument, match="in the middle of this one"), own_errors():
            dcp.save(state(1), storage_writer=writer, planner=Planner())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert loaded(tmp_path / "b") == 2


def test_the_end_of_a_save_is_not_entered_by_a_signal_handler_of_the_same_thread(tmp_path, monkeypatch):
    raised = []

    def handle(*_):
        try:
            with own_errors():
                dcp.save(state(2), storage_writer=FileWriter(tmp_path / "b"))
        except InvalidArgument as e:
            raised.append(str(e))

    from tensorferry.storage import commits

    calls = []

    def interrupted(moment, _):
        calls.append(moment)
        if calls.count("checked") == 1 and moment == "checked":
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(commits, "reached", interrupted)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        dcp.save(state(1), storage_writer=FileWriter(tmp_path / "a"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert loaded(tmp_path / "a") == 1
    assert len(raised) == 1
    assert "in the middle" in raised[0]


@pytest.mark.parametrize("kind", ["files", "peers"])
def test_a_reader_is_not_used_again_in_its_own_progress(tmp_path, kind):
    once = Once()
    with_peers = kind == "peers"
    writers = [PeerWriter() for _ in range(2)] if with_peers else []
    ids = []
    for number in range(2):
        if with_peers:
            dcp.save(state(number + 1), storage_writer=writers[number])
            ids.append(writers[number].metadata())
        else:
            dcp.save(state(number + 1), storage_writer=FileWriter(tmp_path / str(number)))
            ids.append(str(tmp_path / str(number)))
    reader = (PeerReader if with_peers else FileReader)(ids[0], progress=once)
    other, mine = state(0), state(0)
    once.call = lambda: dcp.load(other, storage_reader=reader, checkpoint_id=ids[1])
    dcp.load(mine, storage_reader=reader)
    [error] = once.raised
    assert isinstance(error, InvalidArgument)
    assert "in the middle" in str(error)
    assert (mine["step"], float(mine["w"][0]), other["step"]) == (1, 1.0, 0)
    for writer in writers:
        writer.shutdown()


@pytest.mark.parametrize(
    "kind",
    [
        "files",
        "peers",
        "peers that do not relay",
        pytest.param("files of each rank", marks=pytest.mark.skipif(not ALONE, reason="torch 2.8 has no such saves")),
    ],
)
def test_a_reader_that_a_signal_handler_used_between_two_steps_of_a_load_mixes_nothing(tmp_path, kind):
    with contextlib.ExitStack() as opened:
        ids = []
        for number in (1, 2):
            if "peers" in kind:
                writer = PeerWriter(interface="127.0.0.1")
                opened.callback(writer.shutdown)
                dcp.save(state(number), storage_writer=writer)
                ids.append(writer.metadata())
            else:
                own = kind == "files of each rank"
                writer = FileWriter(tmp_path / str(number))
                dcp.save(state(number), storage_writer=writer, **({"use_collectives": False} if own else {}))
                ids.append(str(tmp_path / str(number)))
        relay = kind != "peers that do not relay"
        reader = PeerReader(ids[0], relay=relay) if "peers" in kind else FileReader(ids[0])
        other, mine = state(0), state(0)

        class Planner(dcp.DefaultLoadPlanner):
            def finish_plan(self, plan):
                signal.raise_signal(signal.SIGUSR1)
                return super().finish_plan(plan)

        before = signal.signal(signal.SIGUSR1, lambda *_: dcp.load(other, storage_reader=reader, checkpoint_id=ids[1]))
        opened.callback(signal.signal, signal.SIGUSR1, before)
        with pytest.raises(InvalidArgument, match="in the middle of this one"), own_errors():
            dcp.load(mine, storage_reader=reader, planner=Planner())
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


def written(writer, planner, plan):
    """Writes the file of the one rank of a save; returns what finishes it."""
    [plan], metadata = planner.create_global_plan([plan])
    [plan] = writer.prepare_global_plan([plan])
    results = writer.write_data(plan, planner).wait()
    return lambda: writer.finish(metadata, [results])


@pytest.mark.parametrize("other", ["ours", "torch"])
def test_what_another_save_has_committed_meanwhile_is_not_overwritten(tmp_path, other):
    writer, theirs = (FileWriter(tmp_path, overwrite=False) for _ in range(2))
    # It begins earlier, and ends earlier.
    other_save = planned(theirs, tmp_path, 0, 2.0)
    finish = written(writer, *planned(writer, tmp_path, 0, 1.0))
    if other == "ours":
        written(theirs, *other_save)()
    else:
        dcp.save({"a": torch.full((4,), 2.0)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    with pytest.raises(InvalidArgument, match="Checkpoint already exists"):
        finish()
    found = {"a": torch.zeros(4)}
    dcp.load(found, storage_reader=FileReader(tmp_path), no_dist=True)
    assert found["a"].tolist() == [2.0] * 4
    assert len(list(tmp_path.glob("rank*.safetensors"))) == (other == "ours")


def test_a_thread_that_has_begun_no_save_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer, called = FileWriter(tmp_path / "a"), []
    planner, plan = planned(writer, tmp_path / "a", 0, 1.0)
    [plan] = writer.prepare_global_plan(planner.create_global_plan([plan])[0])

    def elsewhere():
        for call in (lambda: writer.write_data(plan, planner), writer.rank_file, writer.go_on):
            with pytest.raises(InvalidArgument, match="this thread has begun no save"):
                call()
            called.append(call)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(called) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_peer_writer_is_not_used_again_in_the_middle_of_its_save(monkeypatch):
    once, writer = Once(), PeerWriter()
    once.call = lambda: dcp.save(state(2), storage_writer=writer)
    with own_errors():
        dcp.save(state(1) | {"hooked": Hooked(once)}, storage_writer=writer)
    [error] = once.raised
    assert isinstance(error, InvalidArgument)
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
