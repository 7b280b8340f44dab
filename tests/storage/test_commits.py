"""Whoever replaces or removes an index does it under the same lock, and nobody's committed save is lost."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpointing import SyncCheckpointer, latest_checkpoint
from tensorferry.dcp import FileReader, FileWriter, own_errors
from tensorferry.errors import IncompleteCheckpoint, SystemRefused
from tensorferry.memory.tensors import no_rows
from tensorferry.storage import commits, folder, folder_store, leftovers, lineage, names, reserved
from tensorferry.storage.container import Container
from tensorferry.storage.folder_store import FolderStore

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is", "ignore::FutureWarning"),
]
WAIT_S = 60
INDEX = "index.safetensors"


def save(where: Path, value: float, writer=None) -> None:
    state = {key: torch.full((100,), float(value)) for key in ("a", "b", "c")}
    dcp.save(state, storage_writer=writer or FileWriter(where), no_dist=True)


def held(where: Path) -> dict[str, float]:
    """Loads all tensors; returns the value of each."""
    keys = FileReader(where).read_metadata().state_dict_metadata
    state = {key: torch.zeros(100) for key in keys}
    dcp.load(state, storage_reader=FileReader(where), no_dist=True)
    return {key: float(value.unique()) for key, value in state.items()}


def all_of(value: float) -> dict[str, float]:
    return dict.fromkeys("abc", float(value))


def files(where: Path) -> list[str]:
    return sorted(name for name in os.listdir(where) if name.startswith(("rank", "index")))


@pytest.fixture
def at(monkeypatch):
    """Makes ``action`` happen when a commit of this thread reaches ``moment`` for the first time."""

    def set_up(moment: str, action) -> list[str]:
        seen: list[str] = []
        me = threading.get_ident()

        def reached(now: str, _: Path) -> None:
            if threading.get_ident() == me and now == moment and now not in seen:
                seen.append(now)
                action()

        monkeypatch.setattr(commits, "reached", reached)
        return seen

    return set_up


class Waiting:
    """An action in a thread of its own, which has come as far as it can when :meth:`begin` returns: it waits."""

    def __init__(self, monkeypatch, work) -> None:
        self._patch, self._work, self._tries = monkeypatch, work, threading.Event()

    def begin(self) -> None:
        real = fcntl.flock

        def flock(file, how):
            try:
                return real(file, how)
            except OSError:
                self._tries.set()
                raise

        self._patch.setattr(fcntl, "flock", flock)
        self._running = ThreadPoolExecutor(1).submit(self._work)
        assert self._tries.wait(WAIT_S), "it does not wait for the lock"
        assert not self._running.done()

    def end(self) -> None:
        self._running.result(WAIT_S)


@pytest.mark.parametrize("moment", ["written", "checked", "renamed"])
def test_of_two_saves_at_once_the_one_that_began_later_stays(moment, at, tmp_path, monkeypatch) -> None:
    save(tmp_path, 1)
    other = Waiting(monkeypatch, lambda: save(tmp_path, 3))
    at(moment, other.begin if moment == "checked" else lambda: save(tmp_path, 3))
    if moment == "written":
        with pytest.raises(dcp.CheckpointException, match="a save that began later has finished before this one"):
            save(tmp_path, 2)
    else:
        save(tmp_path, 2)
    if moment == "checked":
        other.end()
    assert held(tmp_path) == all_of(3)
    assert len(files(tmp_path)) == 2


def test_without_locks_the_index_is_still_read_again(at, tmp_path, monkeypatch) -> None:
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    at("written", lambda: save(tmp_path, 4))
    with pytest.raises(dcp.CheckpointException, match="began later"):
        save(tmp_path, 3)
    assert held(tmp_path) == all_of(4)


@pytest.mark.parametrize(
    ("error", "why"), [(IncompleteCheckpoint, "began later"), (SystemRefused, "Too many open files")]
)
def test_a_commit_that_began_before_a_save_does_not_replace_it(error, why, at, tmp_path, monkeypatch) -> None:
    """Nor where it may not read the index, which then is not taken for damaged."""
    save(tmp_path, 1)
    began = commits.begin_after(commits.beginnings(tmp_path / INDEX))
    name = f"rank00000-{names.new_id()}.safetensors"
    Container(no_rows(), None, True).write(tmp_path / name, partial=tmp_path / f"{name}.partial")
    save(tmp_path, 2)
    if error is SystemRefused:
        at("written", lambda: refusing(monkeypatch, commits))
    with pytest.raises(error, match=why):
        commits.commit_index(tmp_path / INDEX, [(reserved.INDEX, b"{}")], commits.Commit({name: 0}, began))
    monkeypatch.undo()
    assert held(tmp_path) == all_of(2)
    assert len(files(tmp_path)) == 2


def test_a_commit_that_cannot_be_synced_is_whole_and_nobody_is_told_to_remove_it(tmp_path, monkeypatch) -> None:
    def fails(_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save(tmp_path, 1)
    monkeypatch.setattr(FolderStore, "sync", fails)
    with pytest.raises(SystemRefused, match="committed, but not synchronised") as refused, own_errors():
        save(tmp_path, 2)
    assert refused.value.errno == errno.ENOSPC
    assert "remove" not in str(refused.value)
    assert held(tmp_path) == all_of(2)


def refusing(monkeypatch, module) -> None:
    """Makes the system refuse to read any index for ``module``."""

    def refused(path: Path, _: list[str]) -> None:
        raise SystemRefused(f"{path}: cannot be read: Too many open files (os error 24)")

    monkeypatch.setattr(module, "_file_entries", refused)


def test_an_index_that_another_machine_removes_before_it_is_read_is_none(tmp_path, monkeypatch) -> None:
    save(tmp_path, 1)

    def removed(path: Path, _: list[str]) -> None:
        path.unlink()
        raise SystemRefused(f"{path}: cannot be read: No such file or directory (os error 2)")

    monkeypatch.setattr(commits, "_file_entries", removed)
    assert commits.look(tmp_path / INDEX)[0] is None


@pytest.mark.process
def test_a_folder_that_a_stopped_process_keeps_locked_fails_a_save_and_not_for_ever(tmp_path, monkeypatch) -> None:
    save(tmp_path, 1)
    program = "import fcntl,os,sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(1, flush=True)"
    command = [sys.executable, "-c", f"{program}; sys.stdin.read()", tmp_path]
    monkeypatch.setattr(folder_store, "_LOCK_S", 0.2)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        os.kill(other.pid, signal.SIGSTOP)
        with pytest.raises(dcp.CheckpointException, match="another process has kept the folder") as caught:
            save(tmp_path, 2)
        assert isinstance(caught.value.failures[0][0], SystemRefused)
        assert held(tmp_path) == all_of(1)
        other.kill()
    save(tmp_path, 3)
    assert held(tmp_path) == all_of(3)


@pytest.mark.parametrize("is_spared", [True, False])
def test_a_file_that_is_about_to_be_removed_is_held_only_if_it_stays(is_spared, tmp_path, monkeypatch) -> None:
    name = f"rank00000-{names.new_id()}.safetensors"
    (tmp_path / name).write_bytes(b"x")
    os.utime(tmp_path / name, (time.time() - 3600,) * 2)

    held = threading.Event()

    def hold() -> None:
        with FolderStore(tmp_path).holding([name]):
            held.set()

    holder = Waiting(monkeypatch, hold)

    def needed() -> set[str]:
        holder.begin()
        assert not held.wait(0.2)
        return {name} if is_spared else set()

    leftovers.remove_leftovers(tmp_path, time.time(), set(), needed)
    with contextlib.nullcontext() if is_spared else pytest.raises(IncompleteCheckpoint, match="removed by another"):
        holder.end()


def test_a_file_that_cannot_be_locked_is_not_held(tmp_path, monkeypatch) -> None:
    name = f"rank00000-{names.new_id()}.safetensors"
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr(folder_store, "_LOCK_S", 0.1)
    with (tmp_path / name).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SystemRefused, match="another process has kept"), FolderStore(tmp_path).holding([name]):
            pass


def test_an_old_checkpoint_that_is_saved_anew_while_it_is_to_be_removed_stays(at, tmp_path, monkeypatch) -> None:
    saver = SyncCheckpointer()
    for step in (1, 2):
        saver.save(tmp_path / f"step-{step}", {"w": torch.full((10,), float(step))})
    seen = folder.read_index(tmp_path / "step-1")
    saver.save(tmp_path / "step-1", {"w": torch.full((10,), 3.0)})
    lineage.remove_checkpoint(tmp_path / "step-1", seen.commit)
    assert float(saver.load(tmp_path / "step-1")["w"][0]) == 3
    # And when its index is just being removed: the save comes after it.
    other = Waiting(monkeypatch, lambda: saver.save(tmp_path / "step-2", {"w": torch.full((10,), 4.0)}))
    at("checked", other.begin)
    lineage.remove_checkpoint(tmp_path / "step-2", folder.read_index(tmp_path / "step-2").commit)
    other.end()
    assert float(saver.load(tmp_path / "step-2")["w"][0]) == 4
    assert latest_checkpoint(tmp_path) == str(tmp_path / "step-2")
    saver.close()


def test_commits_leave_no_descriptor_open(tmp_path) -> None:
    save(tmp_path, 1)
    before = len(os.listdir("/proc/self/fd"))
    for value in (2, 3):
        left = tmp_path / f"rank00001-{names.new_id()}.safetensors"
        left.write_bytes(b"of a killed save")
        os.utime(left, (time.time() - 3600,) * 2)
        save(tmp_path, value)
        assert not left.exists()
    assert len(os.listdir("/proc/self/fd")) == before
