"""Fork, signals, interpreter exit and leaks: a library with threads must not harm the process that uses it.

Every test runs in processes of its own.
"""

from __future__ import annotations

import signal
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from nights import mostly_at_night

if TYPE_CHECKING:
    from child import Child

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.beyond_torchft]

#: What a child of `fork` may do; each script ends with a receive in the parent.
FORKS = {
    "transports of the parent refuse": """
        def use_transports():
            for use, arguments in (
                (source.send_checkpoint, ([1], 2, STATE, LONG)),
                (target.recv_checkpoint, (0, source.metadata(), 1, timedelta(seconds=5))),
                (target.recv_checkpoint, (0, "http://127.0.0.1:9/checkpoint/", 1, timedelta(seconds=5))),
            ):
                try:
                    use(*arguments)
                except tensorferry.errors.ForkedProcess as error:
                    assert isinstance(error, RuntimeError)
                else:
                    raise AssertionError(f"{use} worked in a forked child")
            send_and_receive(*open_pair(), 1)
        assert exit_code(in_fork(use_transports)) == 0
    """,
    # Finalisers and exit handlers run in a child, too, but the threads of their objects do not exist there.
    "it cleans up and exits as any process": """
        from tensorferry._native import Remote
        remote = Remote.open([source.metadata()], 1, timeout=30.0)
        start_waiting(target, source)
        pid = os.fork()
        if pid == 0:
            # At descriptors that sockets had before, some of them.
            opened = [open("/proc/self/stat") for _ in range(200)]
            for close in (source.disallow_checkpoint, source.shutdown, lambda: target.shutdown(wait=False)):
                try:
                    close()
                except tensorferry.errors.ForkedProcess:
                    pass
            received["w"] += 1
            del source, target, received, remote
            gc.collect()
            sys.exit(7 if all(file.read() for file in opened) else 8)
        assert exit_code(pid) == 7
        target = HTTPTransport(LONG, 2)
    """,
    "in the middle of a transfer": """
        source.send_checkpoint([1], 1, {"w": torch.ones(64 << 20, dtype=torch.uint8)}, LONG)
        reader = stuck_reader(source)
        assert exit_code(in_fork(lambda: None)) == 0
    """,
    # A data loader's workers end by os._exit or by a signal.
    "workers of a data loader": """
        import torch.utils.data
        for step in range(2, 5):
            loader = torch.utils.data.DataLoader(
                list(range(32)), batch_size=4, num_workers=2, multiprocessing_context="fork"
            )
            assert sum(int(batch.sum()) for batch in loader) == sum(range(32))
            send_and_receive(source, target, step)
    """,
    "while another thread of the parent pickles, with the collector paused, and holds locks": """
        from tensorferry import _gc
        from tensorferry.memory import host_pool
        from tensorferry.storage import folder_store
        inside, go_on = threading.Event(), threading.Event()
        locks = [folder_store._committing, host_pool._warning, _gc._lock]

        class Slow:
            def __reduce__(self):
                with locks[0].held(), locks[1].held(), locks[2].held():
                    inside.set()
                    go_on.wait(30)
                return dict, ()

        thread = threading.Thread(target=source.send_checkpoint, args=([1], 1, {"slow": Slow()}, LONG))
        thread.start()
        assert inside.wait(30)
        assert not gc.isenabled()

        def use_both():
            signal.alarm(30)
            inner = [locks[0].reentrant, *(lock._lock for lock in locks[1:])]
            assert all(lock.acquire(timeout=5) for lock in inner)
            for lock in inner:
                lock.release()
            assert gc.isenabled()
            with _gc.gc_paused():
                assert not gc.isenabled()
            assert gc.isenabled()
            send_and_receive(*open_pair(), 1)

        assert exit_code(in_fork(use_both)) == 0
        go_on.set()
        thread.join()
        assert gc.isenabled()
    """,
}


@pytest.mark.parametrize("what", FORKS)
def test_a_forked_child(what: str, forked_child: Child) -> None:
    out = forked_child.run(
        "source, target = open_pair()\nreceived = send_and_receive(source, target, 1)\n"
        + textwrap.dedent(FORKS[what])
        + "\nsend_and_receive(source, target, 9)\nprint('parent goes on', flush=True)\nos._exit(0)\n"
    )
    assert "parent goes on" in out


def test_a_child_has_no_socket_of_its_parent(forked_child: Child) -> None:
    """The child has no listening, accepted or connected socket, network or local, even during a receive.

    So peers notice the end of a trainer whose child lives on, as a DataLoader's worker may.
    """
    out = forked_child.run("""
        import socket, subprocess

        def sockets(pid):
            folder = f"/proc/{pid}/fd"
            found = []
            for name in os.listdir(folder):
                try:
                    found.append(os.readlink(f"{folder}/{name}"))
                except FileNotFoundError:
                    pass
            return {link for link in found if link.startswith("socket:")}

        listener = socket.create_server(("127.0.0.1", 0))
        before = sockets(os.getpid())
        source, target = open_pair(network=Network(max_bandwidth=4 << 20))
        away = HTTPTransport(LONG, 2, network=Network(same_host=False))
        source.send_checkpoint([1], 1, {"w": torch.ones(64 << 20, dtype=torch.uint8)}, LONG)
        stock = f"http://127.0.0.1:{listener.getsockname()[1]}/checkpoint/"
        for transport, metadata in ((target, source.metadata()), (away, source.metadata()), (away, stock)):
            threading.Thread(target=transport.recv_checkpoint, args=(0, metadata, 1, LONG), daemon=True).start()
        # Of the network three that listen, of this machine two, both ends of a receive each, and that of the stock one.
        end = time.monotonic() + 30
        while True:
            made = sockets(os.getpid()) - before
            with open("/proc/net/unix") as rows:
                local = {f"socket:[{row.split()[6]}]" for row in rows} & made
            if len(local) >= 4 and len(made - local) >= 6:
                break
            assert time.monotonic() < end, (made, local)
            time.sleep(0.05)
        there, here = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(here, b"!")
            time.sleep(60)
            os._exit(0)
        # The parent may return from fork first, and the child closes what it inherits before it returns from it.
        assert os.read(there, 1)
        kept = made & sockets(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print("kept", len(kept), kept, flush=True)
        assert not kept, kept
        # Whatever is executed instead of this program has none of them either.
        listed = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False).stdout
        assert not any(link in listed for link in made), listed
        os._exit(0)
    """)
    assert "kept" in out


#: What a transport is at when its process ends without a shutdown.
BUSY = {
    "waits for a checkpoint": """
        source.disallow_checkpoint()
        start_waiting(target, source)
    """,
    "serves a reader that is stuck": """
        source.send_checkpoint([1], 1, {"w": torch.ones(64 << 20, dtype=torch.uint8)}, LONG)
        reader = stuck_reader(source)
    """,
    # The threads that serve shared memory outlive the runtime and its timers by a moment.
    "sends slowly through shared memory": """
        slow = HTTPTransport(LONG, network=Network(max_bandwidth=1 << 20))
        slow.send_checkpoint([1], 99, {"w": torch.ones(64 << 20, dtype=torch.uint8)}, LONG)
        start_waiting(target, slow)
        time.sleep(1)
    """,
    "is closed at exit": """
        import atexit
        def late():
            try:
                for one in (source, target):
                    one.disallow_checkpoint()
                    one.shutdown()
                    one.shutdown(wait=False)
            except BaseException:
                os._exit(3)
        atexit.register(late)
    """,
}


@pytest.mark.parametrize(
    "way",
    mostly_at_night(
        ["pass", "os._exit(0)", "raise ValueError('of the trainer')", "os.kill(os.getpid(), signal.SIGTERM)"]
    ),
)
@pytest.mark.parametrize("busy", BUSY)
def test_exit_is_prompt_and_silent(way: str, busy: str, forked_child: Child) -> None:
    script = "source, target = open_pair()\nsend_and_receive(source, target, 1)\n"
    script += textwrap.dedent(BUSY[busy]) + f"\nprint('ready', flush=True)\n{way}\n"
    forked_child.start(script, to_the_end=True)
    forked_child.wait_for("ready")
    started = time.monotonic()
    code = -signal.SIGTERM if "SIGTERM" in way else int("raise" in way)
    forked_child.finish(within=30, returncode=code)
    assert time.monotonic() - started < 15


#: What Ctrl-C ends, and the seconds that this may take.
INTERRUPTED = {
    "a receive before the first send": (5, "target.recv_checkpoint(0, source.metadata(), 1, LONG)"),
    "a receive whose source is silent": (5, "target.recv_checkpoint(0, silent, 1, LONG)"),
    # The readers are then cut off, so that the state may be changed, as after every withdrawal.
    "the drain of a withdrawal": (2, "source.disallow_checkpoint()"),
}


@pytest.mark.parametrize("what", INTERRUPTED)
def test_ctrl_c_ends_what_waits(what: str, forked_child: Child) -> None:
    seconds, call = INTERRUPTED[what]
    forked_child.start(f"""
        import socket, urllib.request
        source, target = open_pair()
        listener = socket.create_server(("127.0.0.1", 0))
        silent = f"http://127.0.0.1:{{listener.getsockname()[1]}}/{{'0' * 32}}/checkpoint/"
        if "disallow" in {call!r}:
            source.send_checkpoint([1], 1, {{"w": torch.ones(64 << 20, dtype=torch.uint8)}}, LONG)
            reader = stuck_reader(source)
        print("ready", flush=True)
        try:
            {call}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        with urllib.request.urlopen(source.metrics_url(), timeout=30) as metrics:
            assert b"tensorferry_transfers 0" in metrics.read()
        send_and_receive(source, target, 2)
        print("goes on", flush=True)
    """)
    assert forked_child.interrupt() < seconds
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
        source = HTTPTransport(LONG, network=Network(max_bandwidth=16 << 20))
        network = Network(same_host={same_host})
        target = HTTPTransport(LONG, network=network, state_dict=lambda: {{"w": live}}, progress=progress)
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


def test_signals_that_are_handled_end_no_receive(forked_child: Child) -> None:
    """Nor does Ctrl-C in the main thread end that of another one, as a manager has it."""
    process = forked_child.start("""
        heard, ended = [], []
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
        source, target = open_pair()
        def receive_in_the_main_thread():
            return target.recv_checkpoint(0, source.metadata(), 1, LONG)
        def receive():
            ended.append(target.recv_checkpoint(0, source.metadata(), 1, LONG))
        other = threading.Thread(target=receive)
        other.start()
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        def send():
            while len(heard) < 2:
                time.sleep(0.05)
            source.send_checkpoint([1], 1, STATE, LONG)
        threading.Thread(target=send).start()
        ended.append(receive_in_the_main_thread())
        other.join(20)
        assert [torch.equal(one["w"], STATE["w"]) for one in ended] == [True, True]
        print("received", flush=True)
    """)
    forked_child.interrupt()
    time.sleep(0.5)
    for _ in range(5):
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    assert "received" in forked_child.finish(within=30)
