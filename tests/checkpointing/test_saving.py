"""``AsyncCheckpointer.save``: what its futures promise, how many saves run at once, and what a failure does."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import gc
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from checkpoint_files import children, files_in, is_running, is_whole, resources, tensors_of
from tensorferry.checkpointing import (
    AsyncCheckpointer,
    SyncCheckpointer,
    handover,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from tensorferry.checkpointing import checkpointers as module
from tensorferry.errors import (
    InvalidArgument,
    SystemRefused,
    TensorferryError,
    TransportClosed,
    UnsupportedLeaf,
    WriterLost,
)
from tensorferry.memory.shared import NoRoom
from tensorferry.storage.folder import read_index

pytestmark = pytest.mark.timeout(120)
WAIT_S = 60
MIB = 1 << 20


def state_of(value: float, mib: int = 1) -> dict:
    return {"w": torch.full((mib * MIB // 4,), float(value)), "step": int(value)}


@pytest.fixture
def opened():
    """Makes checkpointers that are closed at the end, whatever has become of their saves."""
    made = []

    def make(**options):
        made.append(AsyncCheckpointer(**options))
        return made[-1]

    yield make
    for checkpointer in made:
        with contextlib.suppress(TensorferryError):
            checkpointer.close()


@contextlib.contextmanager
def stopped(pid: int):
    """While the block runs, the process does nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def writer_of(checkpointer) -> int:
    pid = checkpointer._saver.writer.pid
    assert pid is not None
    return pid


def test_the_futures_say_when_the_state_may_change_and_when_the_checkpoint_is_committed(opened, tmp_path) -> None:
    checkpointer = opened()
    state = state_of(1)
    staged, written = checkpointer.save(tmp_path / "a" / "b", state, step=7)
    assert isinstance(staged, concurrent.futures.Future)
    assert isinstance(written, concurrent.futures.Future)
    assert staged.result(WAIT_S) is None
    state["w"].fill_(9)
    assert written.result(WAIT_S) is None
    assert is_whole(tmp_path / "a" / "b", 1)
    index = read_index(tmp_path / "a" / "b")
    assert (index.step, index.world_size) == (7, 1)
    assert files_in(tmp_path / "a" / "b") == ["index.safetensors", index.files[0][0]]


def test_a_save_is_accepted_only_when_the_writer_holds_it_and_a_third_one_waits_for_the_first(opened, tmp_path) -> None:
    checkpointer = opened()
    checkpointer.save(tmp_path / "0", state_of(0))[1].result(WAIT_S)
    futures, third = [], threading.Event()

    def save_third() -> None:
        futures.append(checkpointer.save(tmp_path / "3", state_of(3)))
        third.set()

    with stopped(writer_of(checkpointer)):
        futures = [checkpointer.save(tmp_path / str(n), state_of(n)) for n in (1, 2)]
        thread = threading.Thread(target=save_third)
        thread.start()
        assert not third.wait(0.5), "the second generation is in use"
        assert not any(staged.done() or written.done() for staged, written in futures)
    thread.join(WAIT_S)
    for _, written in futures:
        written.result(WAIT_S)
    assert [is_whole(tmp_path / str(n), n) for n in range(4)] == [True] * 4


def test_the_memory_is_kept_from_save_to_save_and_is_two_generations_at_most(opened, tmp_path) -> None:
    gc.collect()  # other tests may have left memory to the collector
    checkpointer = opened()
    nbytes = 8 * MIB
    held = []
    for n in range(6):
        futures = [checkpointer.save(tmp_path / f"{n}-{k}", state_of(n, 8)) for k in range(2)]
        held.append(checkpointer._saver._stager.held)
        [written.result(WAIT_S) for _, written in futures]
    assert nbytes <= held[0] <= held[-1] <= 2 * nbytes + (1 << 16)
    mappings = resources()["mappings"]
    checkpointer.close()
    assert checkpointer._saver._stager.held == 0
    assert mappings == 2
    assert resources()["mappings"] == 0


@pytest.mark.parametrize("state", [{}, {"a": 1}, {"empty": torch.empty(0, 3)}, [torch.ones(2)], torch.ones(3)])
def test_states_without_bytes_and_states_that_are_no_dict_are_saved(state, opened, tmp_path) -> None:
    opened().save(tmp_path, state)[1].result(WAIT_S)
    assert read_index(tmp_path).world_size == 1


def test_a_limit_of_memory_for_one_generation_makes_a_save_wait_for_the_one_before(opened, tmp_path) -> None:
    checkpointer = opened(memory_limit=9 * MIB)
    for n in range(4):
        written = checkpointer.save(tmp_path / str(n), state_of(n, 8))[1]
        assert checkpointer._saver._stager.held < 9 * MIB
    written.result(WAIT_S)
    assert [is_whole(tmp_path / str(n), n) for n in range(4)] == [True] * 4


def test_a_state_beyond_the_limit_is_refused_and_the_next_one_is_saved(opened, tmp_path, monkeypatch) -> None:
    checkpointer = opened(memory_limit=4 * MIB)
    with pytest.raises(NoRoom, match=rf"needs {8 * MIB} bytes of shared memory, .* the limit is {4 * MIB}"):
        checkpointer.save(tmp_path / "a", state_of(1, 8))
    checkpointer.save(tmp_path / "b", state_of(2))[1].result(WAIT_S)
    assert is_whole(tmp_path / "b", 2)
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr("tensorferry.memory.shared._available_memory", lambda: 5 * MIB)
    with pytest.raises(SystemRefused, match=f"has {5 * MIB} available"):
        opened().save(tmp_path / "a", state_of(1, 8))


def test_aliases_and_views_are_written_once(opened, tmp_path) -> None:
    base = torch.arange(float(MIB))
    state = {"a": base, "tied": base, "view": base[10:20], "t": base.view(1024, 1024).t()}
    opened().save(state, tmp_path)[1].result(WAIT_S)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 1.2 * base.nbytes
    assert torch.equal(tensors_of(tmp_path)["a"], base)


@pytest.mark.parametrize("make", [make_sync_checkpointer, make_async_checkpointer])
def test_path_and_state_are_understood_in_either_order_and_by_name(make, tmp_path) -> None:
    checkpointer = make()
    state = state_of(1)
    calls = [
        lambda path: checkpointer.save(path, state),
        lambda path: checkpointer.save(state, path),
        lambda path: checkpointer.save(state, path=path),
        lambda path: checkpointer.save(str(path), state_dict=state),
        lambda path: checkpointer.save(state_dict=state, path=str(path)),
        lambda path: checkpointer.save(OrderedDict(state), os.fspath(path)),
    ]
    for number, call in enumerate(calls):
        saved = call(tmp_path / str(number))
        if saved is not None:
            saved[1].result(WAIT_S)
        assert is_whole(tmp_path / str(number), 1), number
    for wrong in ((state, state), ("a", "b"), (1, 2)):
        with pytest.raises(InvalidArgument, match="cannot tell path and state apart"):
            checkpointer.save(*wrong)
    for wrong in (
        {"path": state, "state_dict": state},
        {"path": "", "state_dict": state},
        {"path": 5, "state_dict": {}},
    ):
        with pytest.raises(InvalidArgument, match="path must be the path of a folder"):
            checkpointer.save(**wrong)
    for count in (0, 1, 3):
        with pytest.raises(TypeError, match="takes a path and a state"):
            checkpointer.save(*["a"] * count)
    with pytest.raises(InvalidArgument, match="not a folder of this machine"):
        checkpointer.save("s3://bucket/a", state)
    checkpointer.close()


def test_the_classes_are_torchs_checkpointers_where_torch_has_them() -> None:
    experimental = pytest.importorskip("torch.distributed.checkpoint._experimental.checkpointer")
    assert issubclass(AsyncCheckpointer, experimental.Checkpointer)
    assert issubclass(SyncCheckpointer, experimental.Checkpointer)


def test_arguments_that_cannot_be_used_are_named() -> None:
    for options, name in (
        ({"threads": 0}, "threads"),
        ({"cached": 1}, "cached"),
        ({"keep_last": 0}, "keep_last"),
        ({"keep_last": True}, "keep_last"),
        ({"patience": 0}, "patience"),
        ({"memory_limit": -1}, "memory_limit"),
        ({"rank": 1}, "rank and world_size"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"rank": 0, "world_size": 2}, "agree="),
        ({"keeper": 5}, "keeper"),
    ):
        with pytest.raises(InvalidArgument, match=name):
            AsyncCheckpointer(**options)


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


def test_a_failure_nobody_has_looked_at_is_raised_once_by_the_next_save(opened, tmp_path) -> None:
    checkpointer = opened()
    (tmp_path / "file").write_text("")
    _, written = checkpointer.save(tmp_path / "file" / "a", state_of(1))
    concurrent.futures.wait([written], WAIT_S)
    with pytest.raises(SystemRefused, match="cannot be created"):
        checkpointer.save(tmp_path / "b", state_of(2))
    assert not (tmp_path / "b").exists()
    checkpointer.save(tmp_path / "c", state_of(3))[1].result(WAIT_S)
    assert is_whole(tmp_path / "c", 3)
    checkpointer.save(tmp_path / "file" / "a", state_of(1))
    with pytest.raises(SystemRefused, match="cannot be created"):
        checkpointer.close()
    checkpointer.close()


def test_a_failure_nobody_has_looked_at_is_logged_at_the_end(tmp_path, caplog) -> None:
    checkpointer = AsyncCheckpointer()
    pid = writer_of(checkpointer)
    (tmp_path / "file").write_text("")
    _, written = checkpointer.save(tmp_path / "file" / "a", state_of(1))
    concurrent.futures.wait([written], WAIT_S)
    checkpointer._saver.finish_at_exit(time.monotonic() + WAIT_S)
    assert ["cannot be created" in record.message for record in caplog.records] == [True]
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
    saved = []
    written = checkpointer.save(tmp_path / "a", state_of(4))[1]
    written.add_done_callback(lambda _: saved.append(checkpointer.save(tmp_path / "c", state_of(5))))
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


def test_the_third_argument_of_a_save_is_refused_by_name(opened, tmp_path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword arguments: foo"):
        opened().save(tmp_path, state_of(1), foo=1)


def test_a_writer_that_cannot_start_says_why(tmp_path, monkeypatch) -> None:
    from tensorferry.checkpointing import writer

    monkeypatch.setattr(writer, "_PROGRAM", "raise RuntimeError('no such module')")
    checkpointer = AsyncCheckpointer()
    _, written = checkpointer.save(tmp_path / "a", state_of(1))
    with pytest.raises((WriterLost, SystemRefused), match=r"RuntimeError: no such module|cannot be reached"):
        written.result(WAIT_S)
    monkeypatch.undo()
    checkpointer.save(tmp_path / "a", state_of(1))[1].result(WAIT_S)
    checkpointer.close()


class _Keeper:
    """A keeper that counts, and keeps what it is offered until it is told to release."""

    def __init__(self, fails: bool = False) -> None:
        self.offered: list = []
        self.fails = fails
        self.closed = 0

    def offer(self, given, released) -> None:
        if self.fails:
            raise ConnectionError("the keeper is gone")
        self.offered.append((given, released))

    def let_go(self) -> bool:
        if self.fails:
            raise ConnectionError("the keeper is gone")
        if self.offered:
            self.offered.pop(0)[1]()
            return True
        return False

    def close(self) -> None:
        self.closed += 1


def test_memory_that_a_keeper_holds_is_not_used_again(opened, tmp_path) -> None:
    keeper = _Keeper()
    checkpointer = opened(keeper=keeper)
    for n in range(4):
        checkpointer.save(tmp_path / str(n), state_of(n))[1].result(WAIT_S)
    for n in range(4):
        given, released = keeper.offered.pop(0)
        assert (given.kind, given.fields["path"]) == ("keep", str(tmp_path / str(n)))
        memory = torch.frombuffer(given.buffers[0], dtype=torch.float32)
        assert (memory[: MIB // 4] == n).all()
        del given, memory
        released()
    held = checkpointer._saver._stager.held
    for n in range(4):
        checkpointer.save(tmp_path / str(n), state_of(n))[1].result(WAIT_S)
        keeper.offered.pop()[1]()
    assert checkpointer._saver._stager.held <= held
    checkpointer.close()
    assert keeper.closed == 1


def test_a_keeper_lets_go_of_memory_that_a_save_needs(opened, tmp_path) -> None:
    keeper = _Keeper()
    checkpointer = opened(keeper=keeper, memory_limit=20 * MIB)
    for n in range(6):
        checkpointer.save(tmp_path / str(n), state_of(n, 4))[1].result(WAIT_S)
    assert len(keeper.offered) == 5
    with pytest.raises(NoRoom):
        checkpointer.save(tmp_path / "x", state_of(1, 40))
    assert not keeper.offered


def test_a_keeper_that_fails_never_reaches_the_trainer(opened, tmp_path, caplog) -> None:
    checkpointer = opened(keeper=_Keeper(fails=True))
    for n in range(3):
        checkpointer.save(tmp_path / str(n), state_of(n))[1].result(WAIT_S)
    assert [record.message for record in caplog.records if "keeper" in record.message] == [
        "the keeper cannot be used, saving goes on without it: ConnectionError: the keeper is gone"
    ]


def test_a_connection_to_a_keeper_is_asked_for_by_name(monkeypatch) -> None:
    keeper = _Keeper()
    monkeypatch.setattr(module, "_connected", lambda name: keeper if name == "node" else None)
    with contextlib.closing(AsyncCheckpointer(keeper="node")) as checkpointer:
        assert checkpointer._keeper is keeper
