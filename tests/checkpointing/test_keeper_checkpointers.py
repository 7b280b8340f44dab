"""Checkpointers with a keeper: a trainer that was killed goes on from memory."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoint_loads import load_state
from checkpoint_ranks import run
from equality import assert_same_state
from keepers import KeeperAtWork, eventually, offered, read_from, state_of
from rank_worker import SHARDED, TENSORS
from tensorferry import cli
from tensorferry.checkpointing import (
    AsyncCheckpointer,
    Keeper,
    SyncCheckpointer,
    peer_metadata,
)
from tensorferry.checkpointing.keeper import client
from tensorferry.dcp import PeerReader
from tensorferry.errors import InvalidArgument, TensorferryError

pytestmark = pytest.mark.process

SECRET = "a secret of more than sixteen bytes"


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.INFO, "tensorferry")


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
        assert_same_state(checkpointer.load(path), state_of(1))
        # A healthy save and load is one line.
        (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("tensorferry")]
        assert line.startswith(f"loading step 41 of {path} from the keeper: ")
        # In place, into a part of the state, and without the disk; by another name of the folder, too.
        shutil.rmtree(path)
        (tmp_path / "link").symlink_to("run")
        assert checkpointer.latest(tmp_path / "link") == str(path)
        live = {"model": {"w": torch.zeros(1 << 18)}}
        address = live["model"]["w"].data_ptr()
        assert checkpointer.load(tmp_path / "link" / "step-1", live)["model"]["w"].data_ptr() == address
        assert torch.equal(live["model"]["w"], state_of(1)["model"]["w"])
        process.kill()
        with pytest.raises(TensorferryError):
            checkpointer.load(path)
        assert "from the disk" in caplog.text
        # Saving goes on, and what is on the disk is found.
        save(checkpointer, path, 2)
        assert_same_state(checkpointer.load(path), state_of(2))
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
        assert_same_state(kept.load(path), state_of(2))
        save(kept, path, 3)
        held(2)
        assert_same_state(kept.load(path), state_of(3))
        assert_same_state(plain.load(path), state_of(3))
        # Another folder at the same path is another job.
        (tmp_path / "run").rename(tmp_path / "old")
        (tmp_path / "run").mkdir()
        assert kept.latest(tmp_path / "run") is None
        for checkpointer in (kept, plain):
            checkpointer.close()
    with pytest.raises(InvalidArgument, match="name must be"):
        AsyncCheckpointer(keeper="../x")


def test_a_job_gets_what_is_its_own_and_never_a_strangers(folder, tmp_path, monkeypatch):
    """The folders of two machines have nothing but their path in common."""
    path = str(tmp_path / "run" / "step-1")

    def be_on(location: str) -> None:
        monkeypatch.setattr(client, "location_of", lambda _: location * 16)

    with KeeperAtWork(folder):
        for location, job, value in (("1", "A", 1), ("0", "B", 2), ("0", None, 3)):
            be_on(location)
            with Keeper(job=job) as keeper:
                offered(keeper, {"v": value}, path)
        # A job without a name is that of its folder.
        for location, job, value in (("0", "A", 1), ("0", "B", 2), ("0", "C", None), ("0", None, 3), ("1", None, None)):
            be_on(location)
            with Keeper(job=job) as keeper:
                source = keeper.prefer(path, 0, 1)
                assert (source and read_from(source)["v"]) == value
                assert len(keeper.below(tmp_path / "run", 0, 1)) == (value is not None)


def test_what_was_loaded_from_a_keeper_is_older_than_what_is_saved_then(folder, tmp_path):
    root = tmp_path / "run"
    with KeeperAtWork(folder), Keeper(job="B") as keeper:
        offered(keeper, {"w": torch.ones(9)}, str(root / "step-1"), began=time.time_ns() + 3600 * 10**9)
        with contextlib.closing(AsyncCheckpointer(keeper=Keeper(job="B"))) as checkpointer:
            assert checkpointer.load(root / "step-1")["w"].tolist() == [1] * 9
            save(checkpointer, root / "step-2", 2)
            eventually("it is kept", lambda: len(keeper.held()) == 2)
            assert checkpointer.latest(root) == str(root / "step-2")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_job_whose_trainers_were_killed_is_a_source_for_other_ranks(folder, tmp_path, monkeypatch):
    with KeeperAtWork(folder, secret=SECRET) as keeper_process:
        run("keep", 2, tmp_path / "step-1", -signal.SIGKILL)
        with Keeper() as keeper:
            eventually("it is kept", lambda: len(keeper.held()) == 2)
            metadata = peer_metadata(keeper.held())
        asked = {name: torch.zeros_like(value[0]) for name, value in TENSORS.items()}
        asked["sharded"] = torch.zeros_like(SHARDED)
        reader = PeerReader(metadata, secret=SECRET)
        dcp.load(asked, storage_reader=reader)
        assert torch.equal(asked.pop("sharded"), SHARDED)
        for name, (value, *_) in TENSORS.items():
            assert torch.equal(asked[name], value), name
        # Each part is fetched once, and no replica of one.
        assert reader.report["wanted"] == SHARDED.nbytes + sum(value[0].nbytes for value in TENSORS.values())
        # Backed up, and restored when all is gone.
        monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
        assert cli.main(["pull", metadata, "--into-folder", str(tmp_path / "backup"), "--quiet"]) == 0
        keeper_process.kill()
    for rank in range(2):
        state = load_state(tmp_path / "backup", rank=rank, world_size=2)
        assert state.keys() >= TENSORS.keys()
        assert state["note"] == rank
