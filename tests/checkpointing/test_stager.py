"""Copies in shared memory: of accelerators in the background, page-locked, within what the machine has."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest
import torch

from checkpoint_files import tensors_of
from stand_in import StandIn, stand_in
from tensorferry.checkpointing.orders import Options
from tensorferry.checkpointing.ranks import Ranks
from tensorferry.checkpointing.saving import Saver
from tensorferry.checkpointing.shared_stager import SharedStager
from tensorferry.memory.shared import Budget, NoRoom

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


def test_where_the_system_refuses_to_lock_memory_it_is_pageable(device, caplog) -> None:
    device.refuses_to_pin = True
    stager = SharedStager(accelerator=device)
    for _ in range(2):
        snapshot = stager.stage({"w": on_device(device, 3)})
        snapshot.complete()
        memory = stager.handover("save", {}, snapshot).buffers[0]
        assert (torch.frombuffer(memory, dtype=torch.float32)[:MIB] == 3).all()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ulimit -l" in caplog.text


def test_many_small_tensors_and_a_large_one_are_copied_without_the_interpreter(monkeypatch) -> None:
    """While the bytes are copied, other threads run Python."""
    stager = SharedStager()
    state = {str(n): torch.full((n % 50,), float(n)) for n in range(3000)} | {"large": torch.arange(4.0 * MIB)}
    snapshot = stager.stage(state)
    rebuilt = snapshot.rebuild()
    assert all(torch.equal(rebuilt[key], value) for key, value in state.items())

    from tensorferry.memory import staging

    # Nobody asks for the interpreter: the other thread runs only where the copy gives it up.
    copying, ticks, ended = False, 0, threading.Event()
    real = staging.HostStager.copy_rows

    class Watched:
        def __init__(self, rows) -> None:
            self.copied_size, self._rows = rows.copied_size, rows

        def copy_into(self, *arguments, **options) -> None:
            nonlocal copying
            copying = True
            self._rows.copy_into(*arguments, **options)
            copying = False

    def tick() -> None:
        nonlocal ticks
        while not ended.is_set():
            ticks += copying
            time.sleep(0)

    monkeypatch.setattr(staging.HostStager, "copy_rows", lambda self, rows, without: real(self, Watched(rows), without))
    thread = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(2 * WAIT_S)
    try:
        thread.start()
        deadline = time.monotonic() + WAIT_S
        while not ticks and time.monotonic() < deadline:
            stager.stage(state)
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join(WAIT_S)
    assert ticks


def test_a_budget_counts_what_exists_and_forgets_what_is_gone() -> None:
    budget = Budget(3 * MIB)
    first, second = budget.make(MIB), budget.make(2 * MIB)
    assert budget.held == 3 * MIB
    assert budget.find(second.address) is second
    with pytest.raises(KeyError):
        budget.find(0)
    with pytest.raises(NoRoom, match="raise memory_limit="):
        budget.make(1)
    del first
    assert len(budget.make(MIB)) == MIB
