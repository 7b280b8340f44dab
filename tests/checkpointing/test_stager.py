"""Copies in shared memory: of accelerators in the background, page-locked, within what the machine has."""

from __future__ import annotations

import contextlib
import gc
import inspect

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saves import MIB, WAIT_S, state_of

from checkpoint_files import tensors_of
from stand_in import StandIn, stand_in
from tensorferry.checkpointing import Stager
from tensorferry.checkpointing.orders import Options
from tensorferry.checkpointing.ranks import Ranks
from tensorferry.checkpointing.saving import Saver
from tensorferry.checkpointing.shared_stager import SharedStager
from tensorferry.dcp import FileReader, FileWriter
from tensorferry.errors import InvalidArgument, TransportClosed
from tensorferry.memory.shared import NoRoom

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::FutureWarning", "ignore:TypedStorage"),
]


@pytest.fixture
def device():
    with stand_in() as made:
        yield made


def on_device(device: StandIn, value: float, count: int = MIB) -> torch.Tensor:
    tensor = torch.full((count,), float(value))
    device.adopt(tensor)
    return tensor


def test_state_on_an_accelerator_is_copied_in_the_background_as_it_was_when_save_was_called(device, tmp_path) -> None:
    saver = Saver(Ranks(0, 1), Options(), SharedStager(accelerator=device))
    state = {"w": on_device(device, 1), "host": torch.ones(10)}
    device.hold_new = True
    with device.simulation():
        staged, written = saver.save(state, tmp_path / "a")
        assert not staged.done()
        state["host"].fill_(5)
        # Work of the trainer that comes after the save, on its own stream, and waits for the copy: what a trainer that
        # looks at the first future does.
        device.release()
        staged.result(WAIT_S)
        state["w"].fill_(7)
    written.result(WAIT_S)
    found = tensors_of(tmp_path / "a")
    assert (found["w"] == 1).all()
    assert (found["host"] == 1).all()
    assert device.outside == ["aten::fill_"], "that of the trainer, and nothing of ours"
    device.outside.clear()
    saver.close()


def test_a_copy_that_fails_fails_both_futures_and_the_next_save_works(device, tmp_path) -> None:
    saver = Saver(Ranks(0, 1), Options(), SharedStager(accelerator=device))
    state = {"w": on_device(device, 1)}
    device.fails = lambda number: number == 0
    futures = saver.save(state, tmp_path / "a")
    for future in futures:
        with pytest.raises(RuntimeError, match="the device is lost"):
            future.result(WAIT_S)
    assert not (tmp_path / "a").exists()
    for stream in device.side:
        stream.error = None
    saver.save(state, tmp_path / "b")[1].result(WAIT_S)
    assert (tensors_of(tmp_path / "b")["w"] == 1).all()
    saver.close()


def test_memory_for_copies_off_an_accelerator_is_page_locked_and_unlocked_when_it_goes(device) -> None:
    stager = SharedStager(accelerator=device)
    snapshots = [stager.stage({"w": on_device(device, n), "host": torch.ones(1000)}) for n in range(2)]
    for snapshot in snapshots:
        assert not snapshot.is_complete
        snapshot.complete()
        assert snapshot.is_complete
        given = stager.handover("save", {}, snapshot)
        assert [buffer.address in device.locked for buffer in given.buffers].count(True) == 1
    assert len(device.locked) == 2
    del snapshot, snapshots, given
    gc.collect()
    stager.stage({"w": on_device(device, 1)})
    assert len(device.locked) == 2, "they are kept for the next copies"
    stager.close()
    gc.collect()
    assert device.locked == {}
    assert stager.held == 0


class _Keeper:
    """A keeper that counts, and keeps what it is offered until it is told to release."""

    def __init__(self, fails: bool = False) -> None:
        self.offered: list = []
        self.fails = fails
        self.closed = 0

    def offer(self, given, released) -> None:
        if self.fails:
            raise ConnectionError("the keeper is gone")
        self.offered.append((given, released))

    def let_go(self) -> bool:
        if self.fails:
            raise ConnectionError("the keeper is gone")
        if self.offered:
            self.offered.pop(0)[1]()
            return True
        return False

    def close(self) -> None:
        self.closed += 1


def saver(keeper: _Keeper, memory_limit: int | None = None):
    return contextlib.closing(Saver(Ranks(0, 1), Options(), SharedStager(memory_limit), keeper))


def test_memory_that_a_keeper_holds_is_not_used_again(tmp_path) -> None:
    keeper = _Keeper()
    with saver(keeper) as saves:
        for n in range(4):
            saves.save(state_of(n), tmp_path / str(n))[1].result(WAIT_S)
        while len(keeper.offered) < 4:
            pass
        for n in range(4):
            given, released = keeper.offered.pop(0)
            assert (given.kind, given.fields["path"]) == ("keep", str(tmp_path / str(n)))
            memory = torch.frombuffer(given.buffers[0], dtype=torch.float32)
            assert (memory[: MIB // 4] == n).all()
            del given, memory
            released()
        held = saves._stager.held
        saves.save(state_of(0), tmp_path / "0")[1].result(WAIT_S)
        assert saves._stager.held <= held
    assert keeper.closed == 1


def test_a_keeper_lets_go_of_memory_that_a_save_needs(tmp_path) -> None:
    keeper = _Keeper()
    with saver(keeper, 20 * MIB) as saves:
        for n in range(6):
            saves.save(state_of(n, 4), tmp_path / str(n))[1].result(WAIT_S)
        with pytest.raises(NoRoom):
            saves.save(state_of(1, 40), tmp_path / "x")
    assert not keeper.offered


def test_a_keeper_and_a_store_do_not_go_together() -> None:
    pytest.importorskip("obstore")
    with saver(_Keeper()) as saves, pytest.raises(InvalidArgument, match="a keeper holds what is saved into folders"):
        saves.save(state_of(1), "s3://bucket/a")


def test_a_keeper_that_fails_never_reaches_the_trainer(tmp_path, caplog) -> None:
    with saver(_Keeper(fails=True)) as saves:
        for n in range(3):
            saves.save(state_of(n), tmp_path / str(n))[1].result(WAIT_S)
    assert [record.message for record in caplog.records if "keeper" in record.message] == [
        "the keeper cannot be used, saving goes on without it: ConnectionError: the keeper is gone"
    ]


@pytest.mark.skipif(
    "async_stager" not in inspect.signature(dcp.async_save).parameters, reason="this torch takes no stager"
)
def test_dcp_async_save_works_with_our_stager_and_file_writer(tmp_path) -> None:
    from torch.distributed.checkpoint.staging import AsyncStager

    stager = Stager()
    assert isinstance(stager, AsyncStager)
    state = {"a": torch.ones(1000), "b": {"c": torch.ones(3, 4).t(), "n": 5}}
    saved = dcp.async_save(state, storage_writer=FileWriter(tmp_path), async_stager=stager, no_dist=True)
    if hasattr(saved, "upload_completion"):
        saved.staging_completion.result(WAIT_S)
        state["a"].fill_(99)
        saved = saved.upload_completion
    saved.result(WAIT_S)
    stager.close()
    target = {"a": torch.zeros(1000), "b": {"c": torch.zeros(3, 4).t(), "n": 0}}
    dcp.load(target, storage_reader=FileReader(tmp_path), no_dist=True)
    assert (target["a"] == 1).all()
    assert target["b"]["n"] == 5


def test_a_staged_state_is_not_overwritten_by_later_ones_while_somebody_has_it() -> None:
    """torch's stager reuses its buffers: there, the first result changes with the second stage."""
    with contextlib.closing(Stager()) as stager:
        staged = [stager.stage(state_of(n)).result(WAIT_S) for n in range(4)]
        for n, state in enumerate(staged):
            assert (state["w"] == n).all()
            assert state["step"] == n
        kept = staged[2]["w"]
        del staged, state
        stager.stage(state_of(7)).result(WAIT_S)
        assert (kept == 2).all()
    with pytest.raises(TransportClosed):
        stager.stage(state_of(1))
