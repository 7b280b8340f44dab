"""``AsyncCheckpointer``: how it ends, and what is left: closed, dropped, forked, exited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from saves import WAIT_S, state_of, stopped, writer_of

from checkpoint_files import children, files_in, is_running, is_whole, resources
from tensorferry.checkpointing import (
    AsyncCheckpointer,
    SyncCheckpointer,
)
from tensorferry.errors import (
    SystemRefused,
    TransportClosed,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def test_close_waits_for_every_save_and_ends_the_writer(opened, tmp_path) -> None:
    checkpointer = opened()
    for n in range(4):
        checkpointer.save(tmp_path / str(n), state_of(n, 16))
    pid = writer_of(checkpointer)
    checkpointer.close()
    assert [is_whole(tmp_path / str(n), n) for n in range(4)] == [True] * 4
    assert not is_running(pid)
    for _ in range(2):
        with pytest.raises(TransportClosed, match="was closed"):
            checkpointer.save(tmp_path / "x", state_of(1))
        checkpointer.close()


@pytest.mark.parametrize("keeper", [False, True], ids=["AsyncCheckpointer", "SyncCheckpointer"])
def test_a_close_that_was_interrupted_goes_on_when_it_is_called_again(keeper, tmp_path, monkeypatch) -> None:
    class Keeper:
        def offer(self, _, released) -> None:
            released()

        def close(self) -> None:
            pass

    def interrupted(_) -> bool:
        raise KeyboardInterrupt

    checkpointer = SyncCheckpointer(keeper=Keeper()) if keeper else AsyncCheckpointer()
    saver = checkpointer._saver
    (tmp_path / "file").write_text("")
    pid = saver.writer.pid
    with stopped(pid):
        _, written = saver.save(state_of(1), tmp_path / "file" / "a")
        with monkeypatch.context() as patched:
            patched.setattr(saver._turns, "wait_for_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.close()
    with pytest.raises(TransportClosed, match="was closed"):
        checkpointer.save(tmp_path / "b", state_of(2))
    with pytest.raises(SystemRefused, match="cannot be created"):
        checkpointer.close()
    assert written.done()
    assert not is_running(pid)
    checkpointer.close()


def test_a_checkpointer_that_is_dropped_lets_its_writer_finish_and_end(tmp_path) -> None:
    checkpointer = AsyncCheckpointer()
    _, written = checkpointer.save(tmp_path / "a", state_of(1, 16))
    pid = writer_of(checkpointer)
    del checkpointer
    written.result(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)
    assert is_whole(tmp_path / "a", 1)


def test_many_saves_in_a_row_grow_nothing(opened, tmp_path, pytestconfig) -> None:
    checkpointer = opened(keep_last=2)
    saves = pytestconfig.getoption("--saves")
    before = None
    for n in range(saves):
        checkpointer.save(tmp_path / f"step-{n}", state_of(n, 4), step=n)
        if n == saves // 2:
            checkpointer.save(tmp_path / f"step-{n}", state_of(n, 4))[1].result(WAIT_S)
            before = resources()
    checkpointer.save(tmp_path / f"step-{saves}", state_of(saves, 4))[1].result(WAIT_S)
    after = resources()
    assert before is not None
    assert after["descriptors"] <= before["descriptors"]
    assert after["mappings"] <= before["mappings"]
    assert after["resident"] <= before["resident"] + 8
    checkpointer.close()
    assert files_in(tmp_path) == sorted([f"step-{saves}", f"step-{saves - 1}"])


def run(script: str, *arguments: object, within: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=within,
        check=False,
    )


def test_an_interpreter_that_exits_without_close_loses_no_save_and_does_not_hang(tmp_path) -> None:
    script = """
import sys, torch
from tensorferry.checkpointing import AsyncCheckpointer
checkpointer = AsyncCheckpointer()
for n in range(3):
    checkpointer.save(f"{sys.argv[1]}/{n}", {"w": torch.full((4 << 20,), float(n))})
"""
    done = run(script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [is_whole(tmp_path / str(n), n) for n in range(3)] == [True] * 3


@pytest.mark.parametrize("waits", [False, True], ids=["between saves", "waiting for its turn"])
def test_a_daemon_thread_cannot_begin_a_save_that_an_exiting_interpreter_would_not_finish(tmp_path, waits) -> None:
    """What has begun is finished before the interpreter ends; what would begin is refused, on any checkpointer."""
    script = """
import atexit, os, signal, sys, threading
refused, saves, waits = [], [], sys.argv[2] == "True"
told = threading.Event()

def at_the_very_end():
    # It was registered first, so it is called last.
    assert told.wait(60), "no save was refused"
    assert ["interpreter is exiting" in text for text in refused] == [True, True], refused
    for future in saves:
        assert future.done() and future.exception() is None, future
    print(len(saves), flush=True)

atexit.register(at_the_very_end)
import torch
from tensorferry.checkpointing import AsyncCheckpointer
from tensorferry.errors import TransportClosed
checkpointer = AsyncCheckpointer(keep_last=2)
state = {"w": torch.full((1 << 20,), 1.0)}
begun = threading.Event()

def save():
    while True:
        try:
            if len(saves) == 2:
                begun.set()
            saves.append(checkpointer.save(f"{sys.argv[1]}/step-{len(saves)}", state)[1])
        except TransportClosed as e:
            refused.append(str(e))
            break
    try:
        AsyncCheckpointer().save(f"{sys.argv[1]}/late", state)
    except TransportClosed as e:
        refused.append(str(e))
    told.set()

if waits:
    os.kill(checkpointer._saver.writer.pid, signal.SIGSTOP)
    end = checkpointer._saver._turns.end
    def and_go_on():
        end()
        os.kill(checkpointer._saver.writer.pid, signal.SIGCONT)
    checkpointer._saver._turns.end = and_go_on
threading.Thread(target=save, daemon=True).start()
assert begun.wait(60)
"""
    done = run(script, tmp_path, str(waits))
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 2
    assert sum(is_whole(tmp_path / f"step-{n}", 1) for n in range(int(done.stdout))) == 2
    assert not (tmp_path / "late").exists()


def test_a_forked_child_cannot_save_and_does_not_keep_the_writer_alive(tmp_path) -> None:
    script = """
import os, sys, time, torch
from tensorferry.checkpointing import AsyncCheckpointer
from tensorferry.errors import ForkedProcess
checkpointer = AsyncCheckpointer()
checkpointer.save(f"{sys.argv[1]}/a", {"w": torch.ones(10)})[1].result(30)
ready, told = os.pipe()
pid = os.fork()
if pid == 0:
    for call in (lambda: checkpointer.save("/nowhere", {}), checkpointer.close):
        try:
            call()
        except ForkedProcess:
            os.write(told, b"x")
    checkpointer = None
    os.write(told, b"y")
    sys.stdin.read()
    os._exit(0)
assert os.read(ready, 1) == b"x" and os.read(ready, 1) == b"x" and os.read(ready, 1) == b"y"
checkpointer.save(f"{sys.argv[1]}/b", {"w": torch.full((10,), 2.)})[1].result(30)
print(checkpointer._saver.writer.pid, flush=True)
os._exit(0)
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdin
    assert trainer.stdout
    pid = int(trainer.stdout.readline())
    trainer.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    ended = not is_running(pid)
    trainer.stdin.close()
    trainer.stdout.close()
    assert ended, "the child was still there"
    assert is_whole(tmp_path / "b", 2)


def test_the_end_of_the_terminal_does_not_stop_an_accepted_save(tmp_path) -> None:
    script = """
import os, resource, signal, sys, torch
os.login_tty(int(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from tensorferry.checkpointing import AsyncCheckpointer
checkpointer = AsyncCheckpointer()
checkpointer.save(sys.argv[1], {"w": torch.full((8 << 20,), 3.0)})[0].result(30)
os.kill(checkpointer._saver.writer.pid, signal.SIGSTOP)
print("stopped", flush=True)
signal.pause()
"""
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", script, str(tmp_path / "a"), str(theirs)]
    with subprocess.Popen(command, pass_fds=[theirs]) as trainer:
        os.close(theirs)
        try:
            said = b""
            while b"stopped" not in said:
                said += os.read(ours, 1000)
            # Ctrl-\ sends SIGQUIT, which neither process ignores, and SIGHUP follows when the terminal is closed. The
            # writer does not stay stopped: the system continues process groups that are orphaned.
            os.write(ours, b"\x1c")
            assert trainer.wait(WAIT_S) == -signal.SIGQUIT
        finally:
            trainer.kill()
            os.close(ours)
    deadline = time.monotonic() + WAIT_S
    while not (tmp_path / "a" / "index.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_whole(tmp_path / "a", 3)


def test_the_writer_knows_no_torch_and_is_in_a_process_group_of_its_own_at_lower_priority(opened) -> None:
    pid = writer_of(opened())
    maps = ""
    deadline = time.monotonic() + WAIT_S
    while "_native" not in maps and time.monotonic() < deadline:
        maps = Path(f"/proc/{pid}/maps").read_text()
    assert "_native" in maps
    assert "torch" not in maps
    assert os.getpgid(pid) == pid
    # Where sessions have a share each, its priority counts among the trainer's threads only in the trainer's session.
    assert os.getsid(pid) == os.getsid(0)
    while os.getpriority(os.PRIO_PROCESS, pid) <= os.getpriority(os.PRIO_PROCESS, 0):
        assert time.monotonic() < deadline
    assert pid in children(os.getpid())
