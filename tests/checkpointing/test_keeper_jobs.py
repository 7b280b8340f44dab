"""Whose snapshot it is: a keeper hands no job the state of another, whatever the two have in common."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from pathlib import Path

import pytest
import torch

from keepers import KeeperAtWork, eventually, offered
from tensorferry.checkpointing import Keeper, make_async_checkpointer
from tensorferry.checkpointing.keeper import client

#: What stands for the paths of two machines that have nothing but the path in common.
HERE, THERE = "0" * 16, "1" * 16


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.INFO, "tensorferry")


@contextlib.contextmanager
def machine(monkeypatch, location: str):
    """Within the block, clients are on the machine whose disk ``location`` stands for."""
    with monkeypatch.context() as patch:
        patch.setattr(client, "location_of", lambda _: location, raising=False)
        yield


@pytest.fixture
def buddies(folder):
    """Two keepers, each the other's buddy, as those of two machines."""
    with KeeperAtWork(folder, name="one"), KeeperAtWork(folder, name="two"), Keeper("one") as one, Keeper("two") as two:
        one.set_buddies([two.address()])
        two.set_buddies([one.address()])
        yield one, two


def state(number: int) -> dict:
    return {"w": torch.full((1000,), float(number))}


def saved(name: str, job: str | None, path: Path, number: int, *, on_disk: bool = True) -> None:
    """Saves as a trainer does that ends then; without ``on_disk``, onto a disk that is not this machine's."""
    with Keeper(name) as asking:
        before = len(asking.held())
        checkpointer = make_async_checkpointer(keeper=Keeper(name, job=job))
        aside = path.with_name(f"{path.name}.aside")
        if not on_disk and path.exists():
            path.rename(aside)
        checkpointer.save(path, state(number))[1].result()
        checkpointer.close()
        if not on_disk:
            shutil.rmtree(path)
            if aside.exists():
                aside.rename(path)
        eventually("it is kept", lambda: len(asking.held()) > before)


def loaded(name: str, job: str | None, path: Path) -> float:
    checkpointer = make_async_checkpointer(keeper=Keeper(name, job=job))
    try:
        return float(checkpointer.load(path)["w"][0])
    finally:
        checkpointer.close()


def latest(name: str, job: str | None, root: Path) -> str | None:
    checkpointer = make_async_checkpointer(keeper=Keeper(name, job=job))
    try:
        found = checkpointer.latest(root)
        if found is not None:
            checkpointer.load(found)
        return found
    finally:
        checkpointer.close()


def copied(keeper: Keeper, count: int) -> None:
    eventually("it is copied", lambda: len([s for s in keeper.held() if s.origin != "local" and not s.remote]) == count)


def test_a_job_does_not_get_the_weights_of_another_that_has_the_same_path(buddies, tmp_path):
    _one, two = buddies
    path = tmp_path / "run" / "step-1"
    saved("two", "B", path, 2)
    saved("one", "A", path, 1, on_disk=False)
    copied(two, 1)
    assert loaded("two", "B", path) == 2
    assert loaded("one", "A", path) == 1
    # From the disk, with nothing of its own in memory, and with a job that is in no keeper.
    assert loaded("two", "C", path) == 2
    # Nothing is on the disk: what another job has is not taken for it, and its own is.
    shutil.rmtree(path)
    assert loaded("two", "B", path) == 2
    with pytest.raises(Exception, match="no complete checkpoint"):
        loaded("two", "C", path)


def test_the_latest_checkpoint_is_one_of_the_own_job(buddies, tmp_path):
    _one, two = buddies
    root = tmp_path / "run"
    saved("two", "B", root / "step-1", 2)
    saved("one", "A", root / "step-2", 1, on_disk=False)
    copied(two, 1)
    assert latest("two", "B", root) == str(root / "step-1")
    assert latest("one", "A", root) == str(root / "step-2")


def test_without_a_name_a_job_is_its_folder_on_its_own_machine(buddies, tmp_path, monkeypatch):
    """Two trainers with the same path and no name, each on a disk of its own."""
    _one, two = buddies
    root = tmp_path / "run"
    with machine(monkeypatch, HERE):
        saved("two", None, root / "step-1", 2)
    with machine(monkeypatch, THERE):
        saved("one", None, root / "step-1", 1, on_disk=False)
        saved("one", None, root / "step-2", 3, on_disk=False)
    copied(two, 2)
    with machine(monkeypatch, HERE):
        assert loaded("two", None, root / "step-1") == 2
        assert latest("two", None, root) == str(root / "step-1")
        with pytest.raises(Exception, match="no complete checkpoint"):
            loaded("two", None, root / "step-2")
    with machine(monkeypatch, THERE):
        # Its disk is empty, and its memory is at the buddy, too.
        assert loaded("two", None, root / "step-2") == 3


def test_a_replacement_gets_what_a_lost_machine_had_if_the_job_has_a_name(buddies, tmp_path, monkeypatch):
    _one, two = buddies
    root = tmp_path / "run"
    with machine(monkeypatch, THERE):
        saved("one", "llm", root / "step-1", 1, on_disk=False)
        saved("one", None, root / "step-9", 9, on_disk=False)
    with machine(monkeypatch, HERE):
        assert loaded("two", "llm", root / "step-1") == 1
        assert latest("two", "llm", root) == str(root / "step-1")
        assert latest("two", None, root) is None
        # What is committed on the own disk is not replaced by what another machine has, though it began later.
        saved("two", "llm", root / "step-1", 2)
    with machine(monkeypatch, THERE):
        saved("one", "llm", root / "step-1", 3, on_disk=False)
        saved("one", "llm", root / "step-2", 4, on_disk=False)
    with machine(monkeypatch, HERE):
        eventually("it is listed", lambda: len(two.held(job="llm")) == 4)
        assert loaded("two", "llm", root / "step-1") == 2
        assert latest("two", "llm", root) == str(root / "step-1")


def test_the_very_save_that_is_committed_is_taken_from_any_machine(buddies, tmp_path, monkeypatch, caplog):
    _one, two = buddies
    path = tmp_path / "run" / "step-1"
    with machine(monkeypatch, THERE):
        saved("one", None, path, 5)
    copied(two, 1)
    with machine(monkeypatch, HERE):
        assert loaded("two", None, path) == 5
    assert "from the keeper" in caplog.text


def test_jobs_of_one_path_do_not_evict_each_other(buddies, monkeypatch):
    one, two = buddies
    with machine(monkeypatch, HERE):
        mine = [offered(two, {"w": n}, f"/ckpt/run/step-{n}") for n in range(2)]
    with machine(monkeypatch, THERE):
        for number in range(3):
            offered(one, {"w": number}, f"/ckpt/run/step-{number}")
    copied(two, 2)
    time.sleep(1.5)
    assert [told.times for told in mine] == [0, 0]
    assert [s.origin == "local" for s in two.held() if not s.remote].count(True) == 2
