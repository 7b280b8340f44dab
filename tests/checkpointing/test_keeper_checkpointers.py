"""Checkpointers with a keeper: a trainer that was killed goes on from memory."""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from checkpoint_files import is_whole
from checkpoint_loads import load_state
from checkpoint_ranks import ranks_of, run
from keepers import PATIENCE, KeeperAtWork, eventually, loaded
from rank_worker import SHARDED, TENSORS
from tensorferry import cli
from tensorferry.checkpointing import (
    AsyncCheckpointer,
    Keeper,
    SyncCheckpointer,
    latest_checkpoint,
    peer_metadata,
)
from tensorferry.checkpointing.keeper import place
from tensorferry.dcp import PeerReader
from tensorferry.errors import InvalidArgument, TensorferryError

pytestmark = pytest.mark.process

SECRET = "a secret of more than sixteen bytes"


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


def save(checkpointer, path: Path, seed: int, **options) -> None:
    saved = checkpointer.save(path, state_of(seed), **options)
    if saved is not None:
        saved[1].result()


@pytest.mark.parametrize("make", [AsyncCheckpointer, SyncCheckpointer])
def test_a_load_comes_from_the_keeper_and_else_from_the_disk(folder, tmp_path, caplog, make):
    path = tmp_path / "run" / "step-1"
    with KeeperAtWork(folder) as process:
        checkpointer = make(keeper="default")
        assert checkpointer.latest(tmp_path / "run") is None
        caplog.clear()
        save(checkpointer, path, 1, step=41)
        held(1)
        assert_same(checkpointer.load(path), state_of(1))
        # A healthy save and load is one line.
        (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("tensorferry")]
        assert line.startswith(f"loading step 41 of {path} from the keeper: ")
        # In place, into a part of the state, and without the disk; by another name of the folder, too.
        shutil.rmtree(path)
        (tmp_path / "link").symlink_to("run")
        assert checkpointer.latest(tmp_path / "link") == str(path)
        live = {"model": {"w": torch.zeros(300, 301)}}
        address = live["model"]["w"].data_ptr()
        assert checkpointer.load(tmp_path / "link" / "step-1", live)["model"]["w"].data_ptr() == address
        assert torch.equal(live["model"]["w"], state_of(1)["model"]["w"])
        process.kill()
        with pytest.raises(TensorferryError):
            checkpointer.load(path)
        assert "from the disk" in caplog.text
        # Saving goes on, and what is on the disk is found.
        save(checkpointer, path, 2)
        assert_same(checkpointer.load(path), state_of(2))
        checkpointer.close()
        lines = process.said().splitlines()
    assert [word in line for line, word in zip(lines, ("holds up to", "is kept: "), strict=True)] == [True, True]


def test_what_is_committed_decides(folder, tmp_path):
    path = tmp_path / "run" / "last"
    with KeeperAtWork(folder):
        kept, plain = AsyncCheckpointer(keeper="default"), AsyncCheckpointer()
        save(kept, path, 1)
        held(1)
        assert kept.latest(tmp_path / "run") == str(path)
        # A newer one is written without the keeper, and then one with it, after latest() has been asked.
        save(plain, path, 2)
        assert_same(kept.load(path), state_of(2))
        save(kept, path, 3)
        held(2)
        assert_same(kept.load(path), state_of(3))
        assert_same(plain.load(path), state_of(3))
        # Another folder at the same path is another job.
        (tmp_path / "run").rename(tmp_path / "old")
        (tmp_path / "run").mkdir()
        assert kept.latest(tmp_path / "run") is None
        for checkpointer in (kept, plain):
            checkpointer.close()
    with pytest.raises(InvalidArgument, match="name must be"):
        AsyncCheckpointer(keeper="../x")


def size_of_copy(tmp_path: Path) -> int:
    """Returns the bytes of shared memory that a copy of a state takes."""
    probe = AsyncCheckpointer()
    save(probe, tmp_path / "probe" / "1", 0)
    size = probe._saver._stager.held
    probe.close()
    return size


def test_the_memory_of_generations_is_used_again_and_given_back_when_it_is_short(folder, tmp_path):
    size = size_of_copy(tmp_path)
    with KeeperAtWork(folder, "--generations", "2") as process:
        checkpointer = AsyncCheckpointer(keeper="default")
        sizes = []
        for number in range(8):
            save(checkpointer, tmp_path / "run" / f"step-{number}", number)
            held(min(number + 1, 2))
            sizes.append(checkpointer._saver._stager.held)
        assert sizes[-1] == sizes[4]
        checkpointer.close()
        # Room for two copies, of which the keeper would take both, and a slow reader of each.
        small = AsyncCheckpointer(keeper="default", memory_limit=2 * size)
        with Keeper() as keeper:
            for number in range(6):
                save(small, tmp_path / "small" / f"step-{number}", number)
                source = eventually("it is kept", lambda: keeper.held(job=str(tmp_path / "small")))[-1]
                reading = keeper.open(source)
            del reading
        assert_same(small.load(tmp_path / "small" / "step-5"), state_of(5))
        small.close()
        assert "Traceback" not in process.said()


def test_a_stopped_keeper_fails_no_save_and_takes_no_more_memory(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(place, "OFFER_S", 0.3)
    size = size_of_copy(tmp_path)
    with KeeperAtWork(folder, "--generations", "1") as process, Keeper() as keeper:
        checkpointer = AsyncCheckpointer(keeper="default", memory_limit=3 * size)

        def is_kept(number: int) -> bool:
            return [Path(one.path).name for one in keeper.held()] == [f"step-{number}"]

        save(checkpointer, tmp_path / "run" / "step-0", 0)
        eventually("it is kept", lambda: is_kept(0))
        process.process.send_signal(signal.SIGSTOP)
        try:
            for number in range(1, 6):
                save(checkpointer, tmp_path / "run" / f"step-{number}", number)
            assert checkpointer._saver._stager.held <= 3 * size
        finally:
            process.process.send_signal(signal.SIGCONT)
        eventually("what it was offered is kept", lambda: is_kept(2))
        assert_same(loaded(keeper, keeper.held()[0]), state_of(2))
        save(checkpointer, tmp_path / "run" / "step-9", 9)
        eventually("later saves are kept", lambda: is_kept(9))
        checkpointer.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_job_whose_trainers_were_killed_is_a_source_for_other_ranks(folder, tmp_path, monkeypatch):
    with KeeperAtWork(folder, secret=SECRET) as keeper_process:
        run("keep", 2, tmp_path / "step-1", -signal.SIGKILL)
        with Keeper() as keeper:
            eventually("it is kept", lambda: len(keeper.held()) == 2)
            metadata = peer_metadata(keeper.held())
        asked = {name: torch.zeros_like(value[0]) for name, value in TENSORS.items()}
        with pytest.raises(CheckpointException, match="secret"):
            dcp.load(dict(asked), storage_reader=PeerReader(metadata))
        asked["sharded"] = torch.zeros_like(SHARDED)
        reader = PeerReader(metadata, secret=SECRET)
        dcp.load(asked, storage_reader=reader)
        assert torch.equal(asked.pop("sharded"), SHARDED)
        for name, (value, *_) in TENSORS.items():
            assert torch.equal(asked[name], value), name
        # Each part is fetched once, and no replica of one.
        assert reader.report["wanted"] == SHARDED.nbytes + sum(value[0].nbytes for value in TENSORS.values())
        # With one of two ranks, half of the tensors would be missing.
        scheme, step, first, _ = metadata.split()
        half = PeerReader(f"{scheme} {step} {first}", secret=SECRET)
        with pytest.raises(CheckpointException, match="must name all ranks"):
            dcp.load({"rows": torch.zeros(10, 7)}, storage_reader=half)
        # Backed up, and restored when all is gone.
        monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
        assert cli.main(["pull", metadata, "--into-folder", str(tmp_path / "backup"), "--quiet"]) == 0
        keeper_process.kill()
    for rank in range(2):
        state = load_state(tmp_path / "backup", rank=rank, world_size=2)
        assert state.keys() >= TENSORS.keys()
        assert state["note"] == rank


def train(rank: int, root: str, phase: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/store-{phase}", rank=rank, world_size=2)
    checkpointer = AsyncCheckpointer(keeper=f"node{rank}")
    folder = os.path.join(root, "run")
    if phase == "first":
        for number in range(3):
            save(checkpointer, Path(folder, f"step-{number}"), 10 * number + rank)
        print("saved", flush=True)
        signal.pause()
    newest = checkpointer.latest(folder)
    state = checkpointer.load(newest)
    assert torch.equal(state["model"]["w"], state_of(20 + rank)["model"]["w"]), newest
    print(newest, flush=True)
    checkpointer.close()
    dist.destroy_process_group()


@pytest.mark.nightly
def test_two_ranks_that_were_killed_go_on_from_two_keepers(folder, tmp_path):
    """Each rank has a keeper of its own, which stands for its node; no checkpoint is left on the disk."""
    with KeeperAtWork(folder, name="node0"), KeeperAtWork(folder, name="node1"):
        with ranks_of(2, train, str(tmp_path), "first") as first:
            for number, rank in enumerate(first):
                # Gloo of torch 2.8 writes to stdout too.
                eventually("a rank has saved", lambda rank=rank: "saved" in rank.said())
                with Keeper(f"node{number}") as keeper:
                    eventually("all is kept", lambda keeper=keeper: keeper.held()[-1].path.endswith("step-2"))
            for rank in first:
                rank.kill()
        for name in os.listdir(tmp_path / "run"):
            shutil.rmtree(tmp_path / "run" / name)
        with ranks_of(2, train, str(tmp_path), "second") as second:
            for rank in second:
                assert rank.end()[-1] == str(tmp_path / "run" / "step-2")


TRAINER = """
import itertools, sys, threading, torch
from tensorferry.checkpointing import AsyncCheckpointer
root = sys.argv[1]
told = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), told.set()), daemon=True).start()
checkpointer = AsyncCheckpointer(keeper="default", keep_last=2)
state = {"w": torch.zeros(1 << 20)}
for n in itertools.count(1):
    state["w"].fill_(n)
    staged, written = checkpointer.save(f"{root}/step-{n}", state, step=n)
    staged.result()
    if n % 3 == 0:
        written.result()
        newest = checkpointer.latest(root)
        assert newest == f"{root}/step-{n}", newest
        found = checkpointer.load(newest, {"w": torch.zeros(1 << 20)})
        assert (found["w"] == n).all(), n
    print(n, flush=True)
    if told.is_set():
        break
checkpointer.close()
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_keepers_that_are_killed_while_a_trainer_saves_and_loads(folder, tmp_path, pytestconfig, monkeypatch):
    """The trainer notices nothing, and nothing is wrong: neither on the disk, nor in a keeper or its buddy."""
    monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
    kills, root = pytestconfig.getoption("--keeper-kills"), tmp_path / "run"
    moments = random.Random(kills)
    ports = dict(zip(("default", "buddy"), random.Random(os.getpid()).sample(range(20_000, 30_000), 2), strict=True))

    def start(name: str) -> KeeperAtWork:
        (other,) = set(ports) - {name}
        options = ["--port", str(ports[name]), "--buddy", f"127.0.0.1:{ports[other]}"]
        return KeeperAtWork(folder, *options, name=name, secret=SECRET)

    def assert_all_is_right(keeper: Keeper) -> int:
        found = 0
        for one in keeper.held():
            try:
                state = loaded(keeper, one)
            except (TensorferryError, AssertionError):
                # It was evicted meanwhile, or the buddy that has it was killed.
                continue
            assert (state["w"] == one.step).all(), one
            found += 1
        return found

    running = {name: start(name) for name in ports}
    command, pipe = [sys.executable, "-c", TRAINER, str(root)], subprocess.PIPE
    with (
        Keeper() as own,
        Keeper("buddy") as buddy,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as trainer,
    ):
        said = [trainer.stdout.readline()]
        for _, name in zip(range(kills), itertools.cycle(("default", "default", "buddy")), strict=False):
            time.sleep(moments.random() * 0.5)
            running[name].kill()
            time.sleep(moments.random() * 0.1)
            running[name] = start(name)
            for keeper in (own, buddy):
                assert_all_is_right(keeper)
            assert trainer.poll() is None
        eventually("the keepers hold something", lambda: assert_all_is_right(own) and assert_all_is_right(buddy))
        trainer.stdin.close()
        said += trainer.stdout.read().splitlines()
        assert trainer.wait(PATIENCE) == 0
        last = int(said[-1])
        # What was accepted is on the disk, whatever became of the keepers; the last two stay.
        assert latest_checkpoint(root) == str(root / f"step-{last}")
        assert sorted(os.listdir(root)) == sorted(f"step-{n}" for n in (last, last - 1))
        assert all(is_whole(root / f"step-{n}", n) for n in (last, last - 1))
        assert assert_all_is_right(own) > 0
    for process in running.values():
        assert process.end() == 0
        assert "Traceback" not in process.said()
