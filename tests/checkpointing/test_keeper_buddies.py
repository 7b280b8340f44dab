"""Keepers that copy from one another, and whose snapshot it is: two processes stand in for two nodes."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from keepers import KeeperAtWork, eventually, loaded, offered
from secured import make_certificate
from tensorferry import HTTPTransport
from tensorferry.checkpointing import AsyncCheckpointer, Keeper
from tensorferry.checkpointing.keeper import client
from tensorferry.errors import IncompleteCheckpoint
from tensorferry.net.certificates import fingerprint_of

pytestmark = pytest.mark.process

SECRET = "a secret of more than sixteen bytes"
MIB = 1 << 20


def state_of(seed: int, nbytes: int = MIB) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(nbytes // 4, generator=generator), "names": {"a", str(seed)}}


def assert_same(found: dict, expected: dict) -> None:
    assert torch.equal(found["w"], expected["w"])
    assert found["names"] == expected["names"]


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
    here = eventually("all is copied", lambda: [s for s in copied(one, 2) if s.save_id == "s2"])
    assert [(s.rank, s.complete, s.origin) for s in here] == [(1, True, nodes.addresses[1])]
    lost.kill()
    # The copy is served and loaded like what is the keeper's own.
    assert_same(loaded(one, here[0]), state_of(2))
    with HTTPTransport(timedelta(seconds=30), secret=SECRET) as transport:
        assert_same(transport.recv_checkpoint(0, here[0].metadata, 2, timedelta(seconds=30)), state_of(2))
    eventually("the trouble is told", lambda: one.status()["buddies"][0]["error"])
    # The replacement's trainer finds its state at the buddy, as soon as its keeper has asked that.
    nodes.start(1)
    two._wait_for_buddies()
    found = two.held(rank=1)
    assert [(s.save_id, s.remote, s.complete) for s in found] == [("s1", True, True), ("s2", True, True)]
    assert_same(loaded(two, found[1]), state_of(2))
    # And what the other node's own trainer gave is copied to it.
    assert_same(loaded(two, copied(two, 2)[-1]), state_of(11))
    eventually("it is heard again", lambda: not one.status()["buddies"][0]["error"])


def test_buddies_with_tls_know_each_other_by_their_certificates(folder, monkeypatch, one, two):
    monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
    files = [make_certificate(folder.parent, f"node{number}") for number in range(2)]
    pins = [f"https://{fingerprint_of(certificate)}@" for certificate, _ in files]
    variables = [{"TENSORFERRY_TLS_CERTIFICATE": str(c), "TENSORFERRY_TLS_KEY": str(k)} for c, k in files]
    with contextlib.ExitStack() as stack:
        nodes = Nodes(folder, stack, pins, [{"environment": one} for one in variables])
        first, second = nodes.start(0), nodes.start(1)
        assert two.status()["address"] == f"{nodes.addresses[1]}/keeper/checkpoint/"
        offered(one, state_of(1), "/ckpt/run/step-1")
        offered(two, state_of(2), "/ckpt/other/step-1")
        assert_same(loaded(one, copied(one, 1)[0]), state_of(2))
        assert_same(loaded(two, copied(two, 1)[0]), state_of(1))
        # Who answers there with another certificate is no buddy.
        second.kill()
        nodes._environment.reverse()
        nodes.start(1)
        error = eventually(
            "it is told", lambda: [e for b in one.status()["buddies"] if "fingerprint" in (e := b["error"])]
        )
        assert "its certificate has the fingerprint" in error[0]
        assert first.process.poll() is None


def test_a_buddy_that_is_away_holds_nobody_up_and_another_secret_is_told(nodes, one, two, monkeypatch):
    monkeypatch.setattr(client, "_REACH_S", 1.0)
    process = nodes.start(0, "--memory", "4M")
    own = offered(one, state_of(1, 2 * MIB))
    assert one.prefer("/ckpt/other/1", 0, 1) is None
    buddy = nodes.start(1)
    # What does not fit is not copied, and never takes the place of what is the node's own; what fits is.
    offered(two, state_of(2, 8 * MIB), "/ckpt/large/1")
    offered(two, state_of(3), "/ckpt/small/1")
    assert_same(loaded(one, copied(one, 1)[0]), state_of(3))
    eventually("the large one is refused", lambda: "of /ckpt/large is not copied" in process.said())
    assert own.times == 0
    assert one.status()["used"] == sum(s.nbytes for s in one.held() if not s.remote) <= 4 * MIB
    # It goes for the node's own.
    offered(one, state_of(4, 2 * MIB), "/ckpt/run/2")
    assert [s.origin for s in one.held() if not s.remote] == ["local"]
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
            assert_same(loaded(one, snapshot), state_of(seed, 64 * MIB))
        # Nothing is promised to what does not come.
        eventually("it is counted", lambda: one.status()["used"] == sum(s.nbytes for s in one.held() if not s.remote))
    eventually("no descriptor stays", lambda: process.descriptors() < 60)


#: What stands for the folders of two machines that have nothing but the path in common.
HERE, THERE = "0" * 16, "1" * 16


@contextlib.contextmanager
def machine(monkeypatch, location: str):
    """Within the block, clients are on the machine whose folders ``location`` stands for."""
    with monkeypatch.context() as patch:
        patch.setattr(client, "location_of", lambda _: location)
        yield


def saved(name: str, job: str | None, path: Path, number: int, *, on_disk: bool = True) -> None:
    """Saves as a trainer does that ends then; without ``on_disk``, onto a disk that is not this machine's."""
    keeper = Keeper(name, job=job)
    before = {one.save_id for one in keeper.held()}
    checkpointer = AsyncCheckpointer(keeper=keeper)
    aside = path.with_name(f"{path.name}.aside")
    if not on_disk and path.exists():
        path.rename(aside)
    checkpointer.save(path, {"w": torch.full((1000,), float(number))}, step=number)[1].result()
    eventually("it is kept", lambda: {one.save_id for one in keeper.held() if one.origin == "local"} - before)
    checkpointer.close()
    if not on_disk:
        shutil.rmtree(path)
        if aside.exists():
            aside.rename(path)


def found(name: str, job: str | None, place: Path, *, newest: bool = False) -> float | None:
    """Loads the checkpoint at ``place``, or the newest one below it; returns its value, ``None`` if there is none."""
    with contextlib.closing(AsyncCheckpointer(keeper=Keeper(name, job=job))) as checkpointer:
        path = checkpointer.latest(place) if newest else str(place)
        try:
            return None if path is None else float(checkpointer.load(path)["w"][0])
        except IncompleteCheckpoint:
            return None


def test_a_job_gets_what_is_its_own_and_never_a_strangers(nodes, two, tmp_path, monkeypatch):
    nodes.start(0)
    nodes.start(1)
    root = tmp_path / "run"
    path = root / "step-1"
    with machine(monkeypatch, HERE):
        saved("two", "B", path, 2)
        saved("two", None, path, 3)
    with machine(monkeypatch, THERE):
        saved("one", "A", path, 1, on_disk=False)
        saved("one", None, root / "step-9", 9, on_disk=False)
    copied(two, 2)
    with machine(monkeypatch, HERE):
        # The disk of the path's owner is that of who committed last; what another job has in memory is not taken.
        assert [found("two", job, path) for job in ("B", "C", None)] == [3, 3, 3]
        assert [found("two", job, root, newest=True) for job in ("B", None)] == [3, 3]
        assert found("two", None, root / "step-9") is None
        shutil.rmtree(path)
        # Nothing is on the disk: each has its own, a job without a name that of this folder.
        assert [found("two", job, path) for job in ("A", "B", "C", None)] == [1, 2, None, 3]
        assert [found("two", job, root, newest=True) for job in ("A", "B", "C", None)] == [1, 2, None, 3]
    with machine(monkeypatch, THERE):
        assert found("two", None, root / "step-9") == 9
        # What is committed on the own disk is not replaced by what another machine has, though it began later.
    with machine(monkeypatch, HERE):
        saved("two", "B", path, 4)
    with machine(monkeypatch, THERE):
        saved("one", "B", root / "step-2", 5, on_disk=False)
    copied(two, 3)
    with machine(monkeypatch, HERE):
        assert (found("two", "B", path), found("two", "B", root, newest=True)) == (4, 4)
        # The very save that is committed is taken from any machine.
        saved("two", None, root / "step-3", 6)
    with machine(monkeypatch, THERE):
        (root / "step-3" / "rank-0.safetensors").unlink(missing_ok=True)
        assert found("two", None, root / "step-3") == 6


def test_what_was_loaded_from_a_buddy_is_older_than_what_is_saved_then(nodes, two, tmp_path, monkeypatch):
    nodes.start(0)
    nodes.start(1)
    root = tmp_path / "run"
    now = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)
        saved("one", "B", root / "step-1", 1, on_disk=False)
    copied(two, 1)
    with contextlib.closing(AsyncCheckpointer(keeper=Keeper("two", job="B"))) as checkpointer:
        assert float(checkpointer.load(root / "step-1")["w"][0]) == 1
        checkpointer.save(root / "step-2", {"w": torch.zeros(9)})[1].result()
        eventually("it is kept", lambda: len(two.held(job="B")) == 2)
        assert checkpointer.latest(root) == str(root / "step-2")
