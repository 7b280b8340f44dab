"""SyncCheckpointer and AsyncCheckpointer save to a bucket, keep the last ones, and load the latest."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch

from stores import objects
from tensorferry.checkpointing import AsyncCheckpointer, SyncCheckpointer, latest_checkpoint, ranks
from tensorferry.errors import ConnectError, FetchTimeout
from tensorferry.storage.objects import upload
from thread_ranks import checkpointers_of, on_all

pytestmark = pytest.mark.process


def state(seed=0):
    return {"w": torch.full((300, 70), float(seed)), "step": seed, "o": {"x": [1, 2]}}


def test_a_sync_checkpointer(any_server):
    checkpointer = SyncCheckpointer()
    for step in (1, 2):
        checkpointer.save(any_server.place, state(step), step=step)
    assert len(objects(any_server.url, any_server.prefix)) == 2
    found = checkpointer.load(any_server.place)
    assert torch.equal(found["w"], state(2)["w"])
    assert found["step"] == 2
    into = {"w": torch.zeros(300, 70)}
    assert checkpointer.load(any_server.place, into) is into
    assert torch.equal(into["w"], state(2)["w"])


def test_an_async_checkpointer_keeps_the_last_ones(server):
    checkpointer = AsyncCheckpointer(keep_last=2)
    try:
        for step in range(1, 5):
            staged, written = checkpointer.save(f"{server.place}/step-{step}", state(step), step=step)
            written.result(60)
        del staged
        kept = {key.split("/")[1] for key in objects(server.url, server.prefix)}
        assert kept == {"step-3", "step-4"}
        assert latest_checkpoint(server.place) == f"{server.place}/step-4"
        assert checkpointer.latest(server.place) == f"{server.place}/step-4"
        assert checkpointer.load(latest_checkpoint(server.place))["step"] == 4
    finally:
        checkpointer.close()


@pytest.mark.timeout(30)
def test_a_trainer_does_not_wait_for_a_store_that_stalls(gateway, server, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(ranks, "_ASK_S", 0.5)
    # Not for ever: the server of the test has a thread for each request.
    gateway.act = lambda *_: answers.wait(25) and None
    checkpointer = AsyncCheckpointer()
    try:
        staged, written = checkpointer.save(f"{server.place}/step-1", state(1), step=1)
        staged.result(10)
        assert not answers.is_set()
        answers.set()
        written.result(20)
        assert checkpointer.load(latest_checkpoint(server.place))["step"] == 1
    finally:
        answers.set()
        checkpointer.close()


@pytest.mark.nightly
@pytest.mark.timeout(120)
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_uploads_for_longer_than_others_are_patient_is_waited_for(gateway, server, monkeypatch, slow):
    part, patience = 5 << 20, 8.0
    monkeypatch.setattr(upload, "PART", part)
    # Six parts, one after the other, take longer.
    gateway.act = lambda _, method, path: time.sleep(patience / 4) if method == "PUT" and "partNumber" in path else None

    savers = checkpointers_of(2, patience=patience, threads=1)

    def save(rank):
        value = torch.full((6 * part if rank == slow else 10,), rank, dtype=torch.uint8)
        savers[rank].save(server.place, {"w": value})

    assert on_all(2, save) == [None, None]
    assert len(objects(server.url, server.prefix)) == 3
    assert SyncCheckpointer().load(server.place)["w"].unique().item() == 0


@pytest.mark.waits
def test_an_upload_that_the_store_takes_nothing_of_ends(gateway, server):
    gateway.act = lambda _, method, path: "stall" if method == "PUT" and "/rank" in path else None
    with pytest.raises((FetchTimeout, ConnectError), match=r"rank00000-.*: writing it: the store"):
        SyncCheckpointer(patience=1).save(server.place, state())


@pytest.mark.waits
@pytest.mark.parametrize(
    "search",
    [
        lambda place: SyncCheckpointer(patience=1).load(place),
        lambda place: SyncCheckpointer(patience=1).latest(place),
        lambda place: latest_checkpoint(place, timeout=timedelta(seconds=1)),
    ],
    ids=["load", "latest", "latest_checkpoint"],
)
def test_no_search_waits_longer_than_it_may(gateway, server, search):
    gateway.act = lambda *_: "stall"
    began = time.monotonic()
    with pytest.raises(FetchTimeout, match="not over within 1 s"):
        search(server.place)
    assert time.monotonic() - began < 20


def test_two_ranks(server):
    ranks = checkpointers_of(2, patience=30)

    def work(rank):
        ranks[rank].save(server.place, {"w": torch.full((64,), float(rank))}, step=1)
        return ranks[rank].load(server.place)["w"].unique().item()

    assert on_all(2, work) == [0.0, 1.0]
    assert len(objects(server.url, server.prefix)) == 3
