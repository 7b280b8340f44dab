"""Whose snapshot it is: a keeper hands no job the state of another, whatever the two have in common."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from keepers import KeeperAtWork, Told, eventually, offered, staged
from tensorferry._native import Table
from tensorferry.checkpointing import Keeper, handover, make_async_checkpointer, peer_metadata
from tensorferry.checkpointing.keeper import client, index, location
from tensorferry.errors import InvalidArgument, ProtocolError
from tensorferry.net import serve
from tensorferry.net.options import ServerOptions
from tensorferry.storage.container import Container

pytestmark = pytest.mark.process


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


def own(keeper: Keeper, job: str | None = None) -> set[str]:
    """The saves that trainers gave to this keeper itself. What its buddies have is listed, too, as soon as it hears."""
    return {one.save_id for one in keeper.held(job=job) if one.origin == "local" and not one.remote}


def saved(name: str, job: str | None, path: Path, number: int, *, on_disk: bool = True) -> None:
    """Saves as a trainer does that ends then; without ``on_disk``, onto a disk that is not this machine's."""
    with Keeper(name) as asking:
        before = own(asking)
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
        eventually("it is kept", lambda: own(asking) - before)


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
    one, two = buddies
    root = tmp_path / "run"
    with machine(monkeypatch, THERE):
        saved("one", "llm", root / "step-1", 1, on_disk=False)
        saved("one", None, root / "step-9", 9, on_disk=False)
    # A buddy that does not answer at once is not waited for: the machine is lost after its state was copied.
    copied(two, 2)
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
        # Until it has copied the last one, it holds one more, which the copy replaces.
        newest = own(one, "llm")
        assert len(newest) == 2
        eventually("it is copied", lambda: newest <= {s.save_id for s in two.held(job="llm") if not s.remote})
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


OPTIONS = ServerOptions(
    secret=None, tls=False, same_host=None, interface="127.0.0.1", advertise=None, max_bandwidth=None
)
HOUR_NS = 3600 * 10**9


@pytest.fixture
def clock(monkeypatch):
    """How many nanoseconds the clock of this process is ahead."""
    ahead, now = [0], time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + ahead[0])
    return ahead


def test_what_was_loaded_from_a_buddy_is_older_than_what_is_saved_then(buddies, tmp_path, clock):
    _one, two = buddies
    root = tmp_path / "run"
    clock[0] = HOUR_NS
    saved("one", "B", root / "step-1", 1, on_disk=False)
    clock[0] = 0
    copied(two, 1)
    keeper = Keeper("two", job="B")
    checkpointer = make_async_checkpointer(keeper=keeper)
    assert float(checkpointer.load(root / "step-1")["w"][0]) == 1
    checkpointer.save(root / "step-2", state(2))[1].result()
    eventually("it is kept", lambda: len(two.held(job="B")) == 2)
    assert checkpointer.latest(root) == str(root / "step-2")
    checkpointer.close()


def test_a_message_of_another_version_is_answered_by_an_error_that_says_so(folder, tmp_path, monkeypatch, caplog):
    """During an upgrade: nothing is mixed, the disk is used, and the log says why."""
    path = tmp_path / "run" / "step-1"
    with KeeperAtWork(folder, name="two"):
        saved("two", "B", path, 2)
        with monkeypatch.context() as patch:
            patch.setattr(handover, "VERSION", 1)
            keeper = Keeper("two", job="B")
            with pytest.raises(ProtocolError, match=r"version 2, not 1: run one version of tensorferry"):
                keeper.held()
            assert keeper.prefer(path, 0, 1) is None
            assert "run one version of tensorferry" in caplog.text
            given, told = staged({"w": 1}), Told()
            keeper.offer(given, told)
            eventually("its memory comes back", lambda: told.times == 1)
        with Keeper("two") as asking:
            assert len(asking.held()) == 1


def test_a_buddy_of_another_version_is_not_copied_and_the_status_says_so(buddies):
    _one, two = buddies
    server, host = serve.start(5.0, OPTIONS)
    shelf = server.shelf(None)
    described = {"job": "B", "path": "/ckpt/run/1", "save_id": "a", "rank": 0, "world_size": 1, "step": 1, "began": 1}
    text = json.dumps({"version": 1, "snapshots": [described]}).encode()
    Container(Table(), None, True, [(index._ENTRY, text)]).publish(shelf, index.STEP)
    try:
        two.set_buddies([shelf.url(host)])
        eventually("it is said", lambda: "another version" in two.status()["buddies"][0]["error"])
        assert two.held(ask_buddies=True) == []
    finally:
        server.shutdown(1.0)


def test_metadata_for_a_peer_reader_is_that_of_one_job(folder, tmp_path, monkeypatch):
    with KeeperAtWork(folder, name="two"), Keeper("two") as keeper:
        saved("two", "A", tmp_path / "run" / "step-2", 1)
        saved("two", "B", tmp_path / "run" / "step-1", 2)
        held = keeper.held()
        with pytest.raises(InvalidArgument, match="of several jobs, A, B"):
            peer_metadata(held)
        urls = {job: peer_metadata(held, job=job) for job in "AB"}
        assert {one.metadata in urls[one.job] for one in held} == {True}
        assert urls["A"] != urls["B"]
        command = [sys.executable, "-m", "tensorferry.checkpointing.keeper", "--name", "two", "--status"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        assert all(url in said for url in urls.values())
        # Without names, the same path of two machines is two jobs.
        with machine(monkeypatch, HERE):
            saved("two", None, tmp_path / "run" / "step-1", 3)
        with machine(monkeypatch, THERE):
            saved("two", None, tmp_path / "run" / "step-1", 4)
        with pytest.raises(InvalidArgument, match="each on a disk of its own"):
            peer_metadata(keeper.held(job=str(tmp_path / "run")))


def test_a_location_is_a_folder_of_a_machine_or_of_a_server(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(location, "_MOUNTS", mounts)

    def here(path: str, lines: str, boot: bytes = b"one") -> str:
        mounts.write_text(lines)
        monkeypatch.setattr(location, "machine", lambda: boot)
        return location.location_of(path)

    disk = f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:2 /vol {tmp_path} rw shared:1 - ext4 /dev/sdb rw\n"
    found = here(tmp_path / "a" / "1", disk)
    assert found == here(tmp_path / "a" / "2", disk) == here(tmp_path / "link" / "1", disk)
    # Another machine, another folder, another volume at the same place.
    others = [
        here(tmp_path / "a" / "1", disk, b"two"),
        here(tmp_path / "1", disk),
        here(tmp_path / "a" / "1", disk.replace("/vol", "/other")),
        here(tmp_path / "a" / "1", disk.replace("8:2", "8:3")),
        here(tmp_path / "a" / "1", disk + f"3 2 8:9 / {tmp_path} rw - ext4 /dev/sdc rw\n"),
    ]
    assert len({found, *others}) == 6
    served = disk.replace("ext4 /dev/sdb", "nfs4 server:/export")
    assert here(tmp_path / "a" / "1", served) == here(tmp_path / "a" / "1", served.replace("8:2", "0:77"), b"two")
    assert here(tmp_path / "a" / "1", served) != here(tmp_path / "a" / "1", served.replace("server:", "other:"))
    # Where nothing is known, nothing is the same.
    for lines in ("", "nonsense\n"):
        assert here(tmp_path / "a" / "1", lines) != here(tmp_path / "a" / "1", lines)
