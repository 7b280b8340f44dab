"""A save that is killed at any of its requests leaves the last checkpoint; a day later a save removes what it left.

``--object-kills 99`` kills one at each request that it makes.
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
import torch
from dcp_doors import load, save
from ranks import context

from stores import FORBIDDEN, environment, objects
from tensorferry.errors import IncompleteCheckpoint, StoreRefused
from tensorferry.storage import commits
from tensorferry.storage.objects import bucket, upload

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.process]


def save_number(variables, place, number):
    os.environ.update(variables)
    upload.PART = 5 << 20
    save({"w": torch.full((3 << 19,), float(number), dtype=torch.float64)}, place)


def moments(seen, kills):
    """Returns at which requests of a save it is killed: in an upload, at the commit, behind it, and spread evenly."""
    first, commit = (
        next(at for at, (method, path) in enumerate(seen) if method == "PUT" and name in path)
        for name in ("/rank", "/index.safetensors")
    )
    # Those that matter most come first.
    spread = [at * len(seen) // max(kills, 1) for at in range(kills)]
    chosen = list(dict.fromkeys([commit, first, commit + 1, *spread, *range(len(seen))]))
    return sorted(chosen[: min(kills, len(seen))])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_9_at_the_requests_of_a_save(gateway, server, pytestconfig, days_later):
    def saved(number, at=None):
        """Saves a number in a process, which is killed at a request; returns which number is there then."""
        arguments = environment(gateway.url), server.place, number
        process = context().Process(target=save_number, args=arguments)

        def act(request, *_):
            if request == at:
                process.kill()
                return "break"
            return None

        gateway.seen.clear()
        gateway.act = act
        process.start()
        process.join(60)
        assert process.exitcode == (0 if at is None else -signal.SIGKILL), f"request {at} was not made"
        gateway.act, seen[:] = lambda *_: None, gateway.seen
        (found,) = load({"w": torch.zeros(3 << 19, dtype=torch.float64)}, server.place)["w"].unique()
        return int(found)

    seen = []
    assert [saved(number) for number in (1, 2)] == [1, 2]
    last = 2
    for at in moments(list(seen), pytestconfig.getoption("--object-kills")):
        assert saved(100 + at, at) in (last, 100 + at), f"killed at request {at}"
        last = 1000 + at
        assert saved(last) == last
    days_later()
    save({"v": torch.ones(3)}, server.place)
    assert len(objects(server.url, server.prefix)) == 3


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
