"""Many cycles and a lack of descriptors leave nothing behind. Every test runs in a process of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

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
import resource

def used():
    gc.collect()
    pages = int(open("/proc/self/statm").read().split()[1])
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * 4096 >> 20

def settle(first, mib):
    '''Connections are closed by other threads, a moment later.'''
    for _ in range(100):
        last = used()
        if last[0] <= first[0] and last[1] <= first[1] and last[2] <= first[2] + mib:
            break
        time.sleep(0.25)
    print(first, last, flush=True)
    assert last[0] <= first[0], "threads"
    assert last[1] <= first[1], os.popen(f"ls -l /proc/{os.getpid()}/fd").read()
    assert last[2] <= first[2] + mib, "MiB"

def limit(left):
    '''Leaves so many descriptors; returns what gives them back.'''
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
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
    def give_back():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for probe in probes[left:]:
            os.close(probe)
    return give_back
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
        source.send_checkpoint([1], number, {"w": torch.full((50_000,), float(number)), "o": {number}}, LONG)
    if number % 3 == 1:
        received = target.recv_checkpoint(0, source.metadata(), number, timedelta(seconds=30))
        assert received["w"][-1] == number
    if number % 5:
        source.shutdown(wait=number % 2 == 0)
        target.shutdown(wait=number % 4 == 0)

for number in range(120):
    cycle(number)
# Nor do many sends through one.
source, target = open_pair()
def rounds(numbers):
    for number in numbers:
        send_and_receive(source, target, number, {"w": torch.full((1 << 20,), float(number)), "o": {number}})
        if number % 2:
            source.disallow_checkpoint()
rounds(range(1, 30))
time.sleep(1)
first = used()
for number in range(1000):
    cycle(number)
rounds(range(30, 230))
settle(first, mib=64)
""",
        within=240,
    )


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_receiver_without_free_descriptors_reports_that_and_leaks_none(left: int, child: Child) -> None:
    """Without descriptors the error names them; with one or two, fewer connections transfer everything."""
    source = tensorferry.HTTPTransport(timedelta(seconds=60))
    source.send_checkpoint([1], 1, {"w": torch.arange(float(6 << 20))}, timedelta(seconds=60))
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
for _ in range(5):
    give_back = limit(left)
    try:
        received = target.recv_checkpoint(0, metadata, 1, timedelta(seconds=20))
        ended = "healed"
        assert torch.equal(received["w"], expected)
        del received
    except tensorferry.TensorferryError as error:
        ended = type(error).__name__ + ": " + str(error)
    give_back()
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
