"""``AsyncCheckpointer.save``: what a failure does, of the state, the disk, a callback or the process that writes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import os
import re
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from saves import WAIT_S, state_of, stopped, writer_of

from checkpoint_files import files_in, is_whole
from keepers import eventually
from nights import mostly_at_night
from tensorferry.checkpointing import (
    AsyncCheckpointer,
    handover,
    writer,
    writer_process,
)
from tensorferry.errors import (
    InvalidArgument,
    SystemRefused,
    TensorferryError,
    UnsupportedLeaf,
    WriterLost,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def test_what_cannot_be_saved_is_refused_and_the_next_state_is_saved(opened, tmp_path) -> None:
    checkpointer = opened()
    for _ in range(3):
        with pytest.raises(UnsupportedLeaf, match=r"model\.odd"):
            checkpointer.save(tmp_path / "a", {"model": {"odd": threading.Lock()}})
    checkpointer.save(tmp_path / "b", state_of(1))[1].result(WAIT_S)
    assert is_whole(tmp_path / "b", 1)


def test_a_failure_nobody_has_looked_at_is_logged_by_the_next_save_which_saves_and_raised_by_close(
    opened, tmp_path, caplog
) -> None:
    checkpointer = opened()
    (tmp_path / "file").write_text("")
    for name in "ab":
        _, written = checkpointer.save(tmp_path / "file" / name, state_of(1))
        concurrent.futures.wait([written], WAIT_S)
    for n in range(2):
        checkpointer.save(tmp_path / str(n), state_of(n))[1].result(WAIT_S)
        assert is_whole(tmp_path / str(n), n)
    said = [record.message for record in caplog.records]
    assert ["cannot be created" in one and "nobody has asked its future" in one for one in said] == [True, True]
    caplog.clear()
    concurrent.futures.wait([checkpointer.save(tmp_path / "file" / "c", state_of(1))[1]], WAIT_S)
    checkpointer._saver.finish_at_exit(time.monotonic() + WAIT_S)
    assert ["cannot be created" in record.message for record in caplog.records] == [True]
    with pytest.raises(SystemRefused, match="cannot be created") as raised:
        checkpointer.close()
    assert ["A further save has failed" in note for note in raised.value.__notes__] == [True] * 2
    checkpointer.close()


def test_a_call_in_the_middle_of_a_save_or_of_a_callback_is_refused_and_the_save_goes_on(opened, tmp_path) -> None:
    checkpointer = opened()
    told = []

    def call_both(*_) -> None:
        for call in (lambda: checkpointer.save(tmp_path / "b", state_of(2)), checkpointer.close):
            try:
                told.append(call())
            except InvalidArgument as e:
                told.append(str(e))

    class Interrupted:
        def __reduce__(self):
            signal.raise_signal(signal.SIGUSR1)
            return dict, ()

    before = signal.signal(signal.SIGUSR1, call_both)
    try:
        staged, written = checkpointer.save(tmp_path / "a", {**state_of(1), "odd": Interrupted()})
        assert len(told) >= 2
        assert all("signal handler" in one for one in told)
        del told[:]
        for future in (staged, written):
            future.result(WAIT_S)
        with stopped(writer_of(checkpointer)):
            staged, written = checkpointer.save(tmp_path / "a", state_of(3))
            # The stage's thread has handed it over; the other one hears that it is accepted, and written.
            staged.add_done_callback(call_both)
            written.add_done_callback(call_both)
        written.result(WAIT_S)
        checkpointer.save(tmp_path / "c", state_of(4))[1].result(WAIT_S)
        assert ["in a callback of a save's future" in one for one in told] == [True] * 4
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert is_whole(tmp_path / "a", 3)


def test_a_trainer_may_have_more_than_a_thousand_files_open(opened, tmp_path, monkeypatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("no process may have so many files open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    try:
        pair = handover.pair

        def far_up() -> tuple[socket.socket, socket.socket]:
            first, second = pair()
            with first, second:
                high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 1100) for one in (first, second)]
            return socket.socket(fileno=high[0]), socket.socket(fileno=high[1])

        monkeypatch.setattr(handover, "pair", far_up)
        opened().save(tmp_path / "a", state_of(1))[1].result(WAIT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert is_whole(tmp_path / "a", 1)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["idle", "before it accepts", "while it writes"])
def test_a_writer_that_ends_loses_no_save_but_the_one_that_it_writes_and_has_a_successor(
    sent, moment, opened, tmp_path
) -> None:
    checkpointer = opened()
    checkpointer.save(tmp_path / "a", state_of(1))[1].result(WAIT_S)
    first = writer_of(checkpointer)
    if moment == "before it accepts":
        os.kill(first, signal.SIGSTOP)
    if moment != "idle":
        staged, written = checkpointer.save(tmp_path / "a", state_of(2, 128))
        if moment == "while it writes":
            staged.result(WAIT_S)
    os.kill(first, sent)
    with contextlib.suppress(ProcessLookupError):
        os.kill(first, signal.SIGCONT)
    if moment == "while it writes" and sent == signal.SIGKILL:
        with pytest.raises(WriterLost, match=rf"pid {first}\) was ended by signal 9"):
            written.result(WAIT_S)
        assert is_whole(tmp_path / "a", 1)
    elif moment != "idle":
        written.result(WAIT_S)
        assert is_whole(tmp_path / "a", 2)

    def succeeded() -> bool:
        # One that was told to end may still take a save.
        checkpointer.save(tmp_path / "a", state_of(3))[1].result(WAIT_S)
        return checkpointer._saver.writer.pid != first

    eventually("another process writes", succeeded)
    assert is_whole(tmp_path / "a", 3)
    assert len(files_in(tmp_path / "a")) == 2


HANGS = """
import time
from tensorferry.checkpointing import writer_process
writer_process.perform = lambda *_: time.sleep(1000)
"""


@pytest.mark.waits
@pytest.mark.parametrize("how", mostly_at_night(["stopped while it writes", "cannot end"]))
def test_a_writer_without_a_sign_of_life_is_given_up_and_saving_goes_on(how, opened, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(writer, "_LEAST_S", 2.0)
    with monkeypatch.context() as patched:
        if how == "cannot end":
            patched.setattr(writer, "_PROGRAM", writer._PROGRAM.replace("main(", HANGS + "main(", 1))
        checkpointer = opened(patience=2)
    first = writer_of(checkpointer)
    if how == "cannot end":
        # As a process that waits for a disk, which no signal ends.
        monkeypatch.setattr(writer, "_GONE_S", 0.1)
        monkeypatch.setattr(checkpointer._saver.writer._child._process, "kill", lambda: None)
    futures = [checkpointer.save(tmp_path / str(n), state_of(n, 256 if n == 0 else 1)) for n in range(2)]
    if how == "stopped while it writes":
        futures[0][0].result(WAIT_S)
        os.kill(first, signal.SIGSTOP)
    saved = ThreadPoolExecutor().submit(checkpointer.save, tmp_path / "2", state_of(2))
    try:
        saved.result(WAIT_S)[1].result(WAIT_S)
        outcomes = [written.exception(WAIT_S) for _, written in futures]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
    assert is_whole(tmp_path / "2", 2)
    assert writer_of(checkpointer) != first
    says = "since it waits for a disk" if how == "cannot end" else "was ended by signal 9"
    for outcome in outcomes if how == "cannot end" else outcomes[:1]:
        assert isinstance(outcome, WriterLost)
        assert re.search(rf"pid {first}\) showed no sign of life .* {says}", str(outcome))


@pytest.mark.waits
def test_close_does_not_wait_for_a_stopped_writer_without_end(opened, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(writer, "_LEAST_S", 1.0)
    checkpointer = opened()
    checkpointer.save(tmp_path / "a", state_of(1))[1].result(WAIT_S)
    with stopped(writer_of(checkpointer)):
        ThreadPoolExecutor().submit(checkpointer.close).result(WAIT_S)


@pytest.mark.waits
def test_a_writer_that_works_for_longer_than_the_patience_is_waited_for(opened, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(writer, "_LEAST_S", 2.0)
    works = HANGS.replace("time.sleep(1000)", "[sum(range(10000)) or time.sleep(0.2) for _ in range(30)] and 1 / 0")
    with monkeypatch.context() as patched:
        patched.setattr(writer, "_PROGRAM", writer._PROGRAM.replace("main(", works + "main(", 1))
        checkpointer = opened(patience=1)
    _, written = checkpointer.save(tmp_path / "a", state_of(1))
    with pytest.raises(TensorferryError, match="division by zero"):
        written.result(WAIT_S)


def test_a_writer_that_cannot_start_says_why(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(writer, "_PROGRAM", "raise RuntimeError('no such module')")
    checkpointer = AsyncCheckpointer()
    _, written = checkpointer.save(tmp_path / "a", state_of(1))
    with pytest.raises((WriterLost, SystemRefused), match=r"RuntimeError: no such module|cannot be reached"):
        written.result(WAIT_S)
    monkeypatch.undo()
    checkpointer.save(tmp_path / "a", state_of(1))[1].result(WAIT_S)
    checkpointer.close()


@pytest.mark.parametrize("letter", ["a", "\ud800"])
def test_a_failure_with_a_long_text_is_told_and_the_next_order_is_carried_out(letter, monkeypatch) -> None:
    def performed(order, *_) -> dict[str, int]:
        if order.save.save == "first":
            raise SystemRefused(letter * 40000)
        return {"bytes": 1, "direct": 0}

    monkeypatch.setattr(writer_process, "_performed", performed)
    ours, theirs = handover.pair()
    with ours, theirs:
        process = writer_process._Process(theirs, os.getpid())
        for name in ("first", "second"):
            process._orders.put((SimpleNamespace(save=SimpleNamespace(save=name)), None))
        process._orders.put(None)
        process._work()
        failed, written = handover.receive(ours), handover.receive(ours)
    assert (failed.kind, failed.fields["save_id"], written.fields["save_id"]) == ("failed", "first", "second")
    assert set(failed.fields["text"]) == {letter}
    assert len(failed.fields["text"]) >= 600
