"""Every healthy replica sends to those that heal: quorums as torchft's, a store as the job's, and real transports."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.request
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from replicas import KEYS, TIMEOUT, Replica, common, heal, quorum, sent
from tensorferry import ConnectError, FetchTimeout

SLOW = 8 << 20
#: A quorum in which nobody heals; asking its store would fail.
NOBODY = {"replica_world_size": 3, "max_world_size": 3, "store_address": "127.0.0.1:1"}

pytestmark = pytest.mark.usefixtures("patience_with_stores")


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def make():
    """Makes replicas with ``torch.arange`` as their state, all of which are shut down at the end."""
    made = []

    def replica(rank, state="equal", **options):
        state = {"w": torch.arange(4 << 20, dtype=torch.float32), "step": 7} if state == "equal" else state
        made.append(Replica(rank, state, **options))
        return made[-1]

    yield replica
    for each in made:
        each.transport.shutdown(wait=False)


@pytest.fixture
def job(make):
    """Makes the replicas of a job; all but the last are healthy."""
    return lambda count=3, **options: [make(r, "equal" if r < count - 1 else None, **options) for r in range(count)]


def senders(replica):
    """The ports of those that a replica has received from."""
    return {sender.rpartition(":")[2] for sender in replica.transport.last_report.senders}


def port(replica):
    return replica.transport.metadata().split("/")[2].rpartition(":")[2]


@pytest.mark.waits
@pytest.mark.parametrize(
    "options", [{}, {"secret": "a secret of the job"}, {"tls": True}], ids=["plain", "secret", "tls"]
)
def test_a_heal_takes_from_every_healthy_replica_and_says_who_sent_how_much(store, job, caplog, options):
    caplog.set_level(logging.INFO, "tensorferry")
    # So slow that none of them sends it all before the others are connected.
    replicas = job(4, max_bandwidth=SLOW, **options)
    quorum(store, replicas)
    state = heal(replicas)
    assert torch.equal(state["w"], replicas[0].state["w"])
    assert all(sent(each) > 0 for each in replicas[:-1])
    assert sum(map(sent, replicas)) < 1.5 * state["w"].nbytes
    report = replicas[-1].transport.last_report
    assert report.troubles == {}
    assert senders(replicas[-1]) == {port(each) for each in replicas[:-1]}
    assert 16 << 20 <= sum(report.senders.values()) <= report.bytes
    assert all(f"{share} from {sender}" in caplog.text for sender, share in report.senders.items())
    with urllib.request.urlopen(replicas[-1].transport.status_url() + "?json", timeout=20) as answer:
        assert sorted(json.load(answer)["ended"][0]["sent_by"]) == sorted(map(list, report.senders.items()))


@pytest.mark.waits
@pytest.mark.parametrize("what", ["dies", "withdraws and trains on"])
@pytest.mark.parametrize("lost", [0, 1], ids=["the assigned one", "another one"])
def test_a_replica_that_is_lost_while_it_sends_is_done_without(store, make, lost, what):
    healthy = [make(rank, max_bandwidth=SLOW, snapshot="copy") for rank in range(3)]
    before, ended = healthy[0].state["w"].clone(), threading.Event()

    def progress(done, _total):
        if done and not ended.is_set() and sent(healthy[lost]):
            ended.set()
            each = healthy[lost]
            if what == "dies":
                each.transport.shutdown(wait=False)
                return
            each.transport.disallow_checkpoint()
            each.state["w"] += 1
            each.transport.send_checkpoint([9], 8, each.state, TIMEOUT)

    replicas = [*healthy, make(3, None, progress=progress)]
    quorum(store, replicas)
    assert torch.equal(heal(replicas)["w"], before)
    assert ended.is_set()
    assert {port(each) for each in healthy if each is not healthy[lost]} <= senders(replicas[-1])


def serve_another_state(other):
    other.transport.send_checkpoint([9], 7, {"w": torch.zeros(4 << 20), "step": 7}, TIMEOUT)


def serve_another_step(other):
    other.transport.send_checkpoint([9], 8, {"w": torch.zeros(4 << 20), "step": 8}, TIMEOUT)


def serve_nothing(other):
    """As a Manager that cannot configure its process group: it knows the quorum, and sends nothing."""
    other.transport.disallow_checkpoint()


@pytest.mark.waits
@pytest.mark.parametrize(
    ("job_has", "other_has", "does"),
    [
        ({}, {}, serve_another_state),
        ({}, {}, serve_another_step),
        ({}, {}, serve_nothing),
        ({"secret": "the secret of the job"}, {"secret": "another job's secret"}, None),
        ({}, {"secret": "a secret of its own"}, None),
        ({"tls": True}, {}, None),
    ],
)
def test_a_replica_that_has_something_else_is_left_out(store, make, job_has, other_has, does):
    replicas = [make(0, **job_has), make(1, **other_has), make(2, None, **job_has)]
    quorum(store, replicas)
    if does is not None:
        does(replicas[1])
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
    assert senders(replicas[-1]) == {port(replicas[0])}


def test_nobody_sends_or_asks_the_store_while_nobody_heals(job):
    replicas = job(3)
    for each in replicas:
        assert each.ask(**NOBODY) is each.client.quorum
        assert each.sources._last is None
        assert each.transport._disallowed
    # At the first step all heal from the primary.
    assert replicas[1].ask(**NOBODY, heal=True).recover_dst_replica_ranks == []
    assert replicas[1].sources._last is None


def test_what_is_not_a_known_quorum_is_the_clients(job, caplog):
    replica = job(2)[0]
    assert replica.sources.should_commit(True) is True
    replica.client.quorum = SimpleNamespace(heal=False)
    assert replica.sources._quorum() is replica.client.quorum
    assert "replicas heal from the sources that torchft assigns alone: AttributeError" in caplog.text

    def fails(**_asked):
        raise TimeoutError("no quorum")

    replica.client._quorum = fails
    with pytest.raises(TimeoutError, match="no quorum"):
        replica.sources._quorum()


@pytest.mark.waits
def test_a_store_that_does_not_answer_holds_nobody_up(job, caplog):
    caplog.set_level(logging.WARNING, "tensorferry")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        replicas = job(3)
        about = {"replica_world_size": 3, "max_world_size": 2, "store_address": f"127.0.0.1:{silent.getsockname()[1]}"}
        for each in replicas[:2]:
            assert each.ask(**about).recover_dst_replica_ranks
            assert not each.sources._last.done()
        replicas[2].ask(**about, heal=True, max_replica_rank=None)
        assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
        assert "the job's store has not answered" in caplog.text
        # The next heal's question does not wait for the one that has no answer.
        real = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        quorum(real, replicas, quorum_id=4)
        assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
        assert sent(replicas[1]) > 0


@pytest.mark.parametrize(
    "found",
    [
        "http://127.0.0.1:9/checkpoint/",
        "ftp://somewhere/",
        "x" * 100_000,
        "\udcff",
        "",
        "http://127.0.0.1:99999/a/checkpoint/",
        "http://127.0.0.1:0/a/checkpoint/",
        "http://[::1/a/checkpoint/",
        "http://127.0.0.1:9/\x01/checkpoint/",
        "https://sha256-" + "0" * 63 + "@127.0.0.1:9/a/checkpoint/",
        "http://127.0.0.1:9/a/checkpoint/ " * 40,
    ],
)
def test_what_is_no_metadata_is_left_out(store, job, found, caplog):
    caplog.set_level(logging.WARNING, "tensorferry")
    replicas = job(2)
    about = common(store, replicas, max_world_size=2, replica_world_size=3)
    PrefixStore(KEYS, store).set("1", found.encode("utf-8", "surrogateescape"))
    replicas[0].ask(**about)
    replicas[0].settle()
    replicas[1].ask(**about, heal=True, max_replica_rank=None)
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
    assert "a source in the job's store is left out" in caplog.text


def test_what_was_announced_is_taken_back_and_not_asked_in_the_next_heal(store, job):
    replicas, keys = job(3), PrefixStore(KEYS, store)
    quorum(store, replicas)
    heal(replicas)
    assert keys.check(["0", "1"])
    for each in replicas:
        each.ask(**NOBODY)
        each.settle()
        each.transport.disallow_checkpoint()
    assert not keys.check(["0"])
    assert not keys.check(["1"])
    replicas[0].transport.shutdown()
    with pytest.raises((ConnectError, FetchTimeout)):
        heal(replicas, timedelta(seconds=5))


def test_of_many_healthy_replicas_few_send_and_those_that_heal_find_them(store, job, monkeypatch):
    monkeypatch.setattr("tensorferry.torchft.replica_sources._MOST_SOURCES", 2)
    replicas = job(6)
    quorum(store, replicas)
    sending = [each for each in replicas[:-1] if not each.transport._disallowed]
    # The assigned one, and two.
    assert len(sending) == 3
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
    assert all(sent(each) for each in sending)
    assert replicas[-1].transport.last_report.troubles == {}


def test_two_jobs_with_one_store_do_not_mix(store, make):
    """Nor do two lives of one job, whose numbers are the same after a restart of the Lighthouse."""
    other = make(1, {"w": torch.zeros(4 << 20), "step": 7})
    other.ask(**common(store, [1, 2, 3], replica_ids=["one:1", "two:2", "three:3"]))
    other.settle()
    replicas = [make(0), make(2, None)]
    about = common(store, [1, 2, 3], replica_ids=["one:4", "two:5", "three:6"])
    replicas[0].ask(**about)
    replicas[0].settle()
    replicas[1].ask(**about, heal=True, max_replica_rank=None)
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
    assert sent(other) == 0
    # The same members in another order are the same quorum.
    replicas[1].ask(**about | {"replica_ids": ["three:6", "one:4", "two:5"]}, heal=True, max_replica_rank=None)
    assert replicas[1].transport._sources_besides() == [replicas[0].transport.metadata()]


def test_the_same_key_is_not_taken_back_after_it_was_announced_again(store, make, monkeypatch):
    replica = make(0)
    about = common(store, [1, 2, 3])
    replica.ask(**about)
    replica.settle()
    announced, delete, announce = threading.Event(), PrefixStore.delete_key, PrefixStore.set

    def delete_late(keys, key):
        announced.wait(1)
        delete(keys, key)

    def announce_now(keys, key, value):
        announce(keys, key, value)
        announced.set()

    monkeypatch.setattr(PrefixStore, "delete_key", delete_late)
    monkeypatch.setattr(PrefixStore, "set", announce_now)
    replica.ask(**about)
    replica.settle()
    # And whatever else was asked for has come to its end.
    replica.sources._thread.ask(lambda: None).result(20)
    assert PrefixStore(KEYS, store).check(["0"])


def test_a_former_store_that_hangs_does_not_delay_the_next_announcement(store, make, monkeypatch):
    replica = make(0)
    replica.ask(**common(store, [1, 2, 3]))
    replica.settle()
    hanging = threading.Event()
    monkeypatch.setattr(PrefixStore, "delete_key", lambda *_: hanging.wait(20))
    try:
        replica.ask(**common(store, [1, 2, 3], quorum_id=4))
        PrefixStore(KEYS.replace("/3/", "/4/"), store).wait(["0"], timedelta(seconds=10))
    finally:
        hanging.set()


@pytest.mark.nightly
def test_a_process_that_ends_while_a_store_does_not_answer_ends_well():
    code = """
        import datetime
        from torch.distributed import TCPStore
        from tensorferry.net.store import StoreThread
        patience = datetime.timedelta(seconds=2)
        # The thread comes back from torch's C++ while the interpreter ends.
        StoreThread().ask(lambda: TCPStore("127.0.0.1", 1, is_master=False, wait_for_workers=False, timeout=patience))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
