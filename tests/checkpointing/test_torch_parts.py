"""Our parts in torch's own checkpointers and in ``dcp.async_save``, unchanged."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoint_files import files_in, is_whole, tensors_of
from tensorferry.checkpointing import CheckpointProcess, CheckpointWriter, Stager
from tensorferry.dcp import FileReader, FileWriter
from tensorferry.errors import TransportClosed
from tensorferry.storage.folder import read_index

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::FutureWarning", "ignore:TypedStorage"),
]
WAIT_S = 60


def state_of(value: float) -> dict:
    return {"w": torch.full((1000,), float(value)), "nested": {"step": int(value)}}


class _Reader:
    """Stands in for a reader, which torch's checkpointers ask for and these tests do not use."""


@pytest.fixture
def theirs():
    return pytest.importorskip("torch.distributed.checkpoint._experimental.checkpointer")


def test_torchs_async_checkpointer_works_with_our_stager_and_process(theirs, tmp_path) -> None:
    checkpointer = theirs.AsyncCheckpointer(
        checkpoint_stager=Stager(), checkpoint_process=CheckpointProcess(), reader=_Reader()
    )
    state = state_of(0)
    for n in range(4):
        state["w"].fill_(n)
        staged, written = checkpointer.save(str(tmp_path / str(n)), state)
        staged.result(WAIT_S)
        state["w"].fill_(99)
    written.result(WAIT_S)
    checkpointer.close()
    assert [is_whole(tmp_path / str(n), n) for n in range(4)] == [True] * 4


def test_a_last_save_is_not_lost_by_close(theirs, tmp_path) -> None:
    """torch's own process cancels it."""
    checkpointer = theirs.AsyncCheckpointer(
        checkpoint_stager=Stager(), checkpoint_process=CheckpointProcess(), reader=_Reader()
    )
    for n in range(2):
        checkpointer.save(str(tmp_path / str(n)), state_of(n))
    checkpointer.close()
    assert [is_whole(tmp_path / str(n), n) for n in range(2)] == [True] * 2


def test_our_process_stages_what_another_stager_gives_it(tmp_path) -> None:
    process = CheckpointProcess()
    state = state_of(1)
    written = process.write(state, str(tmp_path / "a"), anything="else")
    state["w"].fill_(5)
    written.result(WAIT_S)
    process.close()
    assert is_whole(tmp_path / "a", 1)


class _Calls:
    def __init__(self, folder) -> None:
        self.said: list = []
        self.folder = folder

    def pre_commit(self, path, **kwargs) -> None:
        names = files_in(self.folder)
        self.said.append(("pre", path, kwargs, len(names), "index.safetensors" in names))

    def execute_barrier(self) -> None:
        self.said.append(("barrier",))

    def post_commit(self, path, **kwargs) -> None:
        self.said.append(("post", path, kwargs, read_index(self.folder).step))


def test_torchs_sync_checkpointer_works_with_our_writer_and_calls_hooks_in_its_order(theirs, tmp_path) -> None:
    from torch.distributed.checkpoint._experimental.checkpoint_writer import CheckpointWriterConfig
    from torch.distributed.checkpoint._experimental.types import RankInfo

    calls = _Calls(tmp_path / "a")
    rank = RankInfo(global_rank=0, global_world_size=1)
    writer = CheckpointWriter(CheckpointWriterConfig(), rank, barrier=calls, commit_hook=calls)
    checkpointer = theirs.SyncCheckpointer(writer=writer, reader=_Reader())
    path = str(tmp_path / "a")
    assert checkpointer.save(path, state_of(3), step=7, extra="x") is None
    checkpointer.close()
    options = {"step": 7, "extra": "x"}
    assert calls.said == [("pre", path, options, 1, False), ("barrier",), ("post", path, options, 7)]
    assert is_whole(tmp_path / "a", 3)


def test_a_hook_that_fails_keeps_the_checkpoint_from_being_committed(tmp_path) -> None:
    calls = _Calls(tmp_path / "a")

    def fail(path, **kwargs) -> None:
        del path, kwargs
        raise ValueError("not now")

    calls.pre_commit = fail
    writer = CheckpointWriter(commit_hook=calls)
    with pytest.raises(ValueError, match="not now"):
        writer.write(str(tmp_path / "a"), state_of(1))
    assert files_in(tmp_path / "a") == []


@pytest.mark.usefixtures("theirs")
def test_parts_are_torchs_where_torch_has_them() -> None:
    from torch.distributed.checkpoint._experimental.checkpoint_process import CheckpointProcess as Process
    from torch.distributed.checkpoint._experimental.checkpoint_writer import CheckpointWriter as Writer
    from torch.distributed.checkpoint._experimental.staging import CheckpointStager

    assert issubclass(CheckpointProcess, Process)
    assert issubclass(CheckpointWriter, Writer)
    assert issubclass(Stager, CheckpointStager)


@pytest.mark.skipif(
    "async_stager" not in inspect.signature(dcp.async_save).parameters, reason="this torch takes no stager"
)
def test_dcp_async_save_works_with_our_stager_and_file_writer(tmp_path) -> None:
    from torch.distributed.checkpoint.staging import AsyncStager

    stager = Stager()
    assert isinstance(stager, AsyncStager)
    state = {"a": torch.arange(1000.0), "b": {"c": torch.ones(3, 4).t(), "n": 5}}
    for n in range(3):
        state["a"].fill_(n)
        saved = dcp.async_save(state, storage_writer=FileWriter(tmp_path / str(n)), async_stager=stager, no_dist=True)
        if not hasattr(saved, "upload_completion"):
            saved.result(WAIT_S)
        else:
            saved.staging_completion.result(WAIT_S)
            state["a"].fill_(99)
            saved.upload_completion.result(WAIT_S)
    stager.close()
    for n in range(3):
        target = {"a": torch.zeros(1000), "b": {"c": torch.zeros(3, 4).t(), "n": 0}}
        dcp.load(target, storage_reader=FileReader(tmp_path / str(n)), no_dist=True)
        assert (target["a"] == n).all()
        assert target["b"]["n"] == 5


def test_a_staged_state_is_not_overwritten_by_later_ones_while_somebody_has_it() -> None:
    """torch's stager reuses its buffers: there, the first result changes with the second stage."""
    with contextlib.closing(Stager()) as stager:
        staged = [stager.stage(state_of(n)).result(WAIT_S) for n in range(4)]
        for n, state in enumerate(staged):
            assert (state["w"] == n).all()
            assert state["nested"] == {"step": n}
        kept = staged[2]["w"]
        del staged, state
        stager.stage(state_of(7)).result(WAIT_S)
        assert (kept == 2).all()
    with pytest.raises(TransportClosed):
        stager.stage(state_of(1))


def test_what_was_saved_is_what_the_state_had(tmp_path) -> None:
    CheckpointWriter().write(state_of(4), str(tmp_path))
    assert torch.equal(tensors_of(tmp_path)["w"], state_of(4)["w"])
