"""A forked child keeps nothing of its parent's transports that a peer could notice.

Every test runs in processes of its own. A child here stays alive for as long as the test does, like a DataLoader's
worker that has not noticed that its parent is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import urllib.parse
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from nights import mostly_at_night

if TYPE_CHECKING:
    from child import Child

tensorferry = pytest.importorskip("tensorferry")

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.beyond_torchft]

FORKED = """
    def forked():
        there, here = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(here, b"!")
            # Ends with the test: the parent's own end is not noticed.
            sys.stdin.close()
            time.sleep(60)
            os._exit(0)
        # The parent may return from fork first, and the child closes what it inherits before it returns from it.
        assert os.read(there, 1)
        return pid
"""


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def next_line(forked_child: Child) -> str:
    assert forked_child.process
    assert forked_child.process.stdout
    return forked_child.process.stdout.readline().strip()


@pytest.mark.parametrize("same_host", mostly_at_night([False, True]))
def test_a_receiver_notices_the_end_of_a_source_that_has_a_child(same_host: bool, forked_child: Child) -> None:
    forked_child.start(
        FORKED
        + """
    source = HTTPTransport(LONG, max_bandwidth=4 << 20)
    source.send_checkpoint([1], 1, {"w": torch.ones(128 << 20, dtype=torch.uint8)}, LONG)
    print(source.metadata(), flush=True)
    sys.stdin.readline()
    print(forked(), flush=True)
    time.sleep(60)
    """,
        listens=True,
    )
    assert forked_child.process
    metadata = next_line(forked_child)
    ended: list[Any] = []
    target = tensorferry.HTTPTransport(timedelta(seconds=60), same_host=same_host)

    def receive() -> None:
        try:
            target.recv_checkpoint(0, metadata, 1, timedelta(seconds=60))
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(1)
    forked_child.process.stdin.write("\n")
    forked_child.process.stdin.flush()
    pid = int(next_line(forked_child))
    try:
        time.sleep(0.5)
        forked_child.process.kill()
        forked_child.process.wait()
        killed = time.monotonic()
        url = urllib.parse.urlsplit(metadata)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((url.hostname, url.port), timeout=10)
        thread.join(60)
        assert time.monotonic() - killed < 10, "the receiver has not noticed the end of its source"
        assert isinstance(ended[0], tensorferry.TensorferryError)
    finally:
        end(pid)
        thread.join(60)
        target.shutdown()


def test_a_child_has_no_socket_of_its_parent(forked_child: Child) -> None:
    """The child has no listening, accepted or connected socket, network or local, even during a receive."""
    out = forked_child.run(
        FORKED
        + """
    def sockets(pid):
        folder = f"/proc/{pid}/fd"
        found = []
        for name in os.listdir(folder):
            try:
                found.append(os.readlink(f"{folder}/{name}"))
            except FileNotFoundError:
                pass
        return {link for link in found if link.startswith("socket:")}

    before = sockets(os.getpid())
    source, target = open_pair(max_bandwidth=4 << 20)
    away = HTTPTransport(LONG, 2, same_host=False)
    source.send_checkpoint([1], 1, {"w": torch.ones(64 << 20, dtype=torch.uint8)}, LONG)
    for transport in (target, away):
        threading.Thread(target=transport.recv_checkpoint, args=(0, source.metadata(), 1, LONG), daemon=True).start()
    # Of the network three that listen, of this machine two, and both ends of a receive each.
    end = time.monotonic() + 30
    while True:
        made = sockets(os.getpid()) - before
        with open("/proc/net/unix") as rows:
            local = {f"socket:[{row.split()[6]}]" for row in rows} & made
        if len(local) >= 4 and len(made - local) >= 5:
            break
        assert time.monotonic() < end, (made, local)
        time.sleep(0.05)
    pid = forked()
    kept = made & sockets(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print("kept", len(kept), kept, flush=True)
    assert not kept, kept
    # Whatever is executed instead of this program has none of them either.
    import subprocess
    listed = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False).stdout
    assert not any(link in listed for link in made), listed
    os._exit(0)
    """
    )
    assert "kept" in out


def test_a_child_may_close_and_collect_what_it_inherits(forked_child: Child) -> None:
    """Files that the child opens itself keep their descriptors meanwhile."""
    forked_child.run("""
        source, target = open_pair()
        send_and_receive(source, target, 1)
        # At descriptors that sockets had before, some of them.
        kept = [open("/proc/self/stat") for _ in range(200)]
        from tensorferry._native import Remote
        remote = Remote.open([source.metadata()], 1, timeout=30.0)

        def close_and_collect():
            global source, target, remote
            for file in kept:
                assert file.read(), "a file that is not the transport's was closed"
            opened = [open("/proc/self/stat") for _ in range(200)]
            del source, target, remote
            gc.collect()
            for file in opened:
                assert file.read()
            # A transport of its own, and a receive with it.
            send_and_receive(*open_pair(), 1)

        assert exit_code(in_fork(close_and_collect)) == 0
        send_and_receive(source, target, 2)
    """)


def test_a_child_that_was_forked_in_the_middle_of_a_send(forked_child: Child) -> None:
    """The child's garbage collector runs, its parent's transport raises ForkedProcess, and a new transport works."""
    out = forked_child.run("""
        from tensorferry import _gc
        inside, go_on = threading.Event(), threading.Event()

        class Slow:
            def __reduce__(self):
                inside.set()
                go_on.wait(30)
                return dict, ()

        source, target = open_pair(trust_pickle=True)
        thread = threading.Thread(target=source.send_checkpoint, args=([1], 1, {"slow": Slow()}, LONG))
        thread.start()
        assert inside.wait(30)
        paused = not gc.isenabled()

        def use_both():
            assert gc.isenabled()
            try:
                source.send_checkpoint([1], 2, STATE, LONG)
            except tensorferry.ForkedProcess:
                pass
            else:
                raise AssertionError("the parent's transport works in the child")
            with _gc.gc_paused():
                assert not gc.isenabled()
            assert gc.isenabled()
            send_and_receive(*open_pair(), 1)

        pid = in_fork(use_both)
        for _ in range(300):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            time.sleep(0.1)
        else:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("the child hangs")
        assert os.waitstatus_to_exitcode(status) == 0
        go_on.set()
        thread.join()
        assert gc.isenabled()
        print("paused:", paused, flush=True)
    """)
    assert "paused: True" in out


def test_a_child_that_is_forked_while_the_collector_is_paused(forked_child: Child) -> None:
    forked_child.run("""
        from tensorferry import _gc
        with _gc.gc_paused():
            pid = os.fork()
        assert gc.isenabled()
        with _gc.gc_paused():
            assert not gc.isenabled()
        assert gc.isenabled()
        if pid == 0:
            os._exit(3)
        assert exit_code(pid) == 3
    """)


def test_a_child_is_not_held_up_by_a_lock_of_its_parents_threads(forked_child: Child) -> None:
    forked_child.run("""
        from tensorferry import _gc
        from tensorferry.memory import host_pool
        from tensorferry.storage import folder_lock
        locks = [folder_lock._committing, host_pool._warning, _gc._lock]
        held, go_on = threading.Event(), threading.Event()

        def hold():
            with locks[0].held(), locks[1].held(), locks[2].held():
                held.set()
                go_on.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(30)
        pid = os.fork()
        if pid == 0:
            os._exit(3 if all(lock._lock.acquire(timeout=5) for lock in locks) else 4)
        go_on.set()
        thread.join()
        assert exit_code(pid) == 3
    """)


def test_a_child_keeps_no_connection_to_a_stock_source(forked_child: Child) -> None:
    forked_child.run("""
        import socket
        listener = socket.create_server(("127.0.0.1", 0))
        target = HTTPTransport(LONG)
        metadata = f"http://127.0.0.1:{listener.getsockname()[1]}/checkpoint/"

        def receive():
            try:
                target.recv_checkpoint(0, metadata, 1, timedelta(seconds=2))
            except tensorferry.FetchTimeout:
                pass

        thread = threading.Thread(target=receive)
        thread.start()
        connection, _ = listener.accept()
        connection.settimeout(10)
        assert connection.recv(4096)
        pid = os.fork()
        if pid == 0:
            connection.close()
            time.sleep(60)
            os._exit(0)
        try:
            thread.join()
            assert connection.recv(4096) == b"", "the source does not notice that the receiver has gone"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    """)
