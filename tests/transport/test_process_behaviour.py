"""Fork, signals, interpreter exit and leaks: a library with threads must not harm the process that uses it.

Every test runs in a process of its own.
"""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

import leaves
from equality import assert_same_state
from nights import mostly_at_night

if TYPE_CHECKING:
    from child import Child

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.beyond_torchft]

# ---------------------------------------------------------------------------------------------------------------------
# Fork


def test_fork_after_use(forked_child: Child) -> None:
    out = forked_child.run("""
        source, target = open_pair()
        send_and_receive(source, target, 1)

        def use_transports():
            metadata = source.metadata()
            for use, arguments in (
                (source.send_checkpoint, ([1], 2, STATE, LONG)),
                (target.recv_checkpoint, (0, metadata, 1, timedelta(seconds=5))),
                (target.recv_checkpoint, (0, "http://127.0.0.1:9/checkpoint/", 1, timedelta(seconds=5))),
            ):
                try:
                    use(*arguments)
                except tensorferry.ForkedProcess as error:
                    assert isinstance(error, RuntimeError)
                    assert isinstance(error, tensorferry.TensorferryError)
                else:
                    raise AssertionError(f"{use} worked in a forked child")
            print("child is done", flush=True)

        assert exit_code(in_fork(use_transports)) == 0
        send_and_receive(source, target, 3)
        source.disallow_checkpoint()
        send_and_receive(source, target, 4)
        print("parent goes on", flush=True)
    """)
    assert "child is done" in out
    assert "parent goes on" in out


def test_forked_child_may_clean_up_and_exit_as_any_process(forked_child: Child) -> None:
    """Finalisers and exit handlers run in a child, too, but the threads of their objects do not exist there."""
    out = forked_child.run("""
        source, target = open_pair()
        received = send_and_receive(source, target, 1)
        source.send_checkpoint([1], 2, STATE, LONG)
        waiting = start_waiting(target, source)

        pid = os.fork()
        if pid == 0:
            for close in (source.disallow_checkpoint, source.shutdown, lambda: target.shutdown(wait=False)):
                try:
                    close()
                except tensorferry.ForkedProcess:
                    pass
            received["w"] += 1
            del source, target, received
            gc.collect()
            sys.exit(7)
        assert exit_code(pid) == 7
        send_and_receive(source, HTTPTransport(LONG, 2), 3)
        print("parent goes on", flush=True)
    """)
    assert "parent goes on" in out


def test_fork_in_the_middle_of_a_transfer(forked_child: Child) -> None:
    out = forked_child.run("""
        source, target = open_pair()
        source.send_checkpoint([1], 1, {"w": torch.ones(64 << 20, dtype=torch.uint8)}, LONG)
        reader = stuck_reader(source)
        assert exit_code(in_fork(lambda: None)) == 0
        send_and_receive(source, target, 2)
        print("parent goes on", flush=True)
        os._exit(0)
    """)
    assert "parent goes on" in out


def test_data_loader_workers_beside_a_transport(forked_child: Child) -> None:
    """A data loader's workers are forked, and end by os._exit or by a signal."""
    out = forked_child.run("""
        import torch.utils.data
        source, target = open_pair()
        send_and_receive(source, target, 1)
        for step in range(2, 5):
            loader = torch.utils.data.DataLoader(
                list(range(32)), batch_size=4, num_workers=2, multiprocessing_context="fork"
            )
            assert sum(int(batch.sum()) for batch in loader) == sum(range(32))
            send_and_receive(source, target, step)
        print("trained", flush=True)
    """)
    assert "trained" in out


# ---------------------------------------------------------------------------------------------------------------------
# Exit


@pytest.mark.parametrize(
    "way", mostly_at_night(["pass", "os._exit(0)", "sys.exit(0)", "os.kill(os.getpid(), signal.SIGTERM)"])
)
@pytest.mark.parametrize("busy", ["receiving", "serving", "idle"])
def test_exit_is_prompt(way: str, busy: str, forked_child: Child) -> None:
    """shutdown is not called, while a receiver waits two minutes or a reader is stuck in the middle of a transfer."""
    forked_child.start(
        f"""
        source, target = open_pair()
        send_and_receive(source, target, 1)
        if {busy!r} == "receiving":
            source.disallow_checkpoint()
            start_waiting(target, source)
        elif {busy!r} == "serving":
            source.send_checkpoint([1], 1, {{"w": torch.ones(64 << 20, dtype=torch.uint8)}}, LONG)
            reader = stuck_reader(source)
        print("ready", flush=True)
        {way}
    """,
        to_the_end=True,
    )
    forked_child.wait_for("ready")
    started = time.monotonic()
    forked_child.finish(within=30, returncode=-signal.SIGTERM if "SIGTERM" in way else 0)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("waits", mostly_at_night(["for its turn to send", "for a checkpoint"]))
def test_exit_is_silent_while_a_receiver_of_this_machine_waits(waits: str, forked_child: Child) -> None:
    """The threads that serve shared memory outlive the runtime and its timers by a moment."""
    forked_child.start(
        f"""
        options = {{"max_bandwidth": 1 << 20}} if "send" in {waits!r} else {{}}
        source, target = HTTPTransport(LONG, **options), HTTPTransport(LONG, 4)
        step, state = 1, {{"w": torch.ones(64 << 20, dtype=torch.uint8)}}
        source.send_checkpoint([1], step, state, LONG)
        if not options:
            # Connected before there is something to wait for: by a receiver that was made for it.
            import socket, urllib.request
            name = urllib.request.urlopen(source.metadata() + "1/header").headers["tensorferry-same-host"]
            source.disallow_checkpoint()
            for _ in range(8):
                local = socket.socket(socket.AF_UNIX)
                local.connect("\\0" + name)
                local.sendall(b"\\r\\n")
                local.recv(64)
                path = source.metadata().split("/", 3)[3]
                local.sendall(f"GET /{{path}}2/header HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n".encode())
                globals().setdefault("kept", []).append(local)
        else:
            def receive():
                try:
                    target.recv_checkpoint(0, source.metadata(), step, LONG)
                except tensorferry.TensorferryError:
                    pass
            threading.Thread(target=receive, daemon=True).start()
        time.sleep(2)
        print("ready", flush=True)
    """,
        to_the_end=True,
    )
    forked_child.wait_for("ready")
    forked_child.finish(within=15)


def test_exit_by_an_exception(forked_child: Child) -> None:
    forked_child.start(
        """
        source, target = open_pair()
        send_and_receive(source, target, 1)
        print("ready", flush=True)
        raise ValueError("of the trainer")
    """,
        to_the_end=True,
    )
    forked_child.wait_for("ready")
    forked_child.finish(within=15, returncode=1)


def test_use_at_exit(forked_child: Child) -> None:
    """A trainer's own exit handler can still shut its transport down, before or after ours has run."""
    out = forked_child.run(
        """
        import atexit
        def late():
            for source in kept:
                source.disallow_checkpoint()
                source.shutdown()
                source.shutdown(wait=False)
            print("closed", flush=True)
        kept = []
        atexit.register(late)
        source, target = open_pair()
        kept += [source, target]
        send_and_receive(source, target, 1)
        atexit.register(late)
    """,
        to_the_end=True,
    )
    assert out.count("closed") == 2


# ---------------------------------------------------------------------------------------------------------------------
# Signals


@pytest.mark.parametrize("wait_for", ["first send", "stalled bytes"])
def test_ctrl_c_ends_a_blocked_receive(wait_for: str, forked_child: Child) -> None:
    forked_child.start(f"""
        source, target = open_pair()
        metadata, listener = source.metadata(), None
        if {wait_for!r} == "stalled bytes":
            import socket
            listener = socket.create_server(("127.0.0.1", 0))
            metadata = f"http://127.0.0.1:{{listener.getsockname()[1]}}/{{'0' * 32}}/checkpoint/"
        print("ready", flush=True)
        started = time.monotonic()
        try:
            target.recv_checkpoint(0, metadata, 1, LONG)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            assert time.monotonic() - started < 30
        send_and_receive(source, target, 2)
        print("goes on", flush=True)
    """)
    assert forked_child.interrupt() < 5
    assert "goes on" in forked_child.finish(within=30)


@pytest.mark.parametrize("same_host", mostly_at_night([False, True]))
def test_nobody_writes_into_memory_after_two_ctrl_c(same_host: bool, forked_child: Child) -> None:
    process = forked_child.start(f"""
        import ctypes, mmap
        heard, nbytes = [], 64 << 20
        def handle(*_):
            heard.append(1)
            if len(heard) == 1:
                raise KeyboardInterrupt
        signal.signal(signal.SIGINT, handle)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = libc.mmap(None, ctypes.c_size_t(nbytes), protection, flags, -1, ctypes.c_size_t(0))
        live = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
        said = []
        def progress(done, total):
            if done > total // 8 and not said:
                said.append(print("ready", flush=True))
        source = HTTPTransport(LONG, max_bandwidth=16 << 20)
        target = HTTPTransport(LONG, same_host={same_host}, state_dict=lambda: {{"w": live}}, progress=progress)
        source.send_checkpoint([1], 1, {{"w": torch.ones(nbytes, dtype=torch.uint8)}}, LONG)
        try:
            target.recv_checkpoint(0, source.metadata(), 1, LONG)
        except KeyboardInterrupt:
            assert libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0
        time.sleep(2)
        assert heard
        print("goes on", flush=True)
    """)
    forked_child.wait_for("ready")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.06)
    assert "goes on" in forked_child.finish(within=30)


def test_ctrl_c_ends_the_drain_of_a_withdrawal(forked_child: Child) -> None:
    """The readers are then cut off, so that the state may be changed, as after every withdrawal."""
    forked_child.start("""
        import urllib.request
        source, target = open_pair()
        source.send_checkpoint([1], 1, {"w": torch.ones(64 << 20, dtype=torch.uint8)}, LONG)
        reader = stuck_reader(source)
        print("ready", flush=True)
        try:
            source.disallow_checkpoint()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        with urllib.request.urlopen(source.metadata().replace("checkpoint/", "metrics"), timeout=30) as metrics:
            assert b"tensorferry_transfers 0" in metrics.read()
        send_and_receive(source, target, 2)
        print("goes on", flush=True)
    """)
    assert forked_child.interrupt() < 2
    assert "goes on" in forked_child.finish(within=30)


def test_a_signal_that_is_handled_does_not_end_a_receive(forked_child: Child) -> None:
    process = forked_child.start("""
        heard = []
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
        source, target = open_pair()
        def send():
            until = time.monotonic() + 20
            while not heard and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(1)
            source.send_checkpoint([1], 1, STATE, LONG)
        threading.Thread(target=send).start()
        print("ready", flush=True)
        received = target.recv_checkpoint(0, source.metadata(), 1, LONG)
        assert torch.equal(received["w"], STATE["w"])
        assert heard, "the handler did not run"
        print("received", flush=True)
    """)
    forked_child.wait_for("ready")
    time.sleep(0.5)
    for _ in range(5):
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    assert "received" in forked_child.finish(within=30)


def test_a_thread_that_is_not_the_main_one_may_receive_while_ctrl_c_comes(forked_child: Child) -> None:
    """A manager receives in a thread of its own, while the main thread gets the interrupt."""
    process = forked_child.start("""
        source, target = open_pair()
        thread = start_waiting(target, source)
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("main thread interrupted", flush=True)
        source.send_checkpoint([1], 99, STATE, LONG)
        thread.join(20)
        assert not thread.is_alive()
    """)
    forked_child.wait_for("ready")
    process.send_signal(signal.SIGINT)
    out = forked_child.finish(within=30)
    assert "main thread interrupted" in out
    assert "receive ended" not in out


# ---------------------------------------------------------------------------------------------------------------------
# Leaks


def test_threads_files_and_memory_stay_the_same(forked_child: Child) -> None:
    out = forked_child.run(
        """
        def used():
            gc.collect()
            pages = int(open("/proc/self/statm").read().split()[1])
            return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * 4096 >> 20

        def cycle(number):
            state = {"w": torch.full((1 << 20,), float(number)), "v": torch.ones(99)[::2], "o": {number}}
            source, target = open_pair(snapshot="copy" if number % 2 else "borrow")
            send_and_receive(source, target, number, state)
            if number % 3:
                source.disallow_checkpoint()
            if number % 5:
                source.shutdown(wait=number % 4 != 0)
                target.shutdown()

        for number in range(1, 40):
            cycle(number)
        time.sleep(1)
        first = used()
        for number in range(40, 240):
            cycle(number)
        for _ in range(20):  # connections are closed by other threads, a moment later
            time.sleep(0.5)
            last = used()
            if last[0] <= first[0] and last[1] <= first[1]:
                break
        print(first, last, flush=True)
        assert last[0] <= first[0] + 2, "threads"
        assert last[1] <= first[1] + 2, os.popen(f"ls -l /proc/{os.getpid()}/fd").read()
        assert last[2] <= first[2] + 64, "MiB"
    """,
        within=240,
    )
    assert out


@pytest.mark.nightly
def test_memory_of_many_sends_through_one_transport(forked_child: Child) -> None:
    forked_child.run(
        """
        def resident():
            gc.collect()
            return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

        source, target = open_pair()
        def rounds(numbers):
            for number in numbers:
                state = {"w": torch.full((1 << 20,), float(number)), "o": {number}}
                send_and_receive(source, target, number, state)
                if number % 2:
                    source.disallow_checkpoint()
        rounds(range(1, 30))
        first = resident()
        rounds(range(30, 230))
        last = resident()
        print(first, last, flush=True)
        assert last <= first + 64
    """,
        within=240,
    )


def test_dropped_without_shutdown(forked_child: Child) -> None:
    """A transport without references is freed, and with it the state."""
    forked_child.run("""
        import weakref
        source, target = open_pair()
        state = {"w": torch.ones(1 << 20)}
        send_and_receive(source, target, 1, state)
        held, of = weakref.ref(state["w"]), weakref.ref(source)
        del source, target, state
        for _ in range(100):
            gc.collect()
            if held() is None and of() is None:
                break
            time.sleep(0.05)
        assert of() is None, "the transport"
        assert held() is None, "the tensor"
    """)


# ---------------------------------------------------------------------------------------------------------------------
# Two processes, and no torchft


def test_between_two_processes(forked_child: Child) -> None:
    tensorferry = pytest.importorskip("tensorferry")
    names = [
        "module.state_dict()",
        "tied weights, keep_vars",
        "dataclass",
        "registered node",
        "enum keys",
        "torch.Size",
    ]
    state = {name: leaves.CATALOGUE[name].value() for name in names}
    forked_child.start(f"""
        import leaves
        source = HTTPTransport(LONG, 2)
        state = {{name: leaves.CATALOGUE[name].value() for name in {names!r}}}
        source.send_checkpoint([1], 1, state, LONG)
        print(source.metadata(), flush=True)
        time.sleep(60)
    """)
    assert forked_child.process
    assert forked_child.process.stdout
    metadata = forked_child.process.stdout.readline().strip()
    target = tensorferry.HTTPTransport(timedelta(seconds=30), 2, trust_pickle=True)
    try:
        received = target.recv_checkpoint(0, metadata, 1, timedelta(seconds=30))
    finally:
        target.shutdown()
    assert_same_state(received, state)


def test_a_source_that_is_killed(forked_child: Child) -> None:
    """The receiver gets an error of tensorferry soon."""
    tensorferry = pytest.importorskip("tensorferry")
    process = forked_child.start("""
        source = HTTPTransport(LONG)
        print(source.metadata(), flush=True)
        time.sleep(60)
    """)
    assert process.stdout
    metadata = process.stdout.readline().strip()
    target = tensorferry.HTTPTransport(timedelta(seconds=30))
    try:
        threading.Timer(1, process.kill).start()
        started = time.monotonic()
        with pytest.raises(tensorferry.TensorferryError):
            target.recv_checkpoint(0, metadata, 1, timedelta(seconds=20))
        assert time.monotonic() - started < 21
    finally:
        target.shutdown()


@pytest.mark.nightly
def test_without_torchft(forked_child: Child) -> None:
    out = forked_child.run(
        """
        source, target = open_pair()
        send_and_receive(source, target, 1)
        made = HTTPTransport[dict[str, int]](LONG)
        made.disallow_checkpoint()
        made.shutdown()
        print("ok", flush=True)
        """,
        before="import sys; sys.modules['torchft'] = None",
    )
    assert "ok" in out
