"""Keepers that copy from one another: the loss of a node loses nothing. Two processes stand in for two nodes."""

from __future__ import annotations

import signal
import socket
import time
from datetime import timedelta

import pytest
import torch

from keepers import KeeperAtWork, eventually, loaded, offered
from secured import make_certificate
from tensorferry import HTTPTransport
from tensorferry.checkpointing.keeper import client, partners
from tensorferry.checkpointing.keeper.client import Keeper
from tensorferry.checkpointing.keeper.command import main
from tensorferry.errors import InvalidArgument

pytestmark = pytest.mark.process


SECRET = "a secret of more than sixteen bytes"
LONG = timedelta(seconds=30)
MIB = 1 << 20


def state_of(seed: int, nbytes: int = MIB) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(nbytes // 4, generator=generator), "names": {"a", str(seed)}}


def assert_same(found: dict, expected: dict) -> None:
    assert torch.equal(found["w"], expected["w"])
    assert found["names"] == expected["names"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def copied(keeper: Keeper, count: int):
    return eventually(
        "the buddy's snapshots are here",
        lambda: (
            found if len(found := [s for s in keeper.held() if s.origin != "local" and not s.remote]) == count else None
        ),
    )


def test_the_loss_of_a_node_loses_nothing(folder, monkeypatch):
    """With a secret a host and a port are enough, so that a replacement is found where the lost node was."""
    monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
    ports = [str(free_port()) for _ in range(2)]
    options = [["--port", ports[i], "--buddy", f"127.0.0.1:{ports[1 - i]}"] for i in range(2)]
    with KeeperAtWork(folder, *options[0], name="one", secret=SECRET), Keeper("one") as one, Keeper("two") as two:
        with KeeperAtWork(folder, *options[1], name="two", secret=SECRET) as lost:
            for number in range(3):
                offered(two, state_of(number), f"/ckpt/run/step-{number}", rank=1, world_size=2, save_id=f"s{number}")
                offered(one, state_of(9 + number), f"/ckpt/run/step-{number}", world_size=2, save_id=f"s{number}")
            here = eventually("all is copied", lambda: [s for s in copied(one, 2) if s.save_id == "s2"])
            assert [(s.rank, s.complete, s.origin) for s in here] == [(1, True, f"127.0.0.1:{ports[1]}")]
            lost.kill()
        # The copy is served and loaded like what is the keeper's own.
        assert_same(loaded(one, here[0]), state_of(2))
        transport = HTTPTransport(LONG, secret=SECRET)
        assert_same(transport.recv_checkpoint(0, here[0].metadata, here[0].step, LONG), state_of(2))
        transport.shutdown()
        # The replacement's trainer finds its state at the buddy.
        with KeeperAtWork(folder, *options[1], name="two", secret=SECRET):
            found = two.held(rank=1, ask_buddies=True)
            assert [(s.save_id, s.remote, s.complete) for s in found] == [("s1", True, True), ("s2", True, True)]
            assert_same(loaded(two, found[1]), state_of(2))
            # And what the other node's own trainer gave is copied to it.
            assert_same(loaded(two, eventually("it is copied", lambda: copied(two, 2))[-1]), state_of(11))


@pytest.mark.parametrize("options", [[], ["--tls"]])
def test_without_a_secret_trainers_tell_their_keepers_of_one_another(folder, options):
    with (
        KeeperAtWork(folder, *options, name="one"),
        KeeperAtWork(folder, *options, name="two"),
        Keeper("one") as one,
        Keeper("two") as two,
    ):
        one.set_buddies([two.address(), one.address()])
        offered(two, state_of(4))
        assert_same(loaded(one, copied(one, 1)[0]), state_of(4))
        # Nobody told the other one.
        assert [s.origin for s in two.held()] == ["local"]
        assert [b["host"] for b in one.status()["buddies"]] == [two.address().split("/")[2].split("@")[-1]]
        with pytest.raises(InvalidArgument, match="is not the address of a keeper"):
            one.set_buddies(["ftp://x"])
        one.set_buddies([])
        assert one.status()["buddies"] == []


def test_two_keepers_with_tls_are_buddies_by_the_options_of_their_units_alone(folder, monkeypatch, capsys):
    """A certificate on disk has a fingerprint before the keeper starts, and the same one after each start."""
    monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
    ports = [str(free_port()) for _ in range(2)]
    files = [make_certificate(folder.parent, f"node{i}") for i in range(2)]
    pins = []
    for certificate, _ in files:
        assert main(["--fingerprint", str(certificate)]) == 0
        pins.append(capsys.readouterr().out.strip())
    assert pins[0] != pins[1]
    options = [
        f"--port={ports[i]} --certificate={files[i][0]} --key={files[i][1]} "
        f"--buddy=https://{pins[1 - i]}@127.0.0.1:{ports[1 - i]}".split()
        for i in range(2)
    ]
    with KeeperAtWork(folder, *options[0], name="one", secret=SECRET), Keeper("one") as one, Keeper("two") as two:
        with KeeperAtWork(folder, *options[1], name="two", secret=SECRET) as lost:
            assert two.address() == f"https://{pins[1]}@127.0.0.1:{ports[1]}/keeper/checkpoint/"
            offered(one, state_of(1), "/ckpt/run/step-1")
            offered(two, state_of(2), "/ckpt/other/step-1")
            assert_same(loaded(one, copied(one, 1)[0]), state_of(2))
            assert_same(loaded(two, copied(two, 1)[0]), state_of(1))
            lost.kill()
        # The same unit, started again: nobody has told either of the other's new address.
        with KeeperAtWork(folder, *options[1], name="two", secret=SECRET):
            assert_same(loaded(two, copied(two, 1)[0]), state_of(1))
    # Who answers there with another certificate is no buddy.
    wrong = ["--buddy", f"https://{pins[0]}@127.0.0.1:{ports[1]}"]
    with (
        KeeperAtWork(folder, *options[1], name="two", secret=SECRET),
        KeeperAtWork(folder, *wrong, name="one", secret=SECRET),
        Keeper("one") as one,
    ):
        error = eventually("the trouble is told", lambda: one.status()["buddies"][0]["error"])
        assert "its certificate has the fingerprint" in error


def test_a_buddy_that_is_away_holds_nobody_up_and_is_found_again(folder, monkeypatch):
    monkeypatch.setenv("TENSORFERRY_SECRET", SECRET)
    port = str(free_port())
    with (
        KeeperAtWork(folder, "--buddy", f"127.0.0.1:{port}", name="one", secret=SECRET) as process,
        Keeper("one") as one,
        Keeper("two") as two,
    ):
        eventually("the trouble is told", lambda: one.status()["buddies"][0]["error"])
        offered(one, state_of(1))
        assert [s.origin for s in one.held(ask_buddies=True)] == ["local"]
        with KeeperAtWork(folder, "--port", port, name="two", secret=SECRET) as buddy:
            offered(two, state_of(2), "/ckpt/other/1")
            assert_same(loaded(one, copied(one, 1)[0]), state_of(2))
            assert one.status()["buddies"][0]["error"] == ""
            # One that does not answer does not hold up the end.
            buddy.process.send_signal(signal.SIGSTOP)
            time.sleep(1.5)
            began = time.monotonic()
            offered(one, state_of(3))
            assert time.monotonic() - began < 5
            assert process.end() == 0
            buddy.process.send_signal(signal.SIGCONT)


@pytest.mark.nightly
def test_a_buddy_that_does_not_answer_is_waited_for_a_short_time(folder, monkeypatch, caplog):
    """It is stopped after its list is known: what it held is given up after seconds, not at the deadline of a load."""
    monkeypatch.setattr(client, "_REACH_S", 1.0)
    with (
        KeeperAtWork(folder, "--memory", "1M", name="one"),
        KeeperAtWork(folder, name="two") as buddy,
        Keeper("one") as one,
        Keeper("two") as two,
    ):
        one.set_buddies([two.address()])
        offered(two, state_of(5, 4 * MIB))
        assert [s.remote for s in eventually("it is listed", one.held)] == [True]
        buddy.process.send_signal(signal.SIGSTOP)
        assert one.prefer("/ckpt/run/step-1", 0, 1) is None
        assert "timed out" in caplog.text
        # Nobody waits for it as long as the keeper itself tries to reach it.
        for _ in range(2):
            began = time.monotonic()
            one.held(ask_buddies=True)
            assert time.monotonic() - began < partners._LIST_S / 2


def test_a_copy_never_takes_the_place_of_what_is_the_nodes_own(folder):
    with (
        KeeperAtWork(folder, "--memory", "4M", name="one") as process,
        KeeperAtWork(folder, name="two"),
        Keeper("one") as one,
        Keeper("two") as two,
    ):
        own = offered(one, state_of(1, 3 * MIB))
        one.set_buddies([two.address()])
        offered(two, state_of(2, 2 * MIB), "/ckpt/other/1")
        eventually("the copy is refused", lambda: "does not fit" in process.said())
        assert own.times == 0
        assert [s.origin for s in one.held() if not s.remote] == ["local"]
        # A small one fits, and goes for one of the node's own.
        offered(two, state_of(3, MIB // 2), "/ckpt/small/1")
        eventually("it is copied", lambda: len([s for s in one.held() if not s.remote]) == 2)
        offered(one, state_of(4, 3 * MIB))
        assert {(s.origin == "local", s.save_id) for s in one.held() if not s.remote} >= {
            (True, one.held(job="/ckpt/run")[-1].save_id)
        }
        assert one.status()["used"] <= 4 * MIB


def test_a_wrong_secret_and_a_plain_buddy_are_errors_that_say_so(folder):
    port = str(free_port())
    with (
        KeeperAtWork(folder, "--port", port, name="two", secret=SECRET),
        KeeperAtWork(folder, "--buddy", f"127.0.0.1:{port}", name="one", secret="another secret of sixteen bytes"),
        Keeper("one") as one,
    ):
        said = eventually("the trouble is told", lambda: one.status()["buddies"][0]["error"])
        assert said == "not found: the keeper there has another shared secret than this one, or none"
        assert one.held() == []


def test_a_buddy_that_is_killed_in_the_middle_leaves_nothing_half(folder, pytestconfig):
    with KeeperAtWork(folder, "--memory", "1G", name="one") as process, Keeper("one") as one:
        for number in range(pytestconfig.getoption("--keeper-kills")):
            with KeeperAtWork(folder, "--max-bandwidth", "20M", name="two") as buddy, Keeper("two") as two:
                one.set_buddies([two.address()])
                offered(two, state_of(number, 8 * MIB), f"/ckpt/run{number}/1")
                if number % 2:
                    eventually("it is being fetched", lambda: two.status()["served"] > 0)
                time.sleep(0.05 * (number % 7))
                buddy.kill()
            eventually("it is given up", lambda: one.status()["buddies"][0]["error"])
            for snapshot in one.held():
                seed = int(snapshot.job.removeprefix("/ckpt/run"))
                assert_same(loaded(one, snapshot), state_of(seed, 8 * MIB))
            status = one.status()
            # Nothing is reserved for what does not come.
            assert status["used"] == sum(s.nbytes for s in one.held())
        eventually("no descriptor stays", lambda: process.descriptors() < 60)
