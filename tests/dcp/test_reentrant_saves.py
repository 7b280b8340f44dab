"""Saves and loads in the middle of a save or load of the same thread: of the same object they are refused."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter, own_errors
from tensorferry.errors import InvalidArgument

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore::FutureWarning"),
]


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


def test_a_reader_that_a_signal_handler_used_between_two_steps_of_a_load_mixes_nothing(tmp_path):
    for number in (1, 2):
        dcp.save(state(number), storage_writer=FileWriter(tmp_path / str(number)))
    reader, other, mine = FileReader(tmp_path / "1"), state(0), state(0)

    class Planner(dcp.DefaultLoadPlanner):
        def finish_plan(self, plan):
            signal.raise_signal(signal.SIGUSR1)
            return super().finish_plan(plan)

    before = signal.signal(
        signal.SIGUSR1, lambda *_: dcp.load(other, storage_reader=reader, checkpoint_id=tmp_path / "2")
    )
    try:
        with pytest.raises(InvalidArgument, match="in the middle of this one"), own_errors():
            dcp.load(mine, storage_reader=reader, planner=Planner())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (float(mine["w"][0]), other["step"]) == (0.0, 2)


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
