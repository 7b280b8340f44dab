"""``AsyncCheckpointer``: how it ends, and what is left: closed, dropped, forked, exited."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from saves import WAIT_S, state_of, writer_of

from checkpoint_files import children, is_running, is_whole
from keepers import eventually
from tensorferry.checkpointing import AsyncCheckpointer
from tensorferry.errors import TransportClosed

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


def test_a_checkpointer_that_is_dropped_lets_its_writer_finish_and_end(tmp_path) -> None:
    checkpointer = AsyncCheckpointer()
    _, written = checkpointer.save(tmp_path / "a", state_of(1, 16))
    pid = writer_of(checkpointer)
    del checkpointer
    written.result(WAIT_S)
    eventually("it ends", lambda: not is_running(pid))
    assert is_whole(tmp_path / "a", 1)


def test_a_daemon_thread_cannot_begin_a_save_that_an_exiting_interpreter_would_not_finish(tmp_path) -> None:
    """What has begun is finished before the interpreter ends; what would begin is refused, on any checkpointer."""
    script = """
import atexit, sys, threading
refused, saves, told, begun = [], [], threading.Event(), threading.Event()

def at_the_very_end():
    # It was registered first, so it is called last.
    assert told.wait(60), "no save was refused"
    assert ["interpreter is exiting" in text for text in refused] == [True], refused
    for future in saves:
        assert future.done() and future.exception() is None, future
    print(len(saves), flush=True)

atexit.register(at_the_very_end)
import torch
from tensorferry.checkpointing import AsyncCheckpointer
from tensorferry.errors import TransportClosed
state = {"w": torch.full((1 << 20,), 1.0)}

def save():
    one = AsyncCheckpointer(keep_last=2)
    while not refused:
        try:
            if len(saves) == 2:
                begun.set()
            saves.append(one.save(f"{sys.argv[1]}/step-{len(saves)}", state, step=len(saves))[1])
        except TransportClosed as e:
            refused.append(str(e))
    told.set()

threading.Thread(target=save, daemon=True).start()
assert begun.wait(60)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 2
    assert sum(is_whole(tmp_path / f"step-{n}", 1) for n in range(int(done.stdout))) == 2


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
    eventually("the writer ends before the child", lambda: not is_running(pid))
    trainer.stdin.close()
    trainer.stdout.close()
    assert is_whole(tmp_path / "b", 2)


def test_the_writer_knows_no_torch_and_is_in_a_process_group_of_its_own_at_lower_priority(opened) -> None:
    pid = writer_of(opened())
    eventually("it is up", lambda: "_native" in Path(f"/proc/{pid}/maps").read_text())
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert os.getpgid(pid) == pid
    # Where sessions have a share each, its priority counts among the trainer's threads only in the trainer's session.
    assert os.getsid(pid) == os.getsid(0)
    eventually("it is nice", lambda: os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0))
    assert pid in children(os.getpid())
