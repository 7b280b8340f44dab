"""A save that is killed at any of its requests leaves the last checkpoint; a day later a save removes what it left.

``--object-kills 99`` kills one at each request that it makes.
"""

from __future__ import annotations

import contextlib
import queue
import signal

import pytest
import torch
from dcp_doors import load, save

from stores import FORBIDDEN, Gateway, environment, objects, survive_kills
from tensorferry.checkpointing import AsyncCheckpointer, SyncCheckpointer
from tensorferry.errors import IncompleteCheckpoint, StoreRefused, WriterLost
from tensorferry.storage import commits
from tensorferry.storage.objects import bucket

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.process]

SAVER = """
    import warnings
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp
    from tensorferry.dcp import FileWriter
    from tensorferry.storage.objects import upload
    upload.PART = 5 << 20
    for line in sys.stdin:
        number = int(line)
        pid = os.fork()
        if pid == 0:
            state = {{"w": torch.full((3 << 19,), float(number), dtype=torch.float64)}}
            dcp.save(state, storage_writer=FileWriter({place!r}), no_dist=True)
            os._exit(0)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(status, flush=True)
    """


def held(place):
    (number,) = load({"w": torch.zeros(3 << 19, dtype=torch.float64)}, place)["w"].unique()
    return int(number)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_9_at_the_requests_of_a_save(server, pytestconfig, forked_child, monkeypatch, days_later):
    with Gateway(server.url) as between:
        with monkeypatch.context() as around:
            for name, value in environment(between.url).items():
                around.setenv(name, value)
            saver = forked_child.start(SAVER.format(place=server.place), listens=True)
        pids: queue.SimpleQueue[int] = queue.SimpleQueue()

        def save_one(number):
            saver.stdin.write(f"{number}\n")
            saver.stdin.flush()
            pids.put(int(saver.stdout.readline()))
            status = int(saver.stdout.readline())
            assert status in (0, signal.SIGKILL)
            while not (status or pids.empty()):
                pids.get()
            return status != 0

        try:
            kills = pytestconfig.getoption("--object-kills")
            assert survive_kills(between, kills, save_one, lambda: pids.get(timeout=30), lambda: held(server.place))
            days_later()
            save({"v": torch.ones(3)}, server.place)
            assert len(objects(server.url, server.prefix)) == 3
        finally:
            saver.stdin.close()
            saver.wait(30)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_kill_9_of_the_process_that_writes(gateway, server, pytestconfig):
    checkpointer = AsyncCheckpointer()

    def save_one(number):
        try:
            checkpointer.save(server.place, {"w": torch.full((3 << 20,), float(number))}, step=number)[1].result(60)
        except WriterLost:
            return True
        return False

    def there():
        (number,) = SyncCheckpointer().load(server.place)["w"].unique()
        return int(number)

    try:
        kills = pytestconfig.getoption("--object-kills")
        assert survive_kills(gateway, kills, save_one, lambda: checkpointer._saver.writer.pid, there)
    finally:
        checkpointer.close()


def at_the_first_part(monkeypatch, meanwhile):
    del monkeypatch
    return {"progress": lambda *_: meanwhile()}


def between_the_look_and_the_write(monkeypatch, meanwhile):
    monkeypatch.setattr(commits, "reached", lambda moment, _: meanwhile() if moment == "checked" else None)
    return {}


@pytest.mark.parametrize("is_first", [True, False], ids=["where nothing is", "where a checkpoint is"])
@pytest.mark.parametrize(
    ("at", "has_conditions"),
    [(at_the_first_part, True), (at_the_first_part, False), (between_the_look_and_the_write, True)],
)
def test_a_later_save_that_commits_meanwhile_stays(server, monkeypatch, is_first, at, has_conditions):
    """The earlier one removes nothing of it, and gives up."""
    monkeypatch.setattr(bucket, "_warned", set() if has_conditions else {"s3://bucket"})
    if not is_first:
        save({"u": torch.ones(2)}, server.place)
    began = []

    def meanwhile():
        if not began:
            began.append(True)
            save({"v": torch.ones(3)}, server.place)

    with pytest.raises(IncompleteCheckpoint, match="began later has finished before"):
        save({"w": torch.ones(5)}, server.place, **at(monkeypatch, meanwhile))
    assert load({"v": torch.zeros(3)}, server.place)["v"].tolist() == [1, 1, 1]
    assert len(objects(server.url, server.prefix)) == 3


@pytest.mark.parametrize("fails", [False, True], ids=["that has ended", "that has failed"])
def test_what_a_save_has_left_goes_a_day_later(gateway, server, fails, days_later):
    def act(_, method, path):
        refused = "/index." in path if fails else "delete" in path
        return FORBIDDEN if refused and method in ("PUT", "POST", "DELETE") else None

    save({"w": torch.ones(2)}, server.place)
    gateway.act = act
    with pytest.raises(StoreRefused) if fails else contextlib.nullcontext():
        save({"w": torch.ones(3)}, server.place)
    gateway.act = lambda *_: None
    for left in (4, 3):
        save({"w": torch.ones(4)}, server.place)
        assert len(objects(server.url, server.prefix)) == left
        days_later()
