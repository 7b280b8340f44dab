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
calls = []
source, target = HTTPTransport(LONG, 2, progress=lambda *_: calls and call(calls.pop())), HTTPTransport(LONG, 2)
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
SCRIPTS = {
    "in the middle of a send": """
for way in (by_signal, Dies, call):
    for name in list(CALLS)[:-1]:
        told.clear()
        source.send_checkpoint([1], 1, STATE | {"hooked": Hooked(way, name)}, LONG)
        if name == "send_checkpoint":
            [(kind, text)] = told
            assert kind == "Reentered" and "signal handler" in text, told
        else:
            assert told == ["done"], (name, told)
        # The interrupted send is what is served, and the next one works as ever.
        assert target.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=30))["hooked"] == set()
        send_and_receive(source, target, 5)
try:
    source.send_checkpoint([1], 1, STATE | {"hooked": Hooked(call, "shutdown")}, LONG)
except tensorferry.errors.TransportClosed:
    pass
else:
    raise AssertionError("a transport that is shut down sends")
""",
    "in the progress callback of a receive": """
for name in CALLS:
    told.clear()
    calls.append(name)
    got = source.recv_checkpoint(0, target.metadata(), 7, timedelta(seconds=30))
    assert torch.equal(got["w"], STATE["w"])
    assert told == ["done"], (name, told)
""",
    # A timer interrupts sends and receives wherever they are, and the handler calls whatever there is.
    "at any moment": """
import random
del CALLS["shutdown"]
BIG = STATE | {f"p{i}": torch.ones(50) for i in range(200)} | {"objects": [{1, i} for i in range(50)]}
CALLS["of_another"] = lambda: target.send_checkpoint([1], 7, BIG, LONG)
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
assert gc.isenabled()
kinds = {one if one == "done" else one[0] for one in told}
assert "done" in kinds and kinds <= {"done", "Reentered"}, kinds
send_and_receive(source, target, 9)
""",
    # `install` logs what it replaces while it holds its lock.
    "in a handler of the log": """
import logging
CALLS["install"] = lambda: tensorferry.install()
class Handler(logging.Handler):
    def emit(self, record):
        call("install")
logger = logging.getLogger("tensorferry")
logger.setLevel(logging.INFO)
logger.addHandler(Handler())
with tensorferry.install():
    pass
assert told and all(kind == "Reentered" and "in the middle" in text for kind, text in told), told
""",
}


@pytest.mark.parametrize("when", SCRIPTS)
def test_no_call_hangs(when: str, forked_child: Child) -> None:
    forked_child.run(SETUP + SCRIPTS[when])
