"""Copies in shared memory: of accelerators in the background, page-locked, within what the machine has."""

from __future__ import annotations

import gc

import pytest
import torch

from checkpoint_files import tensors_of
from stand_in import StandIn, stand_in
from tensorferry.checkpointing.orders import Options
from tensorferry.checkpointing.ranks import Ranks
from tensorferry.checkpointing.saving import Saver
from tensorferry.checkpointing.shared_stager import SharedStager

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]
WAIT_S = 30
MIB = 1 << 20


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
