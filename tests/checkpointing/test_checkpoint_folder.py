"""The folder of a checkpoint: several ranks commit it or nobody does, and old ones are removed in the right order."""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint_files import files_in, tensors_of
from tensorferry._native import _file_entries
from tensorferry.checkpointing import AsyncCheckpointer, SyncCheckpointer
from tensorferry.errors import (
    IncompleteCheckpoint,
    ProtocolError,
    SystemRefused,
)
from tensorferry.memory.tensors import no_rows
from tensorferry.storage import folder, leftovers, lineage, reserved
from tensorferry.storage.commits import Commit
from tensorferry.storage.container import Container
from tensorferry.storage.folder import read_index
from tensorferry.storage.folder_save import FolderSave, SaveId, abandon
from tensorferry.storage.lineage import Lineage
from tensorferry.storage.series import checkpoints
from thread_ranks import checkpointers_of, on_all

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
WAIT_S = 60


def state_of(rank: int, value: float = 0) -> dict:
    return {"w": torch.full((1000 * (rank + 1),), rank + 10.0 * value)}


@pytest.mark.parametrize("kind", [AsyncCheckpointer, SyncCheckpointer])
def test_a_checkpoint_of_several_ranks_is_one_folder_that_all_of_them_commit(kind, tmp_path) -> None:
    opened = checkpointers_of(3, kind)

    def save(rank):
        for value in range(3):
            saved = opened[rank].save(tmp_path / "a", state_of(rank, value), step=value)
            if saved is not None:
                saved[1].result(WAIT_S)
            # Whoever is told that it is committed finds it.
            assert read_index(tmp_path / "a").step == value

    assert on_all(3, save) == [None] * 3
    index = read_index(tmp_path / "a")
    assert (index.world_size, sorted(index.files)) == (3, [0, 1, 2])
    assert files_in(tmp_path / "a") == sorted(["index.safetensors", *(name for name, _ in index.files.values())])
    for rank in range(3):
        assert torch.equal(tensors_of(tmp_path / "a", rank)["w"], state_of(rank, 2)["w"])
    on_all(len(opened), lambda rank: opened[rank].close())


@pytest.mark.parametrize(("kind", "failing"), [(AsyncCheckpointer, 0), (SyncCheckpointer, 1)])
def test_a_rank_that_cannot_save_fails_all_of_them_at_once_with_its_text(kind, failing, tmp_path) -> None:
    opened = checkpointers_of(2, kind)

    def save(rank, good=True):
        state = state_of(rank) if good or rank != failing else {"bad": threading.Lock()}
        saved = opened[rank].save(tmp_path / "a", state)
        return saved and saved[1].result(WAIT_S)

    assert on_all(2, save) == [None, None]
    before = read_index(tmp_path / "a")
    began = time.monotonic()
    failures = on_all(2, lambda rank: save(rank, good=False))
    assert time.monotonic() - began < 30, "far from the time after which a silent rank is given up"
    assert "lock" in str(failures[failing])
    other = failures[1 - failing]
    assert isinstance(other, IncompleteCheckpoint)
    assert f"rank {failing} has failed" in str(other)
    assert "lock" in str(other)
    assert read_index(tmp_path / "a") == before
    assert on_all(2, save) == [None, None]
    assert read_index(tmp_path / "a") != before
    on_all(len(opened), lambda rank: opened[rank].close())


def test_a_rank_that_fails_before_the_folder_is_there_still_fails_all(tmp_path) -> None:
    ids = [SaveId("0123456789ab", 1, rank, 2) for rank in range(2)]
    # Names of files need not be valid text.
    abandon(tmp_path / "a", ids[1], "out of luck in /\udcff")
    save = FolderSave(tmp_path / "a", ids[0])
    save.write(Container(no_rows(), None, True))
    with pytest.raises(IncompleteCheckpoint, match="rank 1 has failed, and the save with it: out of luck in /"):
        save.commit()
    save.fail("")


def refusing(monkeypatch, times: int) -> None:
    """Makes the system refuse to read an index so many times."""
    reads = itertools.count(1)

    def read(path: Path, entries: list[str]):
        if next(reads) <= times:
            raise SystemRefused(f"{path}: cannot be read: Too many open files (os error 24)")
        return _file_entries(path, entries)

    monkeypatch.setattr(folder, "_file_entries", read)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_that_may_be_committed_loses_no_file(world_size, tmp_path, monkeypatch) -> None:
    ids = [SaveId("0123456789ab", 1, rank, world_size) for rank in range(world_size)]
    saves = [FolderSave(tmp_path, one) for one in ids]
    for save in saves:
        save.write(Container(no_rows(), None, True))
    saves[0].commit()
    refusing(monkeypatch, 1)
    saves[0].fail("out of luck")
    assert folder.missing_files(tmp_path, read_index(tmp_path)) == []
    # The others, who are told of the failure, see first that the save is committed.
    assert any(name.endswith(".failed") for name in files_in(tmp_path)) == (world_size > 1)
    for save in saves[1:]:
        save.commit()
        save.close()


def test_a_rank_that_never_comes_is_given_up(tmp_path) -> None:
    for rank, missing in ((0, 1), (1, 0)):
        save = FolderSave(tmp_path, SaveId("0123456789ab", 1, rank, 2), patience=0.3)
        save.write(Container(no_rows(), None, True))
        # Nor is it waited for when the caller ends the save meanwhile, whose trainer may be gone.
        with pytest.raises(KeyError, match="gone"):
            save.commit(lambda: {}["gone"])
        with pytest.raises(IncompleteCheckpoint, match=f"rank {missing} has shown no sign of life for 0.3 s"):
            save.commit()
        save.close()


def write(path: Path, value: float, checkpointer: SyncCheckpointer | None = None, **options) -> None:
    number = re.search("[0-9]+$", path.name)
    step = None if number is None or len(number[0]) > 9 else int(number[0])
    (checkpointer or SyncCheckpointer(**options)).save(path, {"w": torch.full((100,), float(value))}, step=step)


def saved_last(newest: Path) -> Callable[[int], None]:
    """Returns ``keep_last`` as a process calls it that has just saved ``newest``, and nothing else."""
    known, index = Lineage(), read_index(newest)
    known.begin(newest, SaveId(index.save_id, index.began, step=index.step), 1)
    return lambda count: known.keep_last(count, newest, index.commit)


@pytest.mark.parametrize("in_a_series", [False, True])
def test_what_a_failed_save_of_several_ranks_has_left_is_removed_by_a_later_save(tmp_path, in_a_series) -> None:
    at = tmp_path / "step-1"
    saves = [FolderSave(at, SaveId("0123456789ab", 1, rank, 3)) for rank in range(3)]
    for save in saves[:2]:
        save.write(Container(no_rows(), None, True))
    saves[2].fail("out of luck")
    for save in saves[:2]:
        with pytest.raises(IncompleteCheckpoint, match="has failed, and the save with it: out of luck"):
            save.commit()
        save.fail("out of luck")
    failed = [name for name in files_in(at) if name.endswith(".failed")]
    assert len(failed) == 3
    assert [name for name in files_in(at) if name not in failed] == [saves[1].path.name]
    newer = tmp_path / "step-2" if in_a_series else at
    write(newer, 1, keep_last=2)
    assert set(failed) <= set(files_in(at)), "other ranks of that save may not have seen it yet"
    for name in files_in(at):
        if "0123456789ab" in name:
            os.utime(at / name, (time.time() - 3600,) * 2)
    write(tmp_path / "step-3" if in_a_series else at, 2, keep_last=2)
    if in_a_series:
        assert not at.exists()
    else:
        assert len(files_in(at)) == 2
    assert tensors_of(tmp_path / "step-3" if in_a_series else at)["w"][0] == 2


def test_a_save_that_commits_while_the_remains_of_its_series_are_removed_stays(tmp_path, monkeypatch) -> None:
    slow = FolderSave(tmp_path / "step-2", SaveId.new())
    slow.write(Container(no_rows(), None, True))
    os.utime(slow.path, (time.time() - 3600,) * 2)
    write(tmp_path / "step-1", 1)
    is_remains = lineage._is_remains

    def commits_now(names: list[str]) -> bool:
        found = is_remains(names)
        if found:
            slow.commit()
            slow.close()
        return found

    monkeypatch.setattr(lineage, "_is_remains", commits_now)
    saved_last(tmp_path / "step-1")(2)
    assert folder.missing_files(tmp_path / "step-2", read_index(tmp_path / "step-2")) == []


def test_what_is_no_complete_checkpoint_is_told_apart(tmp_path) -> None:
    with pytest.raises(IncompleteCheckpoint, match=r"it has no index.safetensors$"):
        read_index(tmp_path)
    with pytest.raises(IncompleteCheckpoint, match="No such file"):
        read_index(tmp_path / "none")
    write(tmp_path, 1)
    (tmp_path / "index.safetensors").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"only files of saves that have not finished \(1\)"):
        read_index(tmp_path)
    control = [(reserved.INDEX, b"{}"), (reserved.INDEX_FILES, Commit({}).encode())]
    Container(no_rows(), None, True, control).write(tmp_path / "index.safetensors", partial=tmp_path / "p")
    with pytest.raises(ProtocolError, match=r"tensorferry\.dcp\.FileReader"):
        read_index(tmp_path)


def test_an_index_that_contradicts_itself_is_refused(tmp_path) -> None:
    name = "rank00000-00000000000000000000.safetensors"
    fields = {"version": 1, "save": "0" * 12, "files": [name], "shards": {}}
    files = (reserved.INDEX_FILES, Commit({name: 1}, 5).encode())
    wrong = {"version": 2}, {"files": ["other.safetensors"]}, {"files": ["../../etc/passwd"]}, {"shards": []}
    for change in (*wrong, {}):
        control = [(reserved.CHECKPOINT, json.dumps({**fields, **change}).encode()), files]
        Container(no_rows(), None, True, control).write(tmp_path / "index.safetensors", partial=tmp_path / "p")
        if change:
            with pytest.raises(ProtocolError):
                read_index(tmp_path)
    assert read_index(tmp_path).world_size == 1


def test_an_index_that_names_a_part_of_a_rank_without_a_file_is_refused(tmp_path) -> None:
    SyncCheckpointer().save(tmp_path, {"w": torch.ones(4)})
    path = tmp_path / "index.safetensors"
    text, files = _file_entries(path, [reserved.CHECKPOINT, reserved.INDEX_FILES])
    part = {"rank": 1, "offsets": [0], "shape": [4], "stride": [1], "storage": 0, "storage_offset": 0}
    described = {"w": {"dtype": "torch.float32", "global_shape": [4], "parts": [part]}}
    fields = json.dumps(json.loads(text) | {"shards": described}).encode()
    control = [(reserved.CHECKPOINT, fields), (reserved.INDEX_FILES, bytes(files))]
    Container(no_rows(), None, True, control).write(path, partial=tmp_path / "p")
    with pytest.raises(ProtocolError, match="its index names a rank 1, whose file it does not"):
        SyncCheckpointer().load(tmp_path, {"w": torch.zeros(4)})


def test_the_last_checkpoints_stay_and_nothing_of_others_is_removed(tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    (tmp_path / "readme").write_text("")
    (tmp_path / "empty").mkdir()
    for n in range(5):
        write(tmp_path / f"step-{n}", n, keep_last=2)
        (tmp_path / f"step-{n}" / "tokenizer.json").write_text("")
    assert [path.name for path, _ in checkpoints(tmp_path)] == ["step-3", "step-4"]
    assert files_in(tmp_path / "step-1") == ["tokenizer.json"]
    assert files_in(tmp_path / "mine") == ["notes.txt"]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_savers_of_one_series_never_remove_what_began_after_their_own(order, tmp_path) -> None:
    """Such as the writer of a trainer that was killed, which finishes beside the trainer that came back."""
    checkpointer = SyncCheckpointer()
    for n in (1, 2, 3):
        write(tmp_path / f"step-{n}", n, checkpointer)
    left = {1, 2, 3}
    savers = {n: saved_last(tmp_path / f"step-{n}") for n in left}
    for mine in order:
        savers[mine](1)
        left -= set(range(1, mine))
        assert [path.name for path, _ in checkpoints(tmp_path)] == [f"step-{n}" for n in sorted(left)]
    assert left == {3}


def test_a_removal_that_is_interrupted_leaves_no_checkpoint_and_is_finished_later(tmp_path, monkeypatch) -> None:
    checkpointer = SyncCheckpointer()
    for n in range(2):
        write(tmp_path / f"step-{n}", n, checkpointer)

    class PowerLoss(BaseException):
        pass

    def remove(where, names) -> None:
        assert (tmp_path / "step-0", "index.safetensors") != (where, *names)
        raise PowerLoss

    monkeypatch.setattr(leftovers, "remove", remove)
    with pytest.raises(PowerLoss):
        saved_last(tmp_path / "step-1")(1)
    monkeypatch.undo()
    assert len(files_in(tmp_path / "step-0")) == 1, "the index has gone first"
    with pytest.raises(IncompleteCheckpoint):
        read_index(tmp_path / "step-0")
    for path in (tmp_path / "step-0").iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    saved_last(tmp_path / "step-1")(1)
    assert files_in(tmp_path) == ["step-1"]
