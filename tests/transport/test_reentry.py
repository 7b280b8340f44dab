"""Public calls in the middle of a call of the same thread: from signal handlers, ``__del__`` and callbacks.

Every test runs in a process of its own, which is killed if it hangs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from child import Child

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.beyond_torchft]

SETUP = """
source, target = open_pair()
target.send_checkpoint([1], 7, STATE, LONG)
CALLS = {
    "send_checkpoint": lambda: source.send_checkpoint([1], 2, STATE, LONG),
    "recv_checkpoint": lambda: source.recv_checkpoint(0, target.metadata(), 7, timedelta(seconds=30)),
    "disallow_checkpoint": source.disallow_checkpoint,
    "allow_checkpoint": lambda: source.allow_checkpoint(1),
    "metadata": source.metadata,
    "status_url": source.status_url,
    "shutdown": source.shutdown,
}
told = []

def call(name):
    try:
        CALLS[name]()
    except Exception as error:
        told.append((type(error).__name__, str(error)))
    else:
        told.append("done")

class Dies:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        call(self.name)

def by_signal(name):
    signal.signal(signal.SIGUSR1, lambda *_: call(name))
    signal.raise_signal(signal.SIGUSR1)

class Hooked:
    '''Makes a call once, while it is being pickled.'''
    def __init__(self, way, name):
        self.way, self.name = way, name
    def __reduce__(self):
        if self.name is not None:
            name, self.name = self.name, None
            self.way(name)
        return set, ()
"""


@pytest.mark.parametrize("way", ["by_signal", "Dies", "call"])
def test_no_call_in_the_middle_of_a_send_hangs(forked_child: Child, way: str) -> None:
    forked_child.run(
        SETUP
        + f"""
for name in CALLS:
    told.clear()
    state = STATE | {{"hooked": Hooked({way}, name)}}
    if name == "shutdown":
        try:
            source.send_checkpoint([1], 1, state, LONG)
        except tensorferry.TransportClosed:
            pass
        else:
            raise AssertionError("a transport that is shut down sends")
        assert told == ["done"], told
        continue
    source.send_checkpoint([1], 1, state, LONG)
    if name == "send_checkpoint":
        [(kind, text)] = told
        assert kind == "InvalidArgument" and "signal handler" in text, told
    else:
        assert told == ["done"], (name, told)
    # The interrupted send is what is served, and the next one works as ever.
    assert target.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=30))["hooked"] == set()
    send_and_receive(source, target, 5)
"""
    )


def test_no_call_in_the_progress_callback_of_a_receive_hangs(forked_child: Child) -> None:
    forked_child.run(
        SETUP
        + """
class Once:
    name = None
    def __call__(self, received, total):
        name, self.name = self.name, None
        if name is not None:
            call(name)

once = Once()
source = HTTPTransport(LONG, 2, progress=once)
other = HTTPTransport(LONG, 2)
for name in CALLS:
    told.clear()
    other.send_checkpoint([1], 7, STATE, LONG)
    once.name = name
    got = source.recv_checkpoint(0, other.metadata(), 7, timedelta(seconds=30))
    assert torch.equal(got["w"], STATE["w"])
    assert told == ["done"], (name, told)
"""
    )


def test_calls_at_any_moment_end_or_are_refused(forked_child: Child) -> None:
    """A timer interrupts sends and receives wherever they are, and the handler calls whatever there is."""
    out = forked_child.run(
        SETUP
        + """
import collections, random
del CALLS["shutdown"]
CALLS["of_another"] = lambda: target.send_checkpoint([1], 7, BIG, LONG)
BIG = STATE | {f"p{i}": torch.ones(50) for i in range(200)} | {"objects": [{1, i} for i in range(50)]}
CALLS["send_checkpoint"] = lambda: source.send_checkpoint([1], 2, BIG, LONG)
pick = random.Random(5)
depth = 0
def handle(*_):
    global depth
    if depth < 2:
        depth += 1
        call(pick.choice(list(CALLS)))
        depth -= 1
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.001)
rounds = 0
while rounds < 10 or len(told) < 100:
    for name in ("send_checkpoint", "disallow_checkpoint", "recv_checkpoint", "of_another"):
        CALLS[name]()
    rounds += 1
signal.setitimer(signal.ITIMER_REAL, 0, 0)
import gc
assert gc.isenabled()
kinds = collections.Counter(one if one == "done" else one[0] for one in told)
assert set(kinds) <= {"done", "InvalidArgument"}, kinds
send_and_receive(source, target, 9)
print(kinds)
"""
    )
    assert "done" in out


def test_no_call_in_a_handler_of_the_log_hangs(forked_child: Child) -> None:
    """``install`` logs what it replaces while it holds its lock."""
    forked_child.run(
        SETUP
        + """
import logging
class Handler(logging.Handler):
    def emit(self, record):
        try:
            tensorferry.install()
        except Exception as error:
            told.append((type(error).__name__, str(error)))
logger = logging.getLogger("tensorferry")
logger.setLevel(logging.INFO)
logger.addHandler(Handler())
with tensorferry.install():
    pass
assert told and all(kind == "InvalidArgument" and "in the middle" in text for kind, text in told), told
"""
    )


def test_a_timeout_that_is_not_given_is_the_transports_own(forked_child: Child) -> None:
    forked_child.run(
        """
        source, target = HTTPTransport(LONG), HTTPTransport(timedelta(seconds=1))
        source.send_checkpoint([1], 1, STATE)
        assert torch.equal(target.recv_checkpoint(0, source.metadata(), 1, timeout=None)["w"], STATE["w"])
        assert torch.equal(target.recv_checkpoint(0, source.metadata(), 1)["w"], STATE["w"])
        source.disallow_checkpoint()
        try:
            target.recv_checkpoint(0, source.metadata(), 1, None)
        except tensorferry.FetchTimeout as error:
            assert "was given 1.000 s" in str(error), error
        else:
            raise AssertionError("nothing is served")
        """
    )
