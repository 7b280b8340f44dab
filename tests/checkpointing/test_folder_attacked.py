"""Ranks that are killed at each step of a save, two jobs in one folder, removals beside readers, wrong clocks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from checkpoint_files import files_in
from nights import mostly_at_night
from tensorferry._native import _file_header
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint
from tensorferry.errors import IncompleteCheckpoint, SourceChanged
from tensorferry.memory.tensors import no_rows
from tensorferry.storage import commits
from tensorferry.storage.container import Container
from tensorferry.storage.folder import missing_files, read_index
from tensorferry.storage.folder_save import FolderSave, SaveId

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
WAIT_S = 60
RANKS = 3

#: A rank of a save that kills itself at a step.
_RANK = """
import os, signal, sys
from pathlib import Path
from tensorferry._native import Table
from tensorferry.storage import commits
from tensorferry.storage.container import Container
from tensorferry.storage.folder_save import FolderSave, SaveId
folder, save, began, rank, ranks, step = sys.argv[1:]

def at(now, index=None):
    if now == step:
        os.kill(os.getpid(), signal.SIGKILL)

commits.reached = at
at("nothing")
one = FolderSave(Path(folder), SaveId(save, int(began), int(rank), int(ranks)), patience=60)
at("folder")
if step == "half":
    one.path.with_name(one.path.name + ".partial").write_bytes(bytes(100))
    at("half")
content = [("w", rank.encode())]
one.write(Container(Table(), None, True, content))
at("file")
one.commit()
at("committed")
one.close()
"""


def is_whole(folder: Path) -> bool:
    index = read_index(folder)
    return not missing_files(folder, index) and all(
        _file_header(folder / name) == header for name, header in index.files.values()
    )


def rank_saves(folder: Path, save: SaveId, patience: float) -> None:
    one = FolderSave(folder, save, patience=patience)
    try:
        one.write(Container(no_rows(), None, True, [("w", b"x")]))
        one.commit()
    except BaseException as e:
        one.fail(str(e))
        raise
    finally:
        one.close()


def all_save(folder: Path, save: SaveId, ranks, patience: float) -> list[Exception | None]:
    def one(rank: int) -> Exception | None:
        try:
            rank_saves(folder, SaveId(save.save, save.began, rank, RANKS), patience)
        except Exception as e:
            return e
        return None

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, ranks))


@pytest.mark.parametrize(
    ("rank", "step", "is_saved"),
    mostly_at_night(
        [
            (0, "written", False),
            (0, "renamed", True),
            (1, "half", False),
            *[(0, step, False) for step in ("nothing", "folder", "half", "file", "checked")],
            *[(1, step, False) for step in ("nothing", "folder")],
            (1, "file", True),
            (1, "committed", True),
            (0, "committed", True),
        ],
        by_day=3,
    ),
)
def test_a_rank_that_is_killed_at_a_step_leaves_the_old_checkpoint_or_the_new_one(
    rank, step, is_saved, tmp_path
) -> None:
    before = SaveId.new(world_size=RANKS)
    assert all_save(tmp_path, before, range(RANKS), 60) == [None] * RANKS
    save = SaveId.new(world_size=RANKS, known=[before.began])
    command = [sys.executable, "-c", _RANK, tmp_path, save.save, str(save.began), str(rank), str(RANKS), step]
    killed = subprocess.Popen(command)
    # Ranks that wait for one that is dead already give up soon; those beside a living one have time.
    ended = threading.Thread(target=killed.wait)
    ended.start()
    others = [other for other in range(RANKS) if other != rank]
    if not is_saved and step in ("nothing", "folder", "half"):
        ended.join(WAIT_S)
        told = all_save(tmp_path, save, others, 0.5)
    else:
        told = all_save(tmp_path, save, others, 10 if step in ("file", "written", "checked") and rank == 0 else 60)
    ended.join(WAIT_S)
    assert killed.returncode == -9
    assert is_whole(tmp_path)
    if is_saved:
        assert told == [None] * len(others)
        assert read_index(tmp_path).save_id == save.save
    else:
        assert all(isinstance(error, IncompleteCheckpoint) for error in told), told
        assert read_index(tmp_path).save_id == before.save
    # The next save is not held up, and tidies up.
    for name in files_in(tmp_path):
        os.utime(tmp_path / name, (1, 1))
    last = SaveId.new(world_size=RANKS, known=[save.began])
    assert all_save(tmp_path, last, range(RANKS), 60) == [None] * RANKS
    assert is_whole(tmp_path)
    assert len(files_in(tmp_path)) == RANKS + 1


def test_readers_of_checkpoints_that_are_removed_get_a_whole_state_or_an_error(tmp_path, pytestconfig) -> None:
    saver = SyncCheckpointer(keep_last=1)
    over, wrong, loads = threading.Event(), [], []

    def state_of(value: float) -> dict:
        return {f"w{n}": torch.full((20_000,), value) for n in range(4)}

    def read(in_place: bool) -> None:
        reader = SyncCheckpointer()
        while not over.is_set() or not loads:
            found = latest_checkpoint(tmp_path)
            if found is None:
                continue
            state = state_of(-1.0) if in_place else None
            try:
                state = reader.load(found, state)
            except (IncompleteCheckpoint, SourceChanged):
                continue
            except Exception as e:
                wrong.append(e)
                return
            values = {value for tensor in state.values() for value in tensor.unique().tolist()}
            loads.append(values)
            if len(values) != 1:
                wrong.append(values)

    readers = [threading.Thread(target=read, args=(in_place,)) for in_place in (False, True)]
    for reader in readers:
        reader.start()
    for value in range(max(40, pytestconfig.getoption("--saves"))):
        # Into new folders, and into ones that were removed, or are saved anew.
        saver.save(tmp_path / f"step-{value % 7}", state_of(float(value)), step=value)
    over.set()
    for reader in readers:
        reader.join(WAIT_S)
    assert wrong == []
    assert loads
    saver.close()


@pytest.fixture
def clock(monkeypatch):
    """Sets the clock by which saves begin: by how many seconds it is ahead."""
    real = time.time_ns
    ahead = [0]
    monkeypatch.setattr(commits.time, "time_ns", lambda: real() + ahead[0] * 10**9)

    def set_to(seconds: int) -> None:
        ahead[0] = seconds

    return set_to


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_series_goes_on_in_its_order_after_the_clock_was_set_right(is_restarted, tmp_path, clock) -> None:
    def opened():
        return SyncCheckpointer(keep_last=2)

    clock(3600)
    saver = opened()
    saver.save(tmp_path / "step-1", {"w": torch.ones(1)}, step=1)
    clock(0)
    for step in range(2, 6):
        if is_restarted:
            saver.close()
            saver = opened()
        saver.save(tmp_path / f"step-{step}", {"w": torch.ones(1)}, step=step)
        assert latest_checkpoint(tmp_path) == str(tmp_path / f"step-{step}")
        assert files_in(tmp_path) == [f"step-{step - 1}", f"step-{step}"]
    # A job that has gone back to an earlier step goes on from there: the order is that of the saves.
    saver.save(tmp_path / "step-3", {"w": torch.ones(1)}, step=3)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step-3")
    assert files_in(tmp_path) == ["step-3", "step-5"]
    saver.close()
