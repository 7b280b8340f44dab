"""The keeper: what it holds outlives the trainer, within its limits, and is given back bit by bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tensorferry
from keepers import PATIENCE, KeeperAtWork, Told, eventually, loaded, offered, staged
from tensorferry import HTTPTransport
from tensorferry._native import _copy_memory
from tensorferry.checkpointing.keeper import connecting, questions
from tensorferry.checkpointing.keeper.client import Keeper
from tensorferry.errors import ConnectError, CorruptCheckpoint, InvalidArgument

pytestmark = pytest.mark.process


LONG = timedelta(seconds=30)
MIB = 1 << 20


def state_of(seed: int, nbytes: int = MIB) -> dict:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(nbytes // 4, generator=generator)
    return {"model": {"w": weight, "tied": weight, "t": weight[:64].view(8, 8).t()}, "seen": {1, 2}, "step": seed}


def assert_same(found: dict, expected: dict) -> None:
    assert torch.equal(found["model"]["w"], expected["model"]["w"])
    assert torch.equal(found["model"]["t"], expected["model"]["t"])
    assert found["model"]["tied"] is found["model"]["w"]
    assert (found["seen"], found["step"]) == (expected["seen"], expected["step"])


def received(metadata: str, step: int, **options) -> dict:
    transport = HTTPTransport(LONG, **options)
    try:
        return transport.recv_checkpoint(0, metadata, step, LONG)
    finally:
        transport.shutdown()


TRAINER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {support!r})
import torch
from keepers import offered
from test_keeper import state_of
from tensorferry.checkpointing.keeper.client import Keeper
keeper = Keeper()
number = {first}
while True:
    offered(keeper, state_of(number, {nbytes}), f"/ckpt/run/step-{{number}}", save_id=f"s{{number}}", step=number)
    print(number, flush=True)
    number += 1
    if number == {last}:
        time.sleep(600)
"""


def trainer(first: int, last: int, nbytes: int = MIB) -> subprocess.Popen:
    here = Path(__file__).parent
    code = textwrap.dedent(TRAINER).format(support=str(here.parent / "support"), first=first, last=last, nbytes=nbytes)
    environment = {**os.environ, "PYTHONPATH": str(here)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True)


def test_what_was_kept_outlives_its_trainer_and_is_served_to_an_unmodified_transport(folder):
    with KeeperAtWork(folder), Keeper() as keeper:
        process = trainer(5, 7)
        assert [process.stdout.readline().strip() for _ in range(2)] == ["5", "6"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        held = keeper.held()
        assert [(one.step, one.rank, one.path, one.job) for one in held] == [
            (5, 0, "/ckpt/run/step-5", "/ckpt/run"),
            (6, 0, "/ckpt/run/step-6", "/ckpt/run"),
        ]
        for one in held:
            assert_same(received(one.metadata, one.step), state_of(one.step))
            assert_same(received(one.metadata, one.step, same_host=False), state_of(one.step))
            assert_same(loaded(keeper, one), state_of(one.step))
        # In place, as a replacement trainer heals.
        live = {"model": {"w": torch.zeros(MIB // 4)}, "seen": set(), "step": 0}
        live["model"] |= {"tied": live["model"]["w"], "t": live["model"]["w"][:64].view(8, 8).t()}
        address = live["model"]["w"].data_ptr()
        found = received(held[1].metadata, 6, state_dict=lambda: live)
        assert found["model"]["w"].data_ptr() == address
        assert_same(found, state_of(6))


def test_the_oldest_generation_goes_and_its_buffer_comes_back_once(folder):
    with KeeperAtWork(folder, "--generations", "3"), Keeper() as keeper:
        told = [offered(keeper, state_of(number)) for number in range(5)]
        eventually("two are released", lambda: sum(one.times for one in told) == 2)
        assert [one.times for one in told] == [1, 1, 0, 0, 0]
        assert [one.step for one in keeper.held()] == [3, 4, 5]
        for one, number in zip(keeper.held(), (2, 3, 4), strict=True):
            assert_same(loaded(keeper, one), state_of(number))
        # What the keeper still holds is not given back with the connection.
        keeper.close()
        time.sleep(0.2)
        assert [one.times for one in told] == [1, 1, 0, 0, 0]
        assert_same(loaded(keeper, keeper.held()[0]), state_of(2))
        late = Told()
        keeper.offer(staged(state_of(9)), late)
        assert late.times == 1


def test_ranks_and_jobs_have_generations_of_their_own_and_a_save_is_complete_with_all_ranks(folder):
    with KeeperAtWork(folder, "--generations", "1"), Keeper() as keeper, Keeper(job="other") as other:
        offered(keeper, state_of(0), save_id="a", rank=0, world_size=2)
        assert [one.complete for one in keeper.held()] == [False]
        offered(keeper, state_of(1), save_id="a", rank=1, world_size=2)
        offered(other, state_of(2), save_id="a", rank=0, world_size=2)
        whole = [("/ckpt/run", 0, True), ("/ckpt/run", 1, True), ("other", 0, False)]
        # The other job has a connection of its own.
        eventually("all are kept", lambda: [(one.job, one.rank, one.complete) for one in keeper.held()] == whole)
        offered(keeper, state_of(3), save_id="b", rank=1, world_size=2)
        held = keeper.held(job="/ckpt/run")
        assert [(one.save_id, one.rank, one.complete) for one in held] == [("a", 0, False), ("b", 1, False)]
        assert [one.rank for one in keeper.held(rank=1)] == [1]
        assert keeper.held(path="/ckpt/run/step-9") == []


def test_what_does_not_fit_is_refused_and_harms_nobody(folder, caplog):
    with KeeperAtWork(folder, "--memory", "4M"), Keeper() as keeper:
        first = offered(keeper, state_of(0, 3 * MIB))
        too_large = offered(keeper, state_of(1, 5 * MIB))
        assert (first.times, too_large.times) == (0, 1)
        assert "--memory" in caplog.text
        # One that fits takes the place of the one before.
        second = offered(keeper, state_of(2, 3 * MIB))
        eventually("the first is released", lambda: first.times == 1)
        assert second.times == 0
        assert_same(loaded(keeper, keeper.held()[0]), state_of(2, 3 * MIB))
        status = keeper.status()
        assert status["used"] <= status["memory"] == 4 * MIB
        # Another rank's trainer is alive: its only snapshot does not go.
        assert offered(keeper, state_of(3, 3 * MIB), rank=1, world_size=2).times == 1
        assert [one.rank for one in keeper.held()] == [0]
        assert second.times == 0


def test_a_snapshot_that_is_lent_is_not_given_back_before_it_is_read(folder):
    with KeeperAtWork(folder, "--generations", "1"), Keeper() as keeper:
        first = offered(keeper, state_of(0))
        source = keeper.open(keeper.held()[0])
        assert source.is_verified
        offered(keeper, state_of(1))
        time.sleep(0.3)
        assert first.times == 0
        assert keeper.status()["leaving"] == 1
        del source
        eventually("it is released", lambda: first.times == 1)
        assert keeper.status()["leaving"] == 0


def test_what_a_trainer_may_write_to_is_not_kept(folder):
    """A trainer that lost its connection without dying takes its memory back: so nobody may be given it any more."""
    with KeeperAtWork(folder) as process, Keeper() as keeper, Keeper() as other:
        # As in a checkpointer's pool, the memory stays mapped.
        given, lost = staged(state_of(0)), Told()
        keeper.offer(given, lost)
        eventually("it is kept", keeper.held)
        offered(other, state_of(1), "/ckpt/other/1")
        keeper._offers._sock.shutdown(socket.SHUT_RDWR)
        eventually("it is told that its memory is free", lambda: lost.times == 1)
        eventually("it is not kept", lambda: [one.path for one in keeper.held()] == ["/ckpt/other/1"])
        assert "lives: what it gave is not kept" in process.said()
        del given
        # Likewise one that is thrown out.
        cast_out = offered(other, state_of(2), "/ckpt/other/2")
        other._offers._sock.send(b"nonsense")
        eventually("it is told", lambda: cast_out.times == 1)
        assert keeper.held() == []


def test_a_trainer_that_writes_where_it_must_not_is_found_out(folder):
    with KeeperAtWork(folder), Keeper() as keeper:
        given = staged(state_of(0))
        keeper.offer(given, Told())
        one = eventually("it is kept", keeper.held)[0]
        assert_same(loaded(keeper, one), state_of(0))
        wrong = torch.ones(1)
        _copy_memory([(wrong.data_ptr(), given.buffers[0].address + 4096, 4)], 1)
        with pytest.raises(CorruptCheckpoint, match="does not match its checksum"):
            loaded(keeper, one)


def test_training_goes_on_without_a_keeper_and_with_the_next_one(folder, caplog):
    keeper = Keeper()
    told = Told()
    keeper.offer(staged(state_of(0)), told)
    keeper.offer(staged(state_of(0)), told)
    assert told.times == 2
    assert caplog.text.count("no keeper called 'default' runs on this node") == 1
    with pytest.raises(ConnectError, match="tensorferry keeper"):
        keeper.held()
    with KeeperAtWork(folder) as first:
        kept = offered(keeper, state_of(1))
        first.kill()
        eventually("what it held is released", lambda: kept.times == 1)
        # The socket is still there.
        keeper.offer(staged(state_of(2)), told)
        assert told.times == 3
    with KeeperAtWork(folder):
        assert offered(keeper, state_of(3)).times == 0
        assert_same(loaded(keeper, keeper.held()[0]), state_of(3))
    keeper.close()


def test_a_stopped_keeper_does_not_hold_the_trainer_up(folder, monkeypatch):
    monkeypatch.setattr(connecting, "OFFER_S", 0.3)
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
        finally:
            process.process.send_signal(signal.SIGCONT)
        eventually("they are taken after all", lambda: len(keeper.held()) == 2)
        assert [one.times for one in told] == [0, 0, 1, 1, 1]
        offered(keeper, state_of(2))
        eventually("the first is evicted", lambda: told[0].times == 1)


def test_a_stopped_keeper_is_waited_for_once_and_found_when_it_goes_on_or_has_a_successor(folder, monkeypatch):
    monkeypatch.setattr(questions, "AT_WORK_S", 0.5)
    waits = []
    begin = questions.Question.begin
    monkeypatch.setattr(questions.Question, "begin", lambda question, s: waits.append(1) or begin(question, s))

    def is_at_work() -> bool:
        with contextlib.suppress(ConnectError):
            return bool(keeper.status())
        return False

    with KeeperAtWork(folder) as process, Keeper() as keeper:
        for _ in range(2):
            del waits[:]
            process.process.send_signal(signal.SIGSTOP)
            for call in (keeper.held, keeper.status, keeper.address, lambda: keeper.set_buddies([])):
                with pytest.raises(ConnectError, match="does not answer"):
                    call()
            assert keeper.prefer("/ckpt/run/step-1", 0, 1) is None
            assert keeper.below(Path("/ckpt/run"), 0, 1) == []
            assert len(waits) == 1
            process.process.send_signal(signal.SIGCONT)
            eventually("it answers again", is_at_work)
        process.process.send_signal(signal.SIGSTOP)
        with pytest.raises(ConnectError, match="does not answer"):
            keeper.held()
        process.kill()
        with KeeperAtWork(folder):
            assert keeper.held() == []


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
    assert os.listdir(folder) == []


def test_a_trainer_that_forks_and_executes_another_program_leaves_its_snapshot(folder):
    """Nobody can write to it: a trainer that restarts itself in this way finds it. The child does not stand for it."""
    script = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
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
    support = Path(__file__).parent.parent / "support"
    with KeeperAtWork(folder) as process, Keeper() as keeper:
        command = [sys.executable, "-c", script, support]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
            child = int(trainer.stdout.readline())
            try:
                assert keeper.status()["clients"] == 2
                trainer.stdin.close()
                eventually("the trainer is not connected", lambda: keeper.status()["clients"] == 1)
                # For so long, the keeper waits for the end of the process.
                time.sleep(2.5)
                assert trainer.poll() is None
            finally:
                trainer.kill()
                os.kill(child, signal.SIGKILL)
        assert loaded(keeper, keeper.held()[0]) == {"w": 5}
        assert "left without a word" not in process.said()


def test_a_name_is_unique_and_a_killed_keeper_leaves_it_free(folder):
    with KeeperAtWork(folder) as first:
        second = subprocess.run(
            [sys.executable, "-m", "tensorferry.checkpointing.keeper"], capture_output=True, text=True, timeout=PATIENCE
        )
        assert second.returncode == 1
        assert f"a keeper called 'default' runs already, process {first.process.pid}" in second.stderr
        assert first.is_up()
        with KeeperAtWork(folder, name="another"):
            assert sorted(p.name for p in folder.glob("*.sock")) == ["keeper-another.sock", "keeper-default.sock"]
        first.kill()
        assert (folder / "keeper-default.sock").exists()
        with KeeperAtWork(folder), Keeper() as keeper:
            assert keeper.held() == []


def test_it_ends_when_nobody_has_used_it_for_long_enough(folder):
    with KeeperAtWork(folder, "--idle", "1") as process:
        with Keeper() as keeper:
            offered(keeper, state_of(0))
            # A trainer that is connected uses it.
            time.sleep(2.5)
            assert process.process.poll() is None
        assert process.process.wait(PATIENCE) == 0
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--memory", "12 parrots"], "memory must be a number of bytes"),
        (["--memory", "200%"], "memory must be between"),
        (["--memory", "0"], "memory must be between"),
        (["--generations", "0"], "--generations must be 1 or more"),
        (["--idle", "-1"], "--idle must be 0 or more"),
        (["--idle", "nan"], "--idle must be 0 or more"),
        (["--port", "70000"], "port must be a number from 1 to 65535"),
        (["--name", "../x"], "name must be"),
        (["--interface", "nowhere7"], "no interface or address 'nowhere7'"),
        (["--max-bandwidth", "fast"], "--max-bandwidth must be"),
        (["--max-bandwidth", "0"], "max_bandwidth"),
        (["--buddy", "node2:7000"], "neither TENSORFERRY_SECRET nor TENSORFERRY_SECRET_FILE is set here"),
        (["--buddy", "http://node2:7000/checkpoint/"], "is not the address of a keeper"),
        (["--buddy", "http://node2:7000/aa/checkpoint/", "--tls"], "does not encrypt"),
        (["--buddy", "node2:7000", "--tls"], "neither TENSORFERRY_SECRET nor TENSORFERRY_SECRET_FILE is set here"),
        (["--buddy", "https://node2:7000"], "comes without the fingerprint of its certificate"),
        (["--certificate", "/nowhere.pem"], "--certificate and --key go together"),
        (["--certificate", "/nowhere.pem", "--key", "/nowhere.key"], "cannot be read"),
        (["--fingerprint", "/nowhere.pem"], "cannot be read"),
        (["--json"], "--json goes with --status"),
        (["--frobnicate"], "unrecognized arguments"),
    ],
)
def test_wrong_options_are_named(folder, options, words):
    from tensorferry.checkpointing.keeper.command import main

    class Stderr:
        text = ""

        def write(self, text):
            Stderr.text += text

        def flush(self):
            pass

    before, sys.stderr = sys.stderr, Stderr()
    try:
        with pytest.raises(SystemExit) as ended:
            main(options)
    finally:
        sys.stderr = before
    assert ended.value.code == 2
    assert words in Stderr.text
    assert not folder.exists() or os.listdir(folder) == []


@pytest.mark.parametrize("option", ["--version", "--help", "-h"])
def test_what_people_try_first(option, capsys):
    from tensorferry.checkpointing.keeper.command import main

    with pytest.raises(SystemExit) as ended:
        main([option])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told == f"{tensorferry.__version__}\n" if option == "--version" else "--certificate FILE" in told


def test_a_port_that_is_taken_and_a_folder_that_others_can_enter_are_refused(folder):
    def run(*options):
        return subprocess.run(
            [sys.executable, "-m", "tensorferry.checkpointing.keeper", *options],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    with KeeperAtWork(folder), Keeper() as keeper:
        port = keeper.address().split(":")[2].split("/")[0]
        second = run("--name", "b", "--interface", "127.0.0.1", "--port", port)
        assert second.returncode == 1
        assert "cannot listen" in second.stderr
        assert not (folder / "keeper-b.lock").exists()
    folder.chmod(0o755)
    third = run()
    assert third.returncode == 1
    assert "must be a folder of this user that nobody else can enter" in third.stderr


def test_the_command_prints_what_is_held(folder):
    command = [sys.executable, "-m", "tensorferry", "keeper"]

    def run(*options):
        return subprocess.run([*command, "--status", *options], capture_output=True, text=True, timeout=PATIENCE)

    none = run()
    assert none.returncode == 1
    assert none.stderr.startswith("tensorferry keeper: no keeper called 'default' runs on this node")
    with KeeperAtWork(folder) as process, Keeper() as keeper:
        offered(keeper, state_of(0), step=41)
        text = run().stdout
        assert "step 41  rank 0 of 1" in text
        assert keeper.held()[0].metadata in text
        told = json.loads(run("--json").stdout)
        assert told["pid"] == process.process.pid
        assert [one["step"] for one in told["held"]] == [41]
        reading, writing = os.pipe()
        os.close(reading)
        unread = subprocess.run([*command, "--status"], stdout=writing, stderr=subprocess.PIPE, timeout=PATIENCE)
        os.close(writing)
        assert (unread.returncode, unread.stderr) == (141, b"")


def test_the_keeper_and_its_client_need_no_torch():
    code = (
        "import sys; import tensorferry.checkpointing.keeper.command, tensorferry.checkpointing.keeper.client; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0


def test_a_trainer_can_start_the_keeper_it_needs(folder):
    with Keeper("mine", start=True) as keeper:
        pid = keeper.status()["pid"]
        try:
            with Keeper("mine", start=True) as same:
                assert same.status()["pid"] == pid
            offered(keeper, state_of(0))
            assert os.getpriority(os.PRIO_PROCESS, pid) >= os.getpriority(os.PRIO_PROCESS, 0)
            assert os.getsid(pid) == pid
            if (share := Path(f"/proc/{pid}/autogroup")).exists():
                assert share.read_text().split()[-1] == str(os.getpriority(os.PRIO_PROCESS, pid))
        finally:
            os.kill(pid, signal.SIGTERM)
        eventually("it is gone", lambda: not list(folder.iterdir()))


def test_arguments_of_a_keeper_are_checked():
    with pytest.raises(InvalidArgument, match="name must be"):
        Keeper("a/b")
    with pytest.raises(InvalidArgument, match="job must be"):
        Keeper(job="")
    with pytest.raises(InvalidArgument, match="start must be"):
        Keeper(start=1)


def test_a_killed_trainer_leaves_what_it_announced_and_nothing_that_is_wrong(folder, pytestconfig):
    chance = random.Random(7)
    with KeeperAtWork(folder, "--memory", "64M") as process, Keeper() as keeper:
        first = 1
        for _ in range(pytestconfig.getoption("--keeper-kills")):
            running = trainer(first, -1, MIB)
            running.stdout.readline()
            time.sleep(chance.random() * 0.4)
            running.kill()
            last = [first, *map(int, running.stdout.read().split())][-1]
            running.wait()
            running.stdout.close()
            held = keeper.held()
            steps = [one.step for one in held]
            # What was announced is there; the one after it may be.
            assert last in steps
            assert steps == sorted(steps)
            assert steps[-1] <= last + 1
            for one in held:
                assert_same(loaded(keeper, one), state_of(one.step))
            first = steps[-1] + 1
        assert keeper.status()["clients"] == 1
        eventually("no descriptor is left behind", lambda: process.descriptors() < 40)


def test_a_killed_keeper_never_harms_the_trainer(folder, pytestconfig):
    chance = random.Random(11)
    with Keeper() as keeper:
        told, number = [], 0
        for _ in range(pytestconfig.getoption("--keeper-kills")):
            with KeeperAtWork(folder) as process:
                end = time.monotonic() + chance.random() * 0.3
                while time.monotonic() < end:
                    told.append(Told())
                    keeper.offer(staged(state_of(number)), told[-1])
                    number += 1
                process.kill()
                told.append(Told())
                keeper.offer(staged(state_of(number)), told[-1])
                eventually("all buffers come back, once", lambda: [one.times for one in told] == [1] * len(told))
