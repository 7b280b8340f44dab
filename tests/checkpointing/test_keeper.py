"""The keeper of a node: what it holds outlives the trainer, within its limits, and is given back bit by bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from equality import assert_same_state
from keepers import PATIENCE, KeeperAtWork, Told, eventually, loaded, offered, staged, state_of
from tensorferry import HTTPTransport
from tensorferry._native import _copy_memory
from tensorferry.checkpointing import peer_metadata
from tensorferry.checkpointing.keeper import client, place
from tensorferry.checkpointing.keeper.client import Keeper
from tensorferry.checkpointing.keeper.command import main
from tensorferry.errors import ConnectError, CorruptCheckpoint, InvalidArgument

pytestmark = pytest.mark.process

LONG = timedelta(seconds=30)
MIB = 1 << 20


TRAINER = """
import sys
from keepers import offered, state_of
from tensorferry.checkpointing.keeper.client import Keeper
keeper = Keeper()
for number in range(int(sys.argv[1]), 1 << 30):
    offered(keeper, state_of(number), f"/ckpt/run/step-{number}", save_id=f"s{number}", step=number)
    print(number, flush=True)
"""


def trainer(code: str, *arguments: object) -> subprocess.Popen:
    paths = [os.environ.get("PYTHONPATH", ""), Path(__file__).parents[1] / "support"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)


def test_a_killed_trainer_leaves_what_it_announced_and_nothing_that_is_wrong(folder, pytestconfig):
    chance = random.Random(7)
    with KeeperAtWork(folder, "--memory", "64M") as process, Keeper() as keeper:
        first = 1
        for _ in range(pytestconfig.getoption("--keeper-kills")):
            with trainer(TRAINER, first) as running:
                running.stdout.readline()
                time.sleep(chance.random() * 0.4)
                running.kill()
                last = [first, *map(int, running.stdout.read().split())][-1]
            held = keeper.held()
            steps = [one.step for one in held]
            # What was announced is there; the one after it may be.
            assert last in steps
            assert steps == sorted(steps)
            assert steps[-1] <= last + 1
            for one in held:
                assert_same_state(loaded(keeper, one), state_of(one.step))
            first = steps[-1] + 1
        assert keeper.status()["clients"] == 1
        eventually("no descriptor is left behind", lambda: process.descriptors() < 40)
        # It is a source for every transport.
        with HTTPTransport(LONG) as transport:
            assert_same_state(transport.recv_checkpoint(0, held[-1].metadata, steps[-1], LONG), state_of(steps[-1]))


def test_a_trainer_that_forks_and_executes_another_program_leaves_its_snapshot(folder):
    """Nobody can write to it: a trainer that restarts itself in this way finds it. The child does not stand for it."""
    code = """
import os, signal, sys
from keepers import offered
from tensorferry.checkpointing.keeper.client import Keeper
keeper = Keeper()
offered(keeper, {"w": 5})
if os.fork() == 0:
    Keeper().held()
    print(os.getpid(), flush=True)
    signal.pause()
sys.stdin.readline()
os.execv("/bin/sleep", ["sleep", "600"])
"""
    with KeeperAtWork(folder), Keeper() as keeper, trainer(code) as running:
        child = int(running.stdout.readline())
        try:
            assert keeper.status()["clients"] == 2
            running.stdin.close()
            eventually("the trainer is not connected", lambda: keeper.status()["clients"] == 1)
            assert running.poll() is None
        finally:
            running.kill()
            os.kill(child, signal.SIGKILL)
        assert loaded(keeper, keeper.held()[0]) == {"w": 5}


def test_the_oldest_generation_goes_and_its_buffer_comes_back_once(folder):
    with KeeperAtWork(folder, "--generations", "3"), Keeper() as keeper:
        told = [offered(keeper, state_of(number), step=number) for number in range(5)]
        eventually("two are released", lambda: [one.times for one in told] == [1, 1, 0, 0, 0])
        assert [one.step for one in keeper.held()] == [2, 3, 4]
        for one in keeper.held():
            assert_same_state(loaded(keeper, one), state_of(one.step))
        # What the keeper still holds is not given back with the connection.
        keeper.close()
        eventually("it is not connected", lambda: keeper.status()["clients"] == 1)
        assert [one.times for one in told] == [1, 1, 0, 0, 0]
        assert_same_state(loaded(keeper, keeper.held()[0]), state_of(2))
        late = Told()
        keeper.offer(staged(state_of(9)), late)
        assert late.times == 1


def test_ranks_and_jobs_have_generations_of_their_own_and_a_save_is_complete_with_all_ranks(folder):
    with KeeperAtWork(folder, "--generations", "1"), Keeper() as keeper, Keeper(job="other") as other:
        offered(keeper, state_of(0), save_id="a", rank=0, world_size=2)
        assert [one.complete for one in keeper.held()] == [False]
        offered(keeper, state_of(1), save_id="a", rank=1, world_size=2)
        offered(other, state_of(2), save_id="c", rank=0, world_size=2)
        whole = [("/ckpt/run", 0, True), ("/ckpt/run", 1, True), ("other", 0, False)]
        assert [(one.job, one.rank, one.complete) for one in keeper.held()] == whole
        assert [one.rank for one in keeper.held(rank=1)] == [1]
        assert keeper.held(path="/ckpt/run/step-9") == []


def test_what_does_not_fit_is_refused_and_harms_nobody(folder, caplog):
    with KeeperAtWork(folder, "--memory", "4M") as process, Keeper() as keeper:
        first = offered(keeper, state_of(0, 3 * MIB))
        assert offered(keeper, state_of(1, 5 * MIB)).times == 1
        assert "--memory" in caplog.text
        # The entries of one fit, and what is made of them does not.
        assert offered(keeper, {f"{n}": torch.zeros(1) for n in range(8000)}, rank=1, world_size=2).times == 1
        assert_same_state(loaded(keeper, keeper.held()[0]), state_of(0, 3 * MIB))
        assert keeper.status()["used"] <= keeper.status()["memory"] == 4 * MIB
        assert process.said().count("is refused") == 2
        assert first.times == 0


def test_who_reads_has_the_memory_to_the_end(folder):
    with KeeperAtWork(folder, "--generations", "1"), Keeper() as keeper:
        first = offered(keeper, state_of(0))
        source = keeper.open(keeper.held()[0])
        assert source.is_verified
        assert keeper.let_go(0.0) is False
        offered(keeper, state_of(1, 8 * MIB), step=1)
        assert keeper.status()["leaving"] == 1
        assert first.times == 0
        del source
        eventually("it is released", lambda: first.times == 1)
        # A receiver over the network is cut when the trainer needs the memory.
        (one,) = keeper.held()
        with urllib.request.urlopen(f"{one.metadata}1.safetensors", timeout=60):
            assert keeper.let_go(PATIENCE)
        assert keeper.held() == []
        assert keeper.status()["used"] == 0


def test_what_a_process_that_is_thrown_out_gave_is_not_kept(folder):
    """It takes its memory back: so nobody may be given it any more."""
    with KeeperAtWork(folder), Keeper() as keeper, Keeper() as other:
        offered(other, state_of(1), "/ckpt/other/1")
        cast_out = offered(keeper, state_of(2))
        keeper._offers._sock.send(b"nonsense")
        eventually("it is told", lambda: cast_out.times == 1)
        assert [one.path for one in other.held()] == ["/ckpt/other/1"]


def test_a_trainer_that_writes_where_it_must_not_is_found_out(folder):
    with KeeperAtWork(folder), Keeper() as keeper:
        given = staged(state_of(0))
        keeper.offer(given, Told())
        one = eventually("it is kept", keeper.held)[0]
        assert_same_state(loaded(keeper, one), state_of(0))
        wrong = torch.ones(1)
        _copy_memory([(wrong.data_ptr(), given.buffers[0].address + 4096, 4)], 1)
        with pytest.raises(CorruptCheckpoint, match="does not match its checksum"):
            loaded(keeper, one)


def test_training_goes_on_without_a_keeper_and_with_the_next_one(folder, caplog, pytestconfig):
    keeper, told = Keeper(), Told()
    for _ in range(2):
        keeper.offer(staged(state_of(0)), told)
    assert told.times == 2
    assert caplog.text.count("no keeper called 'default' runs on this node") == 1
    with pytest.raises(ConnectError, match="tensorferry keeper"):
        keeper.held()
    for number in range(pytestconfig.getoption("--keeper-kills")):
        with KeeperAtWork(folder) as process:
            kept = offered(keeper, state_of(number))
            assert_same_state(loaded(keeper, keeper.held()[0]), state_of(number))
            all_told = [kept]
            killer = threading.Timer(0.05 * (number % 5), process.kill)
            killer.start()
            while process.process.poll() is None:
                all_told.append(Told())
                keeper.offer(staged(state_of(number)), all_told[-1])
            killer.join()
            eventually("all comes back, once", lambda told=all_told: {one.times for one in told} == {1})
    keeper.close()


def test_a_stopped_keeper_does_not_hold_the_trainer_up(folder, monkeypatch):
    monkeypatch.setattr(place, "OFFER_S", 0.3)
    monkeypatch.setattr(client, "AT_WORK_S", 0.3)
    with KeeperAtWork(folder) as process, Keeper() as keeper:
        offered(keeper, state_of(0))
        process.process.send_signal(signal.SIGSTOP)
        try:
            told = [Told() for _ in range(5)]
            for one in told:
                keeper.offer(staged(state_of(1)), one)
            # What it has not answered takes memory, so it is not offered more.
            assert [one.times for one in told] == [0, 0, 1, 1, 1]
            assert keeper.let_go() is False
            with pytest.raises(ConnectError, match="does not answer"):
                keeper.held()
            assert keeper.prefer("/ckpt/run/step-1", 0, 1) is None
            assert keeper.below(Path("/ckpt/run"), 0, 1) == []
        finally:
            process.process.send_signal(signal.SIGCONT)
        monkeypatch.undo()
        os.environ["TENSORFERRY_KEEPER_DIR"] = str(folder)
        eventually("they are taken after all", lambda: len(keeper.held()) == 2)
        assert [one.times for one in told] == [0, 0, 1, 1, 1]
        offered(keeper, state_of(2))
        eventually("the first is evicted", lambda: told[0].times == 1)


def test_an_offer_that_was_sent_is_the_keepers_whatever_a_signal_handler_raises(folder, monkeypatch):
    def handle(*_):
        raise TimeoutError("the handler")

    def interrupted(*args):
        send(*args)
        monkeypatch.setattr(client.handover, "send", send)
        signal.raise_signal(signal.SIGUSR1)

    send, before, told = client.handover.send, signal.signal(signal.SIGUSR1, handle), Told()
    try:
        with KeeperAtWork(folder), Keeper() as keeper:
            monkeypatch.setattr(client.handover, "send", interrupted)
            keeper.offer(staged({"w": torch.ones(4)}), told)
            eventually("the keeper has it", lambda: len(keeper.held()) == 1)
            assert told.times == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_and_nothing_is_left(folder, by):
    with KeeperAtWork(folder) as process, Keeper() as keeper:
        told = offered(keeper, state_of(0))
        source = keeper.open(keeper.held()[0])
        assert process.end(by) == 0
        # A log that ends without this line is that of a keeper that was killed.
        assert process.said().splitlines()[-1].endswith(f"the keeper default ends: {signal.Signals(by).name}")
        eventually("the trainer is told", lambda: told.times == 1)
        # Who has begun to read has the memory.
        assert source.fetch()
    assert os.listdir(folder) == ["keeper-default.lock"]


def test_the_command_prints_what_is_held(folder, capsys):
    assert main(["--status"]) == 1
    assert "no keeper called 'default' runs on this node" in capsys.readouterr().err
    with KeeperAtWork(folder, "--memory", "64M") as process, Keeper(job="A") as keeper, Keeper(job="B") as other:
        for one in (keeper, other):
            offered(one, state_of(1), step=7)
        assert main([]) == 1
        assert f"a keeper called 'default' runs already, process {process.process.pid}" in capsys.readouterr().err
        assert main(["--status"]) == 0
        text = capsys.readouterr().out
        assert "of 64.0 MiB in 2 snapshots, 2 clients" in text
        assert text.count("step 7  rank 0 of 1") == 2
        assert all(peer_metadata(keeper.held(), job=job) in text for job in "AB")
        assert main(["--status", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert [one["metadata"] for one in shown["held"]] == [one.metadata for one in keeper.held()]
        assert shown["used"] == sum(one["nbytes"] for one in shown["held"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--name", "a/b"], "name must be"),
        (["--generations", "0"], "--generations must be 1 or more"),
        (["--buddy", "node2:7070"], "buddies need a shared secret"),
        (["--interface", "no-such-interface"], "no-such-interface"),
    ],
)
def test_wrong_options_are_named(folder, capsys, options, said):
    with pytest.raises(SystemExit) as end:
        main(options)
    assert end.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(folder.glob("*.sock"))


def test_arguments_of_a_keeper_are_checked():
    for wrong in ({"name": "../x"}, {"job": ""}, {"job": "a\nb"}, {"secret": "short"}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            Keeper(**wrong)
