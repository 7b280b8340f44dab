"""Keepers that copy from one another: two processes stand in for two nodes."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from pathlib import Path

import pytest

from equality import assert_same_state
from keepers import KeeperAtWork, eventually, loaded, offered, state_of
from secured import fingerprint, make_certificate
from tensorferry.checkpointing import Keeper
from tensorferry.checkpointing.keeper import client

pytestmark = pytest.mark.process

SECRET = "a secret of more than sixteen bytes"
MIB = 1 << 20


def free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in (one, other)]


class Nodes:
    """Two nodes, each with a keeper that has the other for its buddy; a job finds them as ``one`` and ``two``."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, pins: list[str], environment: list[dict]) -> None:
        self._folder, self._stack, self._environment = folder, stack, environment
        self.ports = free_ports()
        self.addresses = [f"{pin}127.0.0.1:{port}" for pin, port in zip(pins, self.ports, strict=True)]

    def start(self, number: int, *options: str, secret: str = SECRET) -> KeeperAtWork:
        buddy = ["--port", str(self.ports[number]), "--buddy", self.addresses[1 - number]]
        name = ("one", "two")[number]
        made = KeeperAtWork(self._folder, *buddy, *options, name=name, secret=secret, **self._environment[number])
        return self._stack.enter_context(made)


@pytest.fixture
def nodes(folder, monkeypatch):
    monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
    with contextlib.ExitStack() as stack:
        yield Nodes(folder, stack, ["", ""], [{}, {}])


@pytest.fixture
def one():
    with Keeper("one") as keeper:
        yield keeper


@pytest.fixture
def two():
    with Keeper("two") as keeper:
        yield keeper


def copied(keeper: Keeper, count: int) -> list:
    def found() -> list | None:
        copies = [one for one in keeper.held() if one.origin != "local" and not one.remote]
        return copies if len(copies) == count else None

    return eventually("the buddy's snapshots are here", found)


def test_the_loss_of_a_node_loses_nothing(nodes, one, two):
    nodes.start(0)
    lost = nodes.start(1)
    for number in range(3):
        fields = {"path": f"/ckpt/run/step-{number}", "world_size": 2, "save_id": f"s{number}", "step": number}
        offered(two, state_of(number), rank=1, **fields)
        offered(one, state_of(9 + number), **fields)
    here = eventually("both newest are copied", lambda: [s for s in copied(one, 2) if s.save_id != "s0"][1:])
    assert [(s.rank, s.complete, s.origin) for s in here] == [(1, True, nodes.addresses[1])]
    lost.kill()
    # The copy is served and loaded like what is the keeper's own.
    assert_same_state(loaded(one, here[0]), state_of(2))
    eventually("the trouble is told", lambda: one.status()["buddies"][0]["error"])
    # The replacement's trainer finds its state at the buddy, as soon as its keeper has asked that.
    nodes.start(1)
    two._wait_for_buddies()
    found = two.held(rank=1)
    assert [(s.save_id, s.remote, s.complete) for s in found] == [("s1", True, True), ("s2", True, True)]
    assert_same_state(loaded(two, found[1]), state_of(2))
    # And what the other node's own trainer gave is copied to it.
    assert_same_state(loaded(two, copied(two, 2)[-1]), state_of(11))
    eventually("it is heard again", lambda: not one.status()["buddies"][0]["error"])


def test_buddies_with_tls_know_each_other_by_their_certificates(folder, monkeypatch, one, two):
    monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
    files = [make_certificate(folder.parent, f"node{number}") for number in range(2)]
    pins = [f"https://{fingerprint(certificate)}@" for certificate, _ in files]
    variables = [{"TENSORFERRY_TLS_CERTIFICATE": str(c), "TENSORFERRY_TLS_KEY": str(k)} for c, k in files]
    with contextlib.ExitStack() as stack:
        nodes = Nodes(folder, stack, pins, [{"environment": one} for one in variables])
        nodes.start(0)
        nodes.start(1)
        assert two.status()["address"] == f"{nodes.addresses[1]}/keeper/checkpoint/"
        offered(one, state_of(1), "/ckpt/run/step-1")
        offered(two, state_of(2), "/ckpt/other/step-1")
        assert_same_state(loaded(one, copied(one, 1)[0]), state_of(2))
        assert_same_state(loaded(two, copied(two, 1)[0]), state_of(1))


def test_a_buddy_that_is_away_holds_nobody_up_and_another_secret_is_told(nodes, one, two, monkeypatch):
    monkeypatch.setattr(client, "_REACH_S", 1.0)
    process = nodes.start(0, "--memory", "4M")
    own = offered(one, state_of(1, 2 * MIB))
    assert one.prefer("/ckpt/other/1", 0, 1) is None
    buddy = nodes.start(1)
    # What does not fit is not copied, and never takes the place of what is the node's own; what fits is.
    offered(two, state_of(2, 8 * MIB), "/ckpt/large/1")
    offered(two, state_of(3), "/ckpt/small/1")
    assert_same_state(loaded(one, copied(one, 1)[0]), state_of(3))
    eventually("the large one is refused", lambda: "of /ckpt/large is not copied" in process.said())
    assert own.times == 0
    assert one.status()["used"] == sum(s.nbytes for s in one.held() if not s.remote) <= 4 * MIB
    # One that does not answer is given up after seconds, and does not hold up the end.
    buddy.process.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{buddy.process.pid}/task")
    eventually("all of it is stopped", lambda: all("\nState:\tT" in p.read_text() for p in threads.glob("*/status")))
    (large,) = one.held(job="/ckpt/large")
    began = time.monotonic()
    with pytest.raises(Exception, match="timed out"):
        one.open(large)
    offered(one, state_of(5), "/ckpt/run/3")
    assert process.end() == 0
    assert time.monotonic() - began < 30
    buddy.kill()
    nodes.start(1, secret="another secret of sixteen bytes")
    nodes.start(0)
    eventually("it is told", lambda: "another shared secret" in one.status()["buddies"][0]["error"])


def test_a_buddy_that_is_killed_in_the_middle_leaves_nothing_half(nodes, one, two, pytestconfig):
    process = nodes.start(0, "--memory", "1G")
    for number in range(pytestconfig.getoption("--keeper-kills")):
        buddy = nodes.start(1)
        offered(two, state_of(number, 64 * MIB), f"/ckpt/run{number}/1")
        eventually("it is being fetched", lambda: one.status()["used"] > 0)
        time.sleep(0.01 * (number % 7))
        buddy.kill()
        eventually("it is given up", lambda: one.status()["buddies"][0]["error"])
        for snapshot in filter(lambda s: not s.remote, one.held()):
            seed = int(snapshot.job.removeprefix("/ckpt/run"))
            assert_same_state(loaded(one, snapshot), state_of(seed, 64 * MIB))
        # Nothing is promised to what does not come.
        eventually("it is counted", lambda: one.status()["used"] == sum(s.nbytes for s in one.held() if not s.remote))
    eventually("no descriptor stays", lambda: process.descriptors() < 60)
