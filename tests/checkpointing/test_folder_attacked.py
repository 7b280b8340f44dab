"""Ranks that are killed at each step of a save, two jobs in one folder, removals beside readers, wrong clocks."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from checkpoint_files import files_in
from checkpoint_ranks import ranks_of
from nights import mostly_at_night
from tensorferry._native import _file_header
from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint
from tensorferry.errors import IncompleteCheckpoint, SourceChanged
from tensorferry.memory.tensors import no_rows
from tensorferry.storage import commits
from tensorferry.storage.container import Container
from tensorferry.storage.folder import missing_files, read_index
from tensorferry.storage.folder_save import FolderSave, SaveId
from thread_ranks import on_all

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
WAIT_S = 60
RANKS = 3


def is_whole(folder: Path) -> bool:
    index = read_index(folder)
    return not missing_files(folder, index) and all(
        _file_header(folder / name) == header for name, header in index.files.values()
    )


def rank_saves(folder: Path, save: SaveId, patience: float, reached=lambda *_: None) -> None:
    reached("nothing", folder)
    one = FolderSave(folder, save, patience=patience)
    reached("folder", one.path)
    try:
        one.write(Container(no_rows(), None, True, [("w", b"x")]))
        reached("file", one.path)
        one.commit()
        reached("committed", one.path)
    except BaseException as e:
        one.fail(str(e))
        raise
    finally:
        one.close()


def rank_is_killed(_: int, folder: Path, save: SaveId, step: str) -> None:
    def reached(now: str, path: Path) -> None:
        is_half = (now, step) == ("folder", "half")
        if is_half:
            path.with_name(path.name + ".partial").write_bytes(bytes(100))
        if is_half or now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    commits.reached = reached
    rank_saves(folder, save, 60, reached)


def all_save(folder: Path, save: SaveId, ranks, patience: float) -> list[Exception | None]:
    saves = [SaveId(save.save, save.began, rank, RANKS) for rank in ranks]
    return on_all(len(saves), lambda at: rank_saves(folder, saves[at], patience))


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
    others = [other for other in range(RANKS) if other != rank]
    about = tmp_path, SaveId(save.save, save.began, rank, RANKS), step
    with ranks_of(1, rank_is_killed, *about) as [killed]:
        # Ranks that wait for one that is dead already give up soon; those beside a living one have time.
        is_early = not is_saved and step in ("nothing", "folder", "half")
        if is_early:
            killed.end(-signal.SIGKILL)
        patience = 10 if step in ("file", "written", "checked") and rank == 0 else 60
        told = all_save(tmp_path, save, others, 0.5 if is_early else patience)
        killed.end(-signal.SIGKILL)
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

    def read(in_place: bool) -> None:
        reader = SyncCheckpointer()
        while not over.is_set() or not loads:
            found = latest_checkpoint(tmp_path)
            if found is None:
                continue
            try:
                state = reader.load(found, {f"w{n}": torch.zeros(20_000) for n in range(4)} if in_place else None)
            except (IncompleteCheckpoint, SourceChanged):
                continue
            except Exception as e:
                wrong.append(e)
                return
            loads.append({value for tensor in state.values() for value in tensor.unique().tolist()})

    readers = [threading.Thread(target=read, args=(in_place,)) for in_place in (False, True)]
    for reader in readers:
        reader.start()
    for value in range(1, max(40, pytestconfig.getoption("--saves"))):
        # Into new folders, and into ones that were removed, or are saved anew.
        state = {f"w{n}": torch.full((20_000,), float(value)) for n in range(4)}
        saver.save(tmp_path / f"step-{value % 7}", state, step=value)
    over.set()
    for reader in readers:
        reader.join(WAIT_S)
    assert wrong == []
    assert {len(values) for values in loads} == {1}


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_series_goes_on_in_its_order_after_the_clock_was_set_right(is_restarted, tmp_path, monkeypatch) -> None:
    now, ahead = time.time_ns, [3600]
    monkeypatch.setattr(commits.time, "time_ns", lambda: now() + ahead[0] * 10**9)
    saver = SyncCheckpointer(keep_last=2)
    saver.save(tmp_path / "step-1", {"w": torch.ones(1)}, step=1)
    ahead[0] = 0
    for step in range(2, 6):
        if is_restarted:
            saver.close()
            saver = SyncCheckpointer(keep_last=2)
        saver.save(tmp_path / f"step-{step}", {"w": torch.ones(1)}, step=step)
        assert latest_checkpoint(tmp_path) == str(tmp_path / f"step-{step}")
        assert files_in(tmp_path) == [f"step-{step - 1}", f"step-{step}"]
    # A job that has gone back to an earlier step goes on from there: the order is that of the saves.
    saver.save(tmp_path / "step-3", {"w": torch.ones(1)}, step=3)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step-3")
    assert files_in(tmp_path) == ["step-3", "step-5"]
    saver.close()
