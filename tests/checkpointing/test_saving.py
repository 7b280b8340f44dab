"""``AsyncCheckpointer.save``: what its futures promise, how many saves run at once, and how it is called."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import threading

import pytest
import torch
from saves import MIB, WAIT_S, state_of, stopped, writer_of

from checkpoint_files import files_in, is_whole, resources
from tensorferry.checkpointing import AsyncCheckpointer, Stager, SyncCheckpointer
from tensorferry.errors import InvalidArgument, SystemRefused
from tensorferry.memory.shared import NoRoom
from tensorferry.storage.folder import read_index

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def test_the_futures_say_when_the_state_may_change_and_when_the_checkpoint_is_committed(opened, tmp_path) -> None:
    checkpointer = opened()
    state = state_of(1)
    staged, written = checkpointer.save(tmp_path / "a" / "b", state, step=7)
    assert isinstance(staged, concurrent.futures.Future)
    assert isinstance(written, concurrent.futures.Future)
    assert staged.result(WAIT_S) is None
    state["w"].fill_(9)
    assert written.result(WAIT_S) is None
    assert is_whole(tmp_path / "a" / "b", 1)
    index = read_index(tmp_path / "a" / "b")
    assert (index.step, index.world_size) == (7, 1)
    assert files_in(tmp_path / "a" / "b") == ["index.safetensors", index.files[0][0]]


def test_a_save_is_accepted_only_when_the_writer_holds_it_and_a_third_one_waits_for_the_first(opened, tmp_path) -> None:
    checkpointer = opened()
    checkpointer.save(tmp_path / "0", state_of(0))[1].result(WAIT_S)
    futures, third = [], threading.Event()

    def save_third() -> None:
        futures.append(checkpointer.save(tmp_path / "3", state_of(3)))
        third.set()

    with stopped(writer_of(checkpointer)):
        futures = [checkpointer.save(tmp_path / str(n), state_of(n)) for n in (1, 2)]
        thread = threading.Thread(target=save_third)
        thread.start()
        assert not third.wait(0.5), "the second generation is in use"
        assert not any(staged.done() or written.done() for staged, written in futures)
    thread.join(WAIT_S)
    for _, written in futures:
        written.result(WAIT_S)
    assert [is_whole(tmp_path / str(n), n) for n in range(4)] == [True] * 4


def test_the_memory_is_kept_from_save_to_save_and_is_two_generations_at_most(opened, tmp_path) -> None:
    gc.collect()  # other tests may have left memory to the collector
    checkpointer = opened()
    nbytes = 8 * MIB
    held = []
    for n in range(6):
        futures = [checkpointer.save(tmp_path / f"{n}-{k}", state_of(n, 8)) for k in range(2)]
        held.append(checkpointer._saver._stager.held)
        [written.result(WAIT_S) for _, written in futures]
    assert nbytes <= held[0] <= held[-1] <= 2 * nbytes + (1 << 16)
    mappings = resources()["mappings"]
    checkpointer.close()
    assert checkpointer._saver._stager.held == 0
    assert mappings == 2
    assert resources()["mappings"] == 0


@pytest.mark.parametrize("state", [{}, {"a": 1}, {"empty": torch.empty(0, 3)}, [torch.ones(2)], torch.ones(3)])
def test_states_without_bytes_and_states_that_are_no_dict_are_saved(state, opened, tmp_path) -> None:
    opened().save(tmp_path, state)[1].result(WAIT_S)
    assert read_index(tmp_path).world_size == 1


def test_a_limit_of_memory_for_one_generation_makes_a_save_wait_for_the_one_before(opened, tmp_path) -> None:
    checkpointer = opened(memory_limit=9 * MIB)
    for n in range(4):
        written = checkpointer.save(tmp_path / str(n), state_of(n, 8))[1]
        assert checkpointer._saver._stager.held < 9 * MIB
    written.result(WAIT_S)
    assert [is_whole(tmp_path / str(n), n) for n in range(4)] == [True] * 4


def test_a_state_beyond_the_limit_is_refused_and_the_next_one_is_saved(opened, tmp_path, monkeypatch) -> None:
    checkpointer = opened(memory_limit=4 * MIB)
    with pytest.raises(NoRoom, match=rf"needs {8 * MIB} bytes of shared memory, .* the limit is {4 * MIB}"):
        checkpointer.save(tmp_path / "a", state_of(1, 8))
    checkpointer.save(tmp_path / "b", state_of(2))[1].result(WAIT_S)
    assert is_whole(tmp_path / "b", 2)
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr("tensorferry.memory.shared._available_memory", lambda: 5 * MIB)
    with pytest.raises(SystemRefused, match=f"has {5 * MIB} available"):
        opened().save(tmp_path / "a", state_of(1, 8))


@pytest.mark.parametrize("make", [SyncCheckpointer, AsyncCheckpointer])
def test_arguments_of_a_save_that_cannot_be_used_are_named(make, tmp_path) -> None:
    with contextlib.closing(make()) as checkpointer:
        for path in ({}, 5, "", "http://host/a", f"{tmp_path}/a\ud800", f"{tmp_path}/a\0b"):
            with pytest.raises(InvalidArgument, match=r"path must be|not a path of this machine"):
                checkpointer.save(path, state_of(1))


def test_the_classes_are_torchs_where_torch_has_them() -> None:
    torchs = pytest.importorskip("torch.distributed.checkpoint._experimental")
    assert issubclass(AsyncCheckpointer, torchs.checkpointer.Checkpointer)
    assert issubclass(SyncCheckpointer, torchs.checkpointer.Checkpointer)
    assert issubclass(Stager, torchs.staging.CheckpointStager)


def test_arguments_that_cannot_be_used_are_named() -> None:
    for options, name in (
        ({"threads": 0}, "threads"),
        ({"cached": 1}, "cached"),
        ({"keep_last": 0}, "keep_last"),
        ({"keep_last": True}, "keep_last"),
        ({"patience": 0}, "patience"),
        ({"memory_limit": -1}, "memory_limit"),
        ({"rank": 1}, "rank and world_size"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"rank": 0, "world_size": 2}, "initialise torch.distributed"),
        ({"keeper": 5}, "keeper"),
    ):
        with pytest.raises(InvalidArgument, match=name):
            AsyncCheckpointer(**options)
