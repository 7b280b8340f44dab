"""What may go wrong in a job whose healthy replicas all send: replicas, their stores, and other jobs."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
import urllib.request
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from replicas import KEYS, TIMEOUT, Replica, common, heal, quorum, sent
from tensorferry import ConnectError, FetchTimeout

SLOW = 8 << 20
#: Replicas of another life of the job, or of another job.
OTHERS = ["one:1", "two:2", "three:3"]


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


def senders(replica):
    """The ports of those that a replica has received from."""
    return {sender.rpartition(":")[2] for sender in replica.transport.last_report.senders}


def port(replica):
    return replica.transport.metadata().split("/")[2].rpartition(":")[2]


@pytest.mark.waits
@pytest.mark.parametrize("dying", [0, 1], ids=["the assigned one", "another one"])
def test_a_replica_that_dies_while_it_sends_is_done_without(store, make, dying):
    healthy = [make(0, max_bandwidth=SLOW), make(1, max_bandwidth=SLOW), make(2, max_bandwidth=SLOW)]
    ended = threading.Event()

    def progress(done, _total):
        if done and not ended.is_set() and sent(healthy[dying]):
            ended.set()
            healthy[dying].transport.shutdown(wait=False)

    replicas = [*healthy, make(3, None, progress=progress)]
    quorum(store, replicas)
    state = heal(replicas)
    assert torch.equal(state["w"], healthy[0].state["w"])
    assert ended.is_set()
    assert {port(each) for each in healthy if each is not healthy[dying]} <= senders(replicas[-1])


@pytest.mark.process
def test_the_report_and_the_log_line_say_who_sent_how_much(store, make, caplog):
    caplog.set_level(logging.INFO, "tensorferry")
    replicas = [make(0, max_bandwidth=SLOW), make(1, max_bandwidth=SLOW), make(2, max_bandwidth=SLOW), make(3, None)]
    quorum(store, replicas)
    heal(replicas)
    report = replicas[-1].transport.last_report
    assert senders(replicas[-1]) == {port(each) for each in replicas[:-1]}
    assert 16 << 20 <= sum(report.senders.values()) <= report.bytes
    # Each has an equal number of connections, and blocks are given out as they are asked for.
    assert all(share > 2 << 20 for share in report.senders.values())
    assert all(f"{share} from {sender}" in caplog.text for sender, share in report.senders.items())
    assert report.lanes % 3 == 0
    with urllib.request.urlopen(replicas[-1].transport.metrics_url(), timeout=20) as answer:
        figures = answer.read().decode()
    assert "tensorferry_last_receive_senders 3\n" in figures
    assert f'last_receive_sender_bytes{{host="127.0.0.1"}} {sum(report.senders.values())}\n' in figures
    with urllib.request.urlopen(replicas[-1].transport.status_url(), timeout=20) as answer:
        page = answer.read().decode()
    assert all(f"sent by {sender}" in page for sender in report.senders)
    table = subprocess.run(
        [sys.executable, "-m", "tensorferry", "top", "--once", replicas[-1].transport.metadata()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "/s from 3" in table.stdout


def test_what_another_life_of_the_job_left_in_the_store_is_not_found(store, make):
    # It has the same numbers, as after a restart of the Lighthouse, and another state.
    stale = make(1, {"w": torch.zeros(4 << 20), "step": 7})
    stale.ask(**common(store, [1, 2, 3], replica_ids=OTHERS))
    stale.settle()
    # Now the replica in its place runs torchft's own Manager, and announces nothing.
    replicas = [make(0), make(2, None)]
    about = common(store, [1, 2, 3], replica_ids=["one:4", "two:5", "three:6"])
    replicas[0].ask(**about)
    replicas[0].settle()
    replicas[1].ask(**about, heal=True, max_replica_rank=None)
    # Whoever else is found would be believed.
    replicas[0].transport.shutdown()
    with pytest.raises((ConnectError, FetchTimeout)):
        heal(replicas, timedelta(seconds=5))


def test_two_jobs_with_one_store_do_not_mix(store, make):
    other = make(1, {"w": torch.zeros(4 << 20), "step": 7})
    other.ask(**common(store, [1, 2, 3], replica_ids=OTHERS))
    other.settle()
    replicas = [make(0), make(2, None)]
    about = common(store, [1, 2, 3], replica_ids=["a:1", "b:2", "c:3"])
    replicas[0].ask(**about)
    replicas[0].settle()
    replicas[1].ask(**about, heal=True, max_replica_rank=None)
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
    assert sent(other) == 0
    # The same members in another order are the same quorum.
    replicas[1].ask(**about | {"replica_ids": ["c:3", "a:1", "b:2"]}, heal=True, max_replica_rank=None)
    assert replicas[1].transport._sources_besides() == [replicas[0].transport.metadata()]


def test_a_replica_that_serves_another_step_is_left_out(store, make):
    replicas = [make(0), make(1), make(2, None)]
    quorum(store, replicas)
    # It has gone on, and serves what it has now to somebody else.
    replicas[1].transport.send_checkpoint([9], 8, {"w": torch.zeros(4 << 20), "step": 8}, TIMEOUT)
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
    assert senders(replicas[-1]) == {port(replicas[0])}


@pytest.mark.waits
def test_a_replica_that_announces_and_never_sends_is_not_waited_for(store, make):
    replicas = [make(0), make(1), make(2, None)]
    about = common(store, replicas)
    replicas[0].ask(**about, recover_dst_replica_ranks=[2])
    # As a Manager that cannot configure its process group: it knows the quorum, and sends nothing.
    replicas[1].ask(publish=False, **about)
    for each in replicas[:2]:
        each.settle()
    replicas[2].ask(**about, heal=True, max_replica_rank=None)
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
    assert senders(replicas[-1]) == {port(replicas[0])}


@pytest.mark.parametrize(
    ("assigned", "other", "healing"),
    [
        ({"secret": "the secret of the job"}, {"secret": "another job's secret"}, {"secret": "the secret of the job"}),
        ({"secret": "the secret of the job"}, {}, {"secret": "the secret of the job"}),
        ({"tls": True}, {}, {"tls": True}),
        ({}, {"secret": "a secret of its own"}, {}),
        ({}, {"tls": True}, {}),
        ({"tls": True}, {"tls": True, "secret": "a secret of its own"}, {"tls": True}),
    ],
)
def test_replicas_with_other_secrets_or_tls_fail_nobody(store, make, assigned, other, healing):
    replicas = [make(0, **assigned), make(1, **other), make(2, None, **healing)]
    quorum(store, replicas)
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
    if "secret" in other or other != assigned:
        expected = {port(replicas[0])} | ({port(replicas[1])} if other == {"tls": True} and not healing else set())
        assert senders(replicas[-1]) <= expected


@pytest.mark.parametrize(
    "found",
    [
        "http://127.0.0.1:notaport/a/checkpoint/",
        "http://127.0.0.1:99999/a/checkpoint/",
        "http://127.0.0.1:0/a/checkpoint/",
        "http://[::1/a/checkpoint/",
        "http://:80/a/checkpoint/",
        "http://127.0.0.1:9/\x01/checkpoint/",
        "https://sha256-" + "0" * 63 + "@127.0.0.1:9/a/checkpoint/",
        "http://127.0.0.1:9/a/checkpoint/ " * 40,
    ],
)
def test_a_hostile_key_fails_no_heal(store, make, found, caplog):
    caplog.set_level(logging.WARNING, "tensorferry")
    replicas = [make(0), make(1, None)]
    about = common(store, replicas, max_world_size=2, replica_world_size=3)
    PrefixStore(KEYS, store).set("1", found)
    replicas[0].ask(**about)
    replicas[0].settle()
    replicas[1].ask(**about, heal=True, max_replica_rank=None)
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
    assert "a source in the job's store is left out" in caplog.text


@pytest.mark.waits
def test_a_store_that_dies_between_quorum_and_heal_fails_no_heal(make, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "tensorferry")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    replicas = [make(0), make(1), make(2, None)]
    about = common(store, replicas)
    for each in replicas[:2]:
        each.ask(**about)
        each.settle()
    del store
    monkeypatch.setattr("tensorferry.torchft.replica_sources._CONNECT", timedelta(seconds=1))
    replicas[2].ask(**about, heal=True, max_replica_rank=None)
    assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
    assert "heals from the source that torchft assigned alone" in caplog.text
    # What was announced there cannot be taken back, and that is no trouble for the next quorum.
    for each in replicas[:2]:
        each.ask(replica_world_size=3, max_world_size=3, store_address="127.0.0.1:1")
        each.settle()


def test_heals_that_fail_and_are_tried_again_find_everybody_each_time(store, make):
    replicas = [make(0), make(1), make(2, None)]
    for _ in range(4):
        # Nobody commits: the same quorum, the same step, the same keys.
        quorum(store, replicas)
        assert len(replicas[-1].transport._sources_besides()) == 2
        assert torch.equal(heal(replicas)["w"], replicas[0].state["w"])
        for each in replicas[:2]:
            each.transport.disallow_checkpoint()


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


def test_a_heal_right_after_a_heal_gets_the_state_of_its_own_step(store, make):
    replicas = [make(0), make(1), make(2, None)]
    quorum(store, replicas)
    heal(replicas)
    for each in replicas[:2]:
        each.transport.disallow_checkpoint()
        each.state["w"] += 1
    quorum(store, replicas, max_step=8, quorum_id=4)
    state = replicas[-1].transport.recv_checkpoint(0, replicas[0].transport.metadata(), 8, TIMEOUT)
    assert torch.equal(state["w"], replicas[0].state["w"])


@pytest.mark.waits
@pytest.mark.parametrize("withdrawing", [0, 1], ids=["the assigned one", "another one"])
def test_a_replica_that_withdraws_and_trains_on_mixes_nothing(store, make, withdrawing):
    replicas = [make(0, max_bandwidth=SLOW, snapshot="copy"), make(1, max_bandwidth=SLOW, snapshot="copy")]
    before = replicas[0].state["w"].clone()
    gone = threading.Event()

    def progress(done, _total):
        if done and not gone.is_set() and sent(replicas[withdrawing]):
            gone.set()
            each = replicas[withdrawing]
            each.transport.disallow_checkpoint()
            each.state["w"] += 1
            each.transport.send_checkpoint([9], 8, each.state, TIMEOUT)

    replicas.append(make(2, None, progress=progress))
    quorum(store, replicas)
    assert torch.equal(heal(replicas)["w"], before)
    assert gone.is_set()


@pytest.mark.waits
def test_borrowed_memory_is_not_changed_under_a_receive_from_many(store, make):
    replicas = [make(0, max_bandwidth=SLOW), make(1, max_bandwidth=SLOW)]
    before = replicas[0].state["w"].clone()
    began, waiting = threading.Event(), []

    def withdraw(each):
        each.transport.disallow_checkpoint()
        # What an optimizer does, right after should_commit().
        each.state["w"] += 1

    def progress(done, _total):
        if done and not began.is_set():
            began.set()
            waiting.extend(threading.Thread(target=withdraw, args=(each,)) for each in replicas[:2])
            for thread in waiting:
                thread.start()

    replicas.append(make(2, None, progress=progress))
    quorum(store, replicas)
    assert torch.equal(heal(replicas)["w"], before)
    for thread in waiting:
        thread.join(20)
    assert began.is_set()


@pytest.mark.nightly
def test_a_process_that_ends_while_a_store_does_not_answer_ends_well():
    code = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        from replicas import Replica

        class Slow:
            # The thread comes back while the interpreter ends.
            def __del__(self, sleep=time.sleep, clock=time.monotonic):
                end = clock() + 15
                while clock() < end and not self.answer.done():
                    sleep(0.1)

        slow = Slow()
        replica = Replica(0, {{"step": 7}})
        replica.ask(replica_world_size=3, max_world_size=2, store_address="127.0.0.1:1")
        slow.answer = replica.sources._last
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
