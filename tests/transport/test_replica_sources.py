"""Every healthy replica sends to those that heal: quorums as torchft's, a store as the job's, and real transports."""

from __future__ import annotations

import logging
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from replicas import KEYS, TIMEOUT, Replica, common, heal, quorum, sent
from tensorferry import ConnectError, FetchTimeout


@pytest.fixture
def store(request):
    request.getfixturevalue("patience_with_stores")
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def job():
    """Makes the replicas of a job; all but the last are healthy."""
    made = []

    def start(count=3, **options):
        state = {"w": torch.arange(4 << 20, dtype=torch.float32), "step": 7}
        made.extend(Replica(rank, state if rank < count - 1 else None, **options) for rank in range(count))
        return made

    yield start
    for each in made:
        each.transport.shutdown(wait=False)


@pytest.mark.waits
@pytest.mark.parametrize(
    "options", [{}, {"secret": "a secret of the job"}, {"tls": True}], ids=["plain", "secret", "tls"]
)
def test_a_heal_takes_from_every_healthy_replica(store, job, options):
    # So slow that none of them sends it all before the others are connected.
    replicas = job(4, max_bandwidth=8 << 20, **options)
    quorum(store, replicas)
    state = heal(replicas)
    assert torch.equal(state["w"], replicas[0].state["w"])
    assert all(sent(each) > 0 for each in replicas[:-1])
    assert sum(map(sent, replicas)) < 1.5 * state["w"].nbytes
    assert replicas[-1].transport.last_report.troubles == {}


def test_it_outlives_the_assigned_replica(store, job):
    replicas = job(3)
    quorum(store, replicas)
    metadata = replicas[0].transport.metadata()
    replicas[0].transport.shutdown()
    state = replicas[-1].transport.recv_checkpoint(0, metadata, 7, TIMEOUT)
    assert torch.equal(state["w"], replicas[1].state["w"])


def test_a_replica_with_another_state_is_left_out(store, job):
    replicas = job(3)
    replicas[1].state = {"w": torch.zeros(4 << 20), "step": 7}
    quorum(store, replicas)
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])


def test_nobody_sends_or_asks_the_store_while_nobody_heals(job):
    replicas = job(3)
    # No such store: asking it would fail.
    about = {"replica_world_size": 3, "max_world_size": 3, "store_address": "127.0.0.1:1"}
    for each in replicas:
        assert each.ask(**about) is each.client.quorum
        assert each.sources._last is None
        assert each.transport._disallowed


def test_at_the_first_step_all_heal_from_the_primary(job):
    replicas = job(3)
    told = replicas[1].ask(replica_world_size=3, max_world_size=3, store_address="127.0.0.1:1", heal=True)
    assert told.recover_dst_replica_ranks == []
    assert replicas[1].sources._last is None


def test_what_is_no_quorum_is_the_clients(job):
    assert job(2)[0].sources.should_commit(True) is True


def test_replicas_that_run_another_manager_are_not_waited_for_long(store, job):
    replicas = job(3)
    about = common(store, replicas)
    # Only the assigned one sends, as under torchft's own Manager, and announces nothing.
    replicas[0].transport.send_checkpoint([2], 7, replicas[0].state, TIMEOUT)
    replicas[2].ask(**about, heal=True, max_replica_rank=None)
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])


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


@pytest.mark.waits
def test_a_store_that_cannot_be_reached_is_logged(job, caplog):
    caplog.set_level(logging.WARNING, "tensorferry")
    replicas = job(2)
    about = {"replica_world_size": 2, "max_world_size": 1, "store_address": "127.0.0.1:1"}
    replicas[0].ask(**about)
    replicas[1].ask(**about, heal=True, max_replica_rank=None)
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
    assert "heals from the source that torchft assigned alone" in caplog.text


@pytest.mark.parametrize(
    "found",
    ["http://127.0.0.1:9/checkpoint/", "ftp://somewhere/", "x" * 100_000, "\udcff", "", "http://a/b/ http://c/"],
)
def test_what_is_no_metadata_is_left_out(store, job, found, caplog):
    caplog.set_level(logging.WARNING, "tensorferry")
    replicas = job(2)
    about = common(store, replicas, max_world_size=2, replica_world_size=3)
    keys = PrefixStore(KEYS, store)
    keys.set("1", found.encode("utf-8", "surrogateescape"))
    replicas[0].ask(**about)
    replicas[0].settle()
    replicas[1].ask(**about, heal=True, max_replica_rank=None)
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
    assert "a source in the job's store is left out" in caplog.text or " " in found


def test_a_quorum_of_another_version_raises_nothing(job, caplog):
    replicas = job(2)
    replicas[0].client.quorum = SimpleNamespace(heal=False)
    assert replicas[0].sources._quorum() is replicas[0].client.quorum
    assert "replicas heal from the sources that torchft assigns alone: AttributeError" in caplog.text


def test_a_failed_quorum_raises_as_the_clients_does(job):
    replica = job(2)[0]

    def fails(**_asked):
        raise TimeoutError("no quorum")

    replica.client._quorum = fails
    with pytest.raises(TimeoutError, match="no quorum"):
        replica.sources._quorum()


def test_sources_of_one_heal_are_not_asked_in_the_next(store, job):
    replicas = job(3)
    quorum(store, replicas)
    heal(replicas)
    for each in replicas[:2]:
        each.transport.disallow_checkpoint()
    replicas[-1].ask(replica_world_size=3, max_world_size=3, store_address="127.0.0.1:1")
    replicas[0].transport.shutdown()
    with pytest.raises((ConnectError, FetchTimeout)):
        heal(replicas, timedelta(seconds=5))


def test_what_was_announced_is_taken_back(store, job):
    replicas = job(3)
    quorum(store, replicas)
    keys = PrefixStore(KEYS, store)
    assert keys.check(["0"])
    assert keys.check(["1"])
    for each in replicas[:2]:
        each.ask(replica_world_size=3, max_world_size=3, store_address="127.0.0.1:1")
        each.settle()
    assert not keys.check(["0"])
    assert not keys.check(["1"])


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
