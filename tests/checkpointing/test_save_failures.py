"""``AsyncCheckpointer.save``: what a failure does, of the state, the disk, a callback or the process that writes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import os
import re
import resource
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from saves import MIB, WAIT_S, state_of, stopped, writer_of

from checkpoint_files import files_in, is_whole
from nights import mostly_at_night
from tensorferry.checkpointing import (
    AsyncCheckpointer,
    SyncCheckpointer,
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
from tensorferry.state.snapshot import StateSnapshot

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


class Silent(torch.Tensor):
    """A tensor that answers nothing."""

    @classmethod
    def __torch_function__(cls, *_, **__):
        raise RuntimeError("no answer")


def test_what_cannot_be_saved_is_refused_and_the_next_state_is_saved(opened, tmp_path) -> None:
    checkpointer = opened()
    for leaf in (threading.Lock(), torch.ones(2).as_subclass(Silent)):
        for _ in range(3):
            with pytest.raises(UnsupportedLeaf, match=r"model\.odd"):
                checkpointer.save(tmp_path / "a", {"model": {"odd": leaf}})
    checkpointer.save(tmp_path / "b", state_of(1))[1].result(WAIT_S)
    assert is_whole(tmp_path / "b", 1)


def test_a_failed_write_is_told_by_its_own_future_and_saving_goes_on(opened, tmp_path) -> None:
    checkpointer = opened()
    (tmp_path / "file").write_text("")
    _, written = checkpointer.save(tmp_path / "file" / "a", state_of(1))
    with pytest.raises(SystemRefused, match="cannot be created"):
        written.result(WAIT_S)
    checkpointer.save(tmp_path / "b", state_of(2))[1].result(WAIT_S)
    checkpointer.close()


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
    with pytest.raises(SystemRefused, match="cannot be created") as raised:
        checkpointer.close()
    assert ["A further save has failed" in note for note in raised.value.__notes__] == [True]
    checkpointer.close()


@pytest.mark.parametrize("ask", ["result", "exception"])
def test_a_question_that_ends_before_the_save_does_not_count_as_a_look_at_its_failure(ask, opened, tmp_path) -> None:
    checkpointer = opened()
    (tmp_path / "file").write_text("")
    with stopped(writer_of(checkpointer)):
        _, written = checkpointer.save(tmp_path / "file" / "a", state_of(1))
        with pytest.raises(TimeoutError):
            getattr(written, ask)(timeout=0)
    concurrent.futures.wait([written], WAIT_S)
    with pytest.raises(SystemRefused, match="cannot be created"):
        checkpointer.close()


def test_a_failure_nobody_has_looked_at_is_logged_at_the_end(tmp_path, caplog) -> None:
    checkpointer = AsyncCheckpointer()
    pid = writer_of(checkpointer)
    (tmp_path / "file").write_text("")
    _, written = checkpointer.save(tmp_path / "file" / "a", state_of(1))
    concurrent.futures.wait([written], WAIT_S)
    checkpointer._saver.finish_at_exit(time.monotonic() + WAIT_S)
    assert ["cannot be created" in record.message for record in caplog.records] == [True]
    with pytest.raises(SystemRefused, match="cannot be created"):
        checkpointer.close()
    os.waitpid(pid, 0)


def test_a_signal_handler_that_interrupts_a_save_is_told_so_and_the_save_goes_on(opened, tmp_path) -> None:
    checkpointer = opened()
    told = []

    def handle(*_):
        for call in (lambda: checkpointer.save(tmp_path / "b", state_of(2)), checkpointer.close):
            try:
                told.append(call())
            except InvalidArgument as e:
                told.append(str(e))

    class Interrupted:
        def __reduce__(self):
            signal.raise_signal(signal.SIGUSR1)
            return dict, ()

    def give_up(*_):
        raise TimeoutError("the handler waits for the save that it has interrupted")

    before = [(one, signal.signal(one, do)) for one, do in ((signal.SIGUSR1, handle), (signal.SIGALRM, give_up))]
    signal.alarm(20)
    try:
        checkpointer.save(tmp_path / "a", {**state_of(1), "odd": Interrupted()})[1].result(WAIT_S)
        assert len(told) >= 2
        assert all("signal handler" in one for one in told)
        # Between saves, a handler may save.
        del told[:]
        signal.raise_signal(signal.SIGUSR1)
        assert isinstance(told[0], tuple)
    finally:
        signal.alarm(0)
        for one, do in before:
            signal.signal(one, do)
    assert is_whole(tmp_path / "a", 1)
    assert is_whole(tmp_path / "b", 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, ValueError])
def test_an_interrupt_right_after_the_state_was_sent_leaves_its_memory_to_the_writer(
    error, opened, tmp_path, monkeypatch
) -> None:
    checkpointer = opened()
    checkpointer.save(tmp_path / "0", state_of(0))[1].result(WAIT_S)
    sends: list = []

    def handle(*_):
        raise error("the trainer is to end")

    def interrupted(*args) -> None:
        send(*args)
        sends.append(args)
        signal.raise_signal(signal.SIGUSR1)

    send, before = handover.send, signal.signal(signal.SIGUSR1, handle)
    try:
        with stopped(writer_of(checkpointer)):
            with monkeypatch.context() as patched:
                patched.setattr(handover, "send", interrupted)
                with pytest.raises(error, match="the trainer is to end"):
                    checkpointer.save(tmp_path / "1", state_of(1))
            assert len(sends) == 1
            _, written = checkpointer.save(tmp_path / "2", state_of(2))
    finally:
        signal.signal(signal.SIGUSR1, before)
    written.result(WAIT_S)
    checkpointer.close()
    assert is_whole(tmp_path / "1", 1)
    assert is_whole(tmp_path / "2", 2)


def test_a_callback_that_would_wait_for_itself_is_told_so(opened, tmp_path) -> None:
    checkpointer = opened()
    told = []

    def call_both(_):
        for call in (lambda: checkpointer.save(tmp_path / "c", state_of(3)), checkpointer.close):
            try:
                told.append(call())
            except InvalidArgument as e:
                told.append(str(e))

    with stopped(writer_of(checkpointer)):
        checkpointer.save(tmp_path / "a", state_of(1))
        staged, written = checkpointer.save(tmp_path / "b", state_of(2))
        staged.add_done_callback(call_both)
    written.result(WAIT_S)
    assert ["callback" in one for one in told] == [True, True]
    # A save that need not wait is no trouble.
    saved, has_called = [], threading.Event()

    def save(_):
        try:
            saved.append(checkpointer.save(tmp_path / "c", state_of(5)))
        finally:
            has_called.set()

    checkpointer.save(tmp_path / "a", state_of(4))[1].add_done_callback(save)
    # While this thread is in a save, one in a callback is refused.
    assert has_called.wait(WAIT_S)
    checkpointer.save(tmp_path / "b", state_of(6))[1].result(WAIT_S)
    checkpointer.close()
    assert len(saved) == 1
    assert is_whole(tmp_path / "c", 5)


def test_a_callback_that_saves_while_another_save_waits_for_what_it_would_hear_is_refused(opened, tmp_path) -> None:
    checkpointer = opened()
    checkpointer.save(tmp_path / "0", state_of(0))[1].result(WAIT_S)
    told, waits = [], threading.Event()
    take = checkpointer._saver._turns.take

    def taken(may_wait: bool) -> None:
        waits.set()
        take(may_wait)

    def save(_) -> None:
        assert waits.wait(WAIT_S)
        try:
            checkpointer.save(tmp_path / "c", state_of(4))
        except InvalidArgument as e:
            told.append(str(e))

    with stopped(writer_of(checkpointer)):
        futures = [checkpointer.save(tmp_path / str(n), state_of(n)) for n in (1, 2)]
        futures[0][0].add_done_callback(save)
        checkpointer._saver._turns.take = taken
        third: list = []
        thread = threading.Thread(target=lambda: third.append(checkpointer.save(tmp_path / "3", state_of(3))))
        thread.start()
        assert waits.wait(WAIT_S)
    thread.join(WAIT_S)
    assert third, "the save and the callback wait for each other"
    for _, written in [*futures, *third]:
        written.result(WAIT_S)
    assert len(told) == 1
    assert "cannot be called in a callback" in told[0]
    assert is_whole(tmp_path / "3", 3)


def test_a_callback_that_would_wait_for_memory_is_told_so(opened, tmp_path) -> None:
    checkpointer = opened(memory_limit=9 * MIB)
    told, has_called = [], threading.Event()

    def save(_) -> None:
        try:
            told.append(checkpointer.save(tmp_path / "b", state_of(2, 8)))
        except InvalidArgument as e:
            told.append(str(e))
        has_called.set()

    with stopped(writer_of(checkpointer)):
        staged, written = checkpointer.save(tmp_path / "a", state_of(1, 8))
        staged.add_done_callback(save)
    if not has_called.wait(WAIT_S):
        # Else the fixture would wait for ever as well.
        checkpointer._saver._turns.give()
        pytest.fail("the callback waits for what its own thread has to hear")
    written.result(WAIT_S)
    assert len(told) == 1
    assert "cannot be called in a callback" in told[0]
    checkpointer.save(tmp_path / "b", state_of(2, 8))[1].result(WAIT_S)
    assert is_whole(tmp_path / "a", 1)
    assert is_whole(tmp_path / "b", 2)


def test_a_copy_for_which_no_thread_can_be_started_fails_that_save_alone(opened, tmp_path, monkeypatch) -> None:
    checkpointer = opened()
    start = threading.Thread.start

    def refused(self) -> None:
        if self.name == "tensorferry-stage":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patched:
        # As of a state on an accelerator.
        patched.setattr(StateSnapshot, "is_complete", property(lambda _: False))
        patched.setattr(threading.Thread, "start", refused)
        for n in range(3):
            with pytest.raises(SystemRefused, match="copy cannot be completed: can't start new thread"):
                checkpointer.save(tmp_path / str(n), state_of(n))[1].result(WAIT_S)
    assert not checkpointer._saver._turns.is_any_taken
    checkpointer.save(tmp_path / "a", state_of(4))[1].result(WAIT_S)
    assert is_whole(tmp_path / "a", 4)


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


def test_a_path_that_no_file_system_has_is_refused(opened, tmp_path) -> None:
    for make in (opened, SyncCheckpointer):
        checkpointer = make()
        for name in ("a\ud800", "a\0b", ""):
            with pytest.raises(InvalidArgument, match="path must be"):
                checkpointer.save(f"{tmp_path}/{name}" if name else "", state_of(1))


def test_a_full_disk_fails_that_save_alone_and_leaves_nothing(opened, tmp_path) -> None:
    """The limit of file sizes stands in for a full disk: both make a write fail in the middle."""
    checkpointer = opened()
    checkpointer.save(tmp_path / "a", state_of(1))[1].result(WAIT_S)
    import resource

    resource.prlimit(writer_of(checkpointer), resource.RLIMIT_FSIZE, (6 * MIB, resource.RLIM_INFINITY))
    _, written = checkpointer.save(tmp_path / "a", state_of(2, 32))
    with pytest.raises(SystemRefused):
        written.result(WAIT_S)
    assert is_whole(tmp_path / "a", 1)
    assert len(files_in(tmp_path / "a")) == 2
    resource.prlimit(writer_of(checkpointer), resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpointer.save(tmp_path / "a", state_of(3, 32))[1].result(WAIT_S)
    assert is_whole(tmp_path / "a", 3)


def test_a_failed_save_leaves_no_folder_of_its_own_and_none_of_others_goes(opened, tmp_path) -> None:
    checkpointer = opened()
    checkpointer.save(tmp_path / "a", state_of(1))[1].result(WAIT_S)
    resource.prlimit(writer_of(checkpointer), resource.RLIMIT_FSIZE, (6 * MIB, resource.RLIM_INFINITY))
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with pytest.raises(SystemRefused):
            checkpointer.save(tmp_path / name, state_of(2, 32))[1].result(WAIT_S)
    assert files_in(tmp_path) == ["a", "there"]
    assert files_in(tmp_path / "there") == []


def test_a_folder_that_is_removed_while_it_is_written_fails_that_save_alone(opened, tmp_path) -> None:
    checkpointer = opened()
    checkpointer.save(tmp_path / "a", state_of(1))[1].result(WAIT_S)
    with stopped(writer_of(checkpointer)):
        _, written = checkpointer.save(tmp_path / "a", state_of(2, 64))
    deadline = time.monotonic() + WAIT_S
    while not written.done() and time.monotonic() < deadline:
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
    failed = written.exception(WAIT_S)
    assert failed is None or isinstance(failed, TensorferryError)
    checkpointer.save(tmp_path / "b", state_of(3))[1].result(WAIT_S)
    assert is_whole(tmp_path / "b", 3)


def test_a_killed_writer_fails_its_save_with_an_error_that_says_so_and_the_next_save_has_a_new_one(
    opened, tmp_path
) -> None:
    checkpointer = opened()
    checkpointer.save(tmp_path / "a", state_of(1))[1].result(WAIT_S)
    first = writer_of(checkpointer)
    staged, written = checkpointer.save(tmp_path / "a", state_of(2, 128))
    staged.result(WAIT_S)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(WriterLost, match=rf"pid {first}\) was ended by signal 9"):
        written.result(WAIT_S)
    assert is_whole(tmp_path / "a", 1)
    checkpointer.save(tmp_path / "a", state_of(3))[1].result(WAIT_S)
    assert is_whole(tmp_path / "a", 3)
    assert writer_of(checkpointer) != first
    assert len(files_in(tmp_path / "a")) == 2


def test_a_save_that_no_writer_has_accepted_yet_is_given_to_a_new_one(opened, tmp_path) -> None:
    checkpointer = opened()
    checkpointer.save(tmp_path / "a", state_of(1))[1].result(WAIT_S)
    first = writer_of(checkpointer)
    os.kill(first, signal.SIGSTOP)
    futures = [checkpointer.save(tmp_path / str(n), state_of(n))[1] for n in range(2)]
    os.kill(first, signal.SIGKILL)
    for n, written in enumerate(futures):
        written.result(WAIT_S)
        assert is_whole(tmp_path / str(n), n)
    assert writer_of(checkpointer) != first


HANGS = """
import time
from tensorferry.checkpointing import writer_process
writer_process.perform = lambda *_: time.sleep(1000)
"""


@pytest.mark.waits
@pytest.mark.parametrize(
    "how", mostly_at_night(["stopped while it writes", "stopped before it accepts", "hangs in a write", "cannot end"])
)
def test_a_writer_without_a_sign_of_life_is_given_up_and_saving_goes_on(how, opened, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(writer, "_LEAST_S", 2.0)
    with monkeypatch.context() as patched:
        if how in ("hangs in a write", "cannot end"):
            patched.setattr(writer, "_PROGRAM", writer._PROGRAM.replace("main(", HANGS + "main(", 1))
        checkpointer = opened(patience=2)
    first = writer_of(checkpointer)
    if how == "cannot end":
        # As a process that waits for a disk, which no signal ends.
        monkeypatch.setattr(writer, "_GONE_S", 0.1)
        monkeypatch.setattr(checkpointer._saver.writer._child._process, "kill", lambda: None)
    if how == "stopped before it accepts":
        os.kill(first, signal.SIGSTOP)
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
    if how == "stopped before it accepts":
        assert outcomes == [None, None]
        assert [is_whole(tmp_path / str(n), n) for n in range(2)] == [True, True]
    else:
        says = "since it waits for a disk" if how == "cannot end" else "was ended by signal 9"
        for outcome in outcomes if how != "stopped while it writes" else outcomes[:1]:
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


def test_a_writer_that_is_killed_while_idle_is_replaced(opened, tmp_path) -> None:
    checkpointer = opened()
    for n in range(3):
        checkpointer.save(tmp_path / "a", state_of(n))[1].result(WAIT_S)
        os.kill(writer_of(checkpointer), signal.SIGKILL)
    assert is_whole(tmp_path / "a", 2)


def test_a_writer_that_is_asked_to_end_writes_what_it_has_accepted(opened, tmp_path) -> None:
    checkpointer = opened()
    staged, written = checkpointer.save(tmp_path / "a", state_of(1, 64))
    staged.result(WAIT_S)
    os.kill(writer_of(checkpointer), signal.SIGTERM)
    written.result(WAIT_S)
    assert is_whole(tmp_path / "a", 1)
    checkpointer.save(tmp_path / "a", state_of(2))[1].result(WAIT_S)
    assert is_whole(tmp_path / "a", 2)


def test_a_writer_that_cannot_start_says_why(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(writer, "_PROGRAM", "raise RuntimeError('no such module')")
    checkpointer = AsyncCheckpointer()
    _, written = checkpointer.save(tmp_path / "a", state_of(1))
    with pytest.raises((WriterLost, SystemRefused), match=r"RuntimeError: no such module|cannot be reached"):
        written.result(WAIT_S)
    monkeypatch.undo()
    checkpointer.save(tmp_path / "a", state_of(1))[1].result(WAIT_S)
    checkpointer.close()


@pytest.mark.parametrize("letter", ["\U0001f600", "a", "\u20ac", "\x01", "\ud800"])
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
