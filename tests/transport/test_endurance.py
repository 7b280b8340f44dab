"""Many cycles, connections and descriptors leave nothing behind. Every test runs in a process of its own."""

from __future__ import annotations

import contextlib
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
import torch

import tensorferry

if TYPE_CHECKING:
    from child import Child

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.beyond_torchft,
]

USED = """
import errno
import resource

def used():
    gc.collect()
    pages = int(open("/proc/self/statm").read().split()[1])
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * 4096 >> 20

def settle(first, mib):
    '''Connections are closed by other threads, a moment later.'''
    for _ in range(40):
        last = used()
        if last[0] <= first[0] and last[1] <= first[1] and last[2] <= first[2] + mib:
            break
        time.sleep(0.25)
    print(first, last, flush=True)
    assert last[0] <= first[0], "threads"
    assert last[1] <= first[1], os.popen(f"ls -l /proc/{os.getpid()}/fd").read()
    assert last[2] <= first[2] + mib, "MiB"
"""


def test_two_thousand_transports_leave_nothing(forked_child: Child) -> None:
    """Each is used or not, and shut down or dropped; each kind has a secret, TLS or neither."""
    forked_child.run(
        USED
        + """
kinds = [{}, {"secret": "shared by these two alone"}, {"tls": True}, {"snapshot": "copy", "same_host": True}]

def cycle(number):
    source, target = open_pair(**kinds[number % 4])
    if number % 3:
        source.send_checkpoint([1], number, {"w": torch.full((50_000,), float(number))}, LONG)
    if number % 3 == 1:
        received = target.recv_checkpoint(0, source.metadata(), number, timedelta(seconds=30))
        assert received["w"][-1] == number
    if number % 5:
        source.shutdown(wait=number % 2 == 0)
        target.shutdown(wait=number % 4 == 0)

for number in range(120):
    cycle(number)
time.sleep(1)
first = used()
for number in range(1000):
    cycle(number)
settle(first, mib=32)
""",
        within=240,
    )


def test_three_thousand_connections_come_and_go_beside_good_receivers(forked_child: Child) -> None:
    forked_child.run(
        USED
        + """
import socket, urllib.parse
source, target = open_pair()
send_and_receive(source, target, 1)
url = urllib.parse.urlsplit(source.metadata())
pieces = [b"", b"GET /che", b"\\0" * 100, f"GET {url.path}1.safetensors HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n".encode()]
over = threading.Event()

def visit():
    for number in range(3000):
        with socket.create_connection(("127.0.0.1", url.port), timeout=30) as visitor:
            if number % 2:
                visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\\1\\0\\0\\0\\0\\0\\0\\0")
            visitor.sendall(pieces[number % 4])
    over.set()

first = used()
visitors = threading.Thread(target=visit)
visitors.start()
received = 0
while not over.is_set() or received < 4:
    target.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=30))
    received += 1
visitors.join()
send_and_receive(source, target, 2)
settle(first, mib=32)
""",
        within=200,
    )


def test_a_source_without_descriptors_trains_on_and_serves_when_there_are_some(forked_child: Child) -> None:
    """A lack of descriptors raises nothing into the trainer of the source."""
    process = forked_child.start(
        USED
        + """
source = HTTPTransport(LONG)
source.send_checkpoint([1], 1, STATE, LONG)
first = used()[:2]
held = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (held + 8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
# The crowd comes once it has read this.
print(source.metadata(), *first, flush=True)


def wait_until_none_is_left():
    while True:
        try:
            os.close(os.dup(0))
        except OSError as error:
            assert error.errno == errno.EMFILE, error
            return
        time.sleep(0.01)

step = 1
while (order := sys.stdin.readline().strip()) in ("step", "fill"):
    if order == "fill":
        wait_until_none_is_left()
        print("full", flush=True)
        continue
    source.disallow_checkpoint()
    step += 1
    source.send_checkpoint([1], step, {**STATE, "step": step}, LONG)
    print(step, flush=True)
until = time.monotonic() + 25
while (last := used()[:2]) != first and time.monotonic() < until:
    time.sleep(0.05)
print(*last, flush=True)
source.shutdown()
""",
        listens=True,
    )
    assert process.stdin
    assert process.stdout
    metadata, *first = process.stdout.readline().split()
    url = urlsplit(metadata)
    target = tensorferry.HTTPTransport(timedelta(seconds=60))

    def order(word: str) -> str:
        process.stdin.write(word + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    with contextlib.ExitStack() as crowd:
        for _ in range(40):
            crowd.enter_context(socket.create_connection((url.hostname, url.port), timeout=30))
        # On a busy machine this waits until the accept loop has had its turn.
        assert order("fill") == "full"
        for number in (2, 3, 4):
            assert order("step") == str(number)
        assert order("fill") == "full"
        # No connection of the crowd has made a request: the oldest ones make room for one that does.
        assert target.recv_checkpoint(0, metadata, 4, timedelta(seconds=20))["step"] == 4
        started = time.monotonic()
        assert order("step") == "5"
    state = target.recv_checkpoint(0, metadata, 5, timedelta(seconds=30))
    assert time.monotonic() - started < 30
    assert state["step"] == 5
    assert torch.equal(state["w"], torch.arange(1000.0))
    target.shutdown()
    last = forked_child.finish(within=60).split()
    # Both counts include the descriptor of the directory that is listed.
    assert [int(count) for count in last] == [int(count) for count in first]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_receiver_without_free_descriptors_reports_that_and_leaks_none(left: int, child: Child) -> None:
    """Without descriptors the error names them; with one or two, fewer connections transfer everything."""
    source = tensorferry.HTTPTransport(timedelta(seconds=60))
    weights = torch.arange(float(6 << 20))
    source.send_checkpoint([1], 1, {"w": weights}, timedelta(seconds=60))
    try:
        child.run(
            USED
            + f"""
metadata, left = {source.metadata()!r}, {left}
target = HTTPTransport(LONG, 4)
expected = torch.arange(float(6 << 20))
target.recv_checkpoint(0, metadata, 1, timedelta(seconds=30))
time.sleep(0.5)
first = used()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for _ in range(5):
    # Numbers below the limit are given out, the lowest free one first.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + left, hard))
    probes = []
    try:
        while True:
            probes.append(os.dup(0))
    except OSError:
        pass
    for probe in probes[:left]:
        os.close(probe)
    probes = probes[left:]
    try:
        received = target.recv_checkpoint(0, metadata, 1, timedelta(seconds=20))
        ended = "healed"
        assert torch.equal(received["w"], expected)
        del received
    except tensorferry.TensorferryError as error:
        ended = type(error).__name__ + ": " + str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for probe in probes:
        os.close(probe)
    print(ended, flush=True)
    if left:
        assert ended == "healed", ended
    else:
        assert ended.startswith("SystemRefused") and "descriptor" in ended, ended
send_and_receive(HTTPTransport(LONG), target, 2)
del target
settle(first, mib=64)
""",
            within=120,
        )
    finally:
        source.shutdown()
