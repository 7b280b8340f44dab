"""Checkpointers with a keeper: a trainer that was killed goes on from memory."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint_ranks import ranks_of
from keepers import KeeperAtWork, eventually, loaded
from tensorferry.checkpointing import Keeper, make_async_checkpointer, make_sync_checkpointer
from tensorferry.checkpointing.keeper import connecting
from tensorferry.errors import InvalidArgument, TensorferryError
from tensorferry.memory.accelerator import ACCELERATOR
from tensorferry.memory.bounce import BounceBuffers
from tensorferry.pickles.allowlist import Allowed
from tensorferry.state.load import receive

pytestmark = pytest.mark.process


MIB = 1 << 20


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.INFO, "tensorferry")


def state_of(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(300, 301, generator=generator))
    moment = torch.randn(300, 301, generator=generator).t()
    return {"model": {"w": weight, "tied": weight}, "optimizer": {"m": moment, "step": seed}, "names": {"a", "b"}}


def assert_same(found: dict, expected: dict) -> None:
    assert torch.equal(found["model"]["w"], expected["model"]["w"])
    assert found["model"]["tied"] is found["model"]["w"]
    assert torch.equal(found["optimizer"]["m"], expected["optimizer"]["m"])
    assert found["optimizer"]["step"] == expected["optimizer"]["step"]


def held(count: int) -> None:
    with Keeper() as keeper:
        eventually("it is kept", lambda: len(keeper.held()) == count)


def size_of_copy(state: dict, tmp_path: Path) -> int:
    """Returns the bytes of shared memory that a copy of ``state`` takes."""
    probe = make_async_checkpointer()
    probe.save(tmp_path / "probe" / "1", state)[1].result()
    size = probe._saver._stager.held
    probe.close()
    return size


@pytest.mark.parametrize("make", [make_async_checkpointer, make_sync_checkpointer])
def test_a_load_comes_from_the_keeper_and_else_from_the_disk(folder, tmp_path, caplog, make):
    path = tmp_path / "run" / "step-1"
    with KeeperAtWork(folder) as process:
        checkpointer = make(keeper="default")
        saved = checkpointer.save(path, state_of(1), step=41)
        if saved is not None:
            saved[1].result()
        held(1)
        assert_same(checkpointer.load(path), state_of(1))
        assert "from the keeper" in caplog.text
        with Keeper() as keeper:
            assert [one.step for one in keeper.held()] == [41]
        # In place, into a part of the state, and without the disk.
        shutil.rmtree(path)
        live = {"model": {"w": torch.zeros(300, 301)}}
        address = live["model"]["w"].data_ptr()
        assert checkpointer.load(path, live)["model"]["w"].data_ptr() == address
        assert torch.equal(live["model"]["w"], state_of(1)["model"]["w"])
        process.kill()
        caplog.clear()
        with pytest.raises(TensorferryError):
            checkpointer.load(path)
        assert "from the disk" in caplog.text
        # Saving goes on, and what is on the disk is found.
        saved = checkpointer.save(path, state_of(2))
        if saved is not None:
            saved[1].result()
        assert_same(checkpointer.load(path), state_of(2))
        checkpointer.close()


def test_what_is_committed_decides(folder, tmp_path, caplog):
    path = tmp_path / "run" / "last"
    with KeeperAtWork(folder):
        kept, plain = make_async_checkpointer(keeper="default"), make_async_checkpointer()
        kept.save(path, state_of(1))[1].result()
        held(1)
        # A newer one is written without the keeper.
        plain.save(path, state_of(2))[1].result()
        assert_same(kept.load(path), state_of(2))
        assert "from the disk" in caplog.text
        for checkpointer in (kept, plain):
            checkpointer.close()


def test_a_healthy_save_and_load_log_no_warning(folder, tmp_path, caplog):
    path = tmp_path / "run" / "step-1"

    def said() -> list[tuple[int, str]]:
        found = [(r.levelno, r.getMessage()) for r in caplog.records if r.name.startswith("tensorferry")]
        caplog.clear()
        return found

    with KeeperAtWork(folder) as keeper:
        checkpointer = make_async_checkpointer(keeper="default")
        checkpointer.save(path, state_of(1))[1].result()
        held(1)
        assert said() == []
        assert_same(checkpointer.load(path), state_of(1))
        ((level, line),) = said()
        assert level == logging.INFO
        assert line.startswith(f"loading step 1 of {path} from the keeper: ")
        checkpointer.close()
        assert keeper.end() == 0
        lines = keeper.said().splitlines()
    assert len(lines) == 3, lines
    assert " INFO the keeper default holds up to " in lines[0]
    assert " INFO step 1 of rank 0 of " in lines[1]
    assert " is kept: " in lines[1]
    assert " INFO the keeper default ends: SIGTERM" in lines[2]
    # Without a keeper, to files alone.
    plain = make_sync_checkpointer()
    plain.save(path, state_of(2))
    assert_same(plain.load(path), state_of(2))
    plain.close()
    assert said() == []


def test_the_memory_of_generations_is_used_again(folder, tmp_path):
    with KeeperAtWork(folder, "--generations", "2"):
        checkpointer = make_async_checkpointer(keeper="default")
        sizes = []
        for number in range(12):
            checkpointer.save(tmp_path / "run" / f"step-{number}", state_of(number))[1].result()
            held(min(number + 1, 2))
            sizes.append(checkpointer._saver._stager.held)
        assert sizes[-1] == sizes[5]
        assert_same(checkpointer.load(checkpointer.latest(tmp_path / "run")), state_of(11))
        checkpointer.close()


def test_a_trainer_without_memory_for_a_copy_takes_it_from_the_keeper(folder, tmp_path):
    with KeeperAtWork(folder, "--generations", "9") as process:
        # Room for two copies, of which the keeper would take both.
        size = size_of_copy(state_of(0), tmp_path)
        checkpointer = make_async_checkpointer(keeper="default", memory_limit=2 * size)
        for number in range(6):
            checkpointer.save(tmp_path / "run" / f"step-{number}", state_of(number))[1].result()
        assert "is evicted" in process.said()
        assert_same(checkpointer.load(tmp_path / "run" / "step-5"), state_of(5))
        checkpointer.close()


def test_a_stopped_keeper_fails_no_save_and_takes_no_more_memory(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(connecting, "OFFER_S", 0.3)
    size = size_of_copy(state_of(0), tmp_path)
    with KeeperAtWork(folder, "--generations", "1") as process, Keeper() as keeper:
        checkpointers = {"small": make_async_checkpointer(keeper="default", memory_limit=3 * size)}
        checkpointers["large"] = make_async_checkpointer(keeper="default")

        def save(number: int) -> None:
            for name, checkpointer in checkpointers.items():
                checkpointer.save(tmp_path / name / f"step-{number}", state_of(number))[1].result()

        def is_kept(number: int) -> bool:
            return [Path(one.path).name for one in keeper.held()] == [f"step-{number}"] * 2

        save(0)
        eventually("both are kept", lambda: is_kept(0))
        process.process.send_signal(signal.SIGSTOP)
        try:
            for number in range(1, 10):
                save(number)
            # What it held, two that it was offered, and two for saves.
            assert checkpointers["large"]._saver._stager.held <= 5 * size
            assert checkpointers["small"]._saver._stager.held <= 3 * size
        finally:
            process.process.send_signal(signal.SIGCONT)
        eventually("what it was offered is kept", lambda: is_kept(2))
        for one in keeper.held():
            assert_same(loaded(keeper, one), state_of(2))
        save(10)
        eventually("later saves are kept", lambda: is_kept(10))
        for checkpointer in checkpointers.values():
            checkpointer.close()


@pytest.mark.parametrize("network", [False, True])
def test_who_reads_from_the_keeper_fails_no_save(folder, tmp_path, network):
    """Slow readers have memory that the trainer needs: those of this node keep it, those of others are cut."""

    def large(number: int) -> dict:
        return {"w": torch.full((8 * MIB // 4,), float(number))}

    with KeeperAtWork(folder, "--generations", "1") as process, Keeper() as keeper, contextlib.ExitStack() as stack:
        limit = 3 * size_of_copy(large(0), tmp_path)
        checkpointer = make_async_checkpointer(keeper="default", memory_limit=limit)
        reading = {}
        for number in range(6):
            checkpointer.save(tmp_path / "run" / str(number), large(number), step=number)[1].result()
            one = eventually("it is kept", lambda number=number: [s for s in keeper.held() if s.step == number])[0]
            if network:
                stack.enter_context(urllib.request.urlopen(f"{one.metadata}{number}.safetensors", timeout=60))
            elif number < 2:
                reading[number] = keeper.open(one)
        for number, source in reading.items():
            state, _, _ = receive(source, Allowed(), None, BounceBuffers(ACCELERATOR))
            assert torch.equal(state["w"], large(number)["w"])
        checkpointer.close()
        assert "Traceback" not in process.said()


def test_latest_finds_what_was_never_written(folder, tmp_path):
    with KeeperAtWork(folder):
        checkpointer = make_async_checkpointer(keeper="default")
        assert checkpointer.latest(tmp_path / "run") is None
        for number in (1, 2):
            checkpointer.save(tmp_path / "run" / f"step-{number}", state_of(number))[1].result()
        held(2)
        shutil.rmtree(tmp_path / "run" / "step-2")
        newest = checkpointer.latest(tmp_path / "run")
        assert newest == str(tmp_path / "run" / "step-2")
        assert_same(checkpointer.load(newest), state_of(2))
        checkpointer.close()
    plain = make_async_checkpointer()
    assert plain.latest(tmp_path / "run") == str(tmp_path / "run" / "step-1")
    plain.close()


@pytest.mark.parametrize("who", ["itself", "another"])
def test_what_latest_has_found_is_not_loaded_instead_of_a_later_save(folder, tmp_path, who):
    path = tmp_path / "run" / "last"
    with KeeperAtWork(folder):
        checkpointer = make_async_checkpointer(keeper="default")
        checkpointer.save(path, state_of(1))[1].result()
        held(1)
        assert checkpointer.latest(tmp_path / "run") == str(path)
        assert_same(checkpointer.load(path), state_of(1))
        saving = checkpointer if who == "itself" else make_async_checkpointer(keeper="default")
        saving.save(path, state_of(2))[1].result()
        held(2)
        assert_same(checkpointer.load(path), state_of(2))
        assert_same(checkpointer.load(checkpointer.latest(tmp_path / "run")), state_of(2))
        saving.close()
        checkpointer.close()


def test_latest_finds_what_was_never_written_through_a_link(folder, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    with KeeperAtWork(folder):
        checkpointer = make_async_checkpointer(keeper="default")
        checkpointer.save(tmp_path / "run" / "step-1", state_of(1))[1].result()
        held(1)
        shutil.rmtree(tmp_path / "disk" / "step-1")
        newest = checkpointer.latest(tmp_path / "run")
        assert newest == str(tmp_path / "disk" / "step-1")
        assert_same(checkpointer.load(tmp_path / "run" / "step-1"), state_of(1))
        checkpointer.close()


def test_arguments_are_checked(folder):
    with pytest.raises(InvalidArgument, match="name must be"):
        make_async_checkpointer(keeper="../x")
    assert not folder.exists()


def train(rank: int, root: str, phase: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/store-{phase}", rank=rank, world_size=2)
    checkpointer = make_async_checkpointer(keeper=f"node{rank}")
    run = os.path.join(root, "run")
    if phase == "first":
        for number in range(3):
            checkpointer.save(os.path.join(run, f"step-{number}"), state_of(10 * number + rank))[1].result()
        print("saved", flush=True)
        signal.pause()
    newest = checkpointer.latest(run)
    state = checkpointer.load(newest)
    assert torch.equal(state["model"]["w"], state_of(20 + rank)["model"]["w"]), newest
    print(newest, flush=True)
    checkpointer.close()
    dist.destroy_process_group()


@pytest.mark.nightly
def test_two_ranks_that_were_killed_go_on_from_two_keepers(folder, tmp_path):
    """Each rank has a keeper of its own, which stands for its node; nothing is left on the disk."""
    with KeeperAtWork(folder, name="node0"), KeeperAtWork(folder, name="node1"):
        with ranks_of(2, train, str(tmp_path), "first") as first:
            for rank in first:
                # Gloo of torch 2.8 writes to stdout too.
                eventually("a rank has saved", lambda rank=rank: "saved" in rank.said())
            for number in range(2):
                with Keeper(f"node{number}") as keeper:
                    eventually(
                        "all is kept", lambda keeper=keeper: any(s.path.endswith("step-2") for s in keeper.held())
                    )
            for rank in first:
                rank.kill()
        shutil.rmtree(tmp_path / "run")
        with ranks_of(2, train, str(tmp_path), "second") as second:
            for rank in second:
                assert rank.end()[-1] == str(tmp_path / "run" / "step-2")
