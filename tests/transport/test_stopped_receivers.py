"""A receiver that is stopped in the middle of a receive: its source goes on, and it never gets a mixture."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from nights import mostly_at_night

pytestmark = [pytest.mark.process, pytest.mark.timeout(180), pytest.mark.beyond_torchft]

PATIENCE_S = 10.0
#: How long a source waits for one that takes no byte, with room for a busy machine.
BOUND_S = 8.0
WORDS = 16 << 20

RECEIVE = """
live = {{"w": torch.full(({words},), -1)}}
told = []
def progress(done, total):
    if done > total // 4 and not told:
        told.append(done)
        print("in the middle" if done < total // 2 else "too late", flush=True)
target = HTTPTransport(
    LONG, interface="127.0.0.1", same_host={same_host}, state_dict={state_dict}, progress=progress
)
try:
    state = target.recv_checkpoint(0, {metadata!r}, 1, timedelta(seconds=60))
    print("received", state["w"].unique().tolist(), flush=True)
except tensorferry.TensorferryError as error:
    print("failed", type(error).__name__, flush=True)
target.shutdown()
"""


@pytest.mark.parametrize(
    ("snapshot", "same_host", "in_place"),
    mostly_at_night(
        [("borrow", False, True), ("borrow", True, True), ("borrow", False, False), ("copy", False, True)], by_day=2
    ),
)
def test_a_stopped_receiver(
    open_transport: Any, forked_child: Any, snapshot: str, same_host: bool, in_place: bool
) -> None:
    weights = torch.ones(WORDS, dtype=torch.int64)
    # Slow, so that the receiver is stopped in the middle.
    source = open_transport(
        timeout=timedelta(seconds=PATIENCE_S), interface="127.0.0.1", snapshot=snapshot, max_bandwidth=30_000_000
    )
    source.send_checkpoint([1], 1, {"w": weights}, timedelta(seconds=PATIENCE_S))
    script = RECEIVE.format(
        words=WORDS, same_host=same_host, metadata=source.metadata(), state_dict="(lambda: live)" if in_place else None
    )
    process = forked_child.start(script)
    assert process.stdout.readline() == "in the middle\n"
    os.kill(process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        source.disallow_checkpoint()
        took = time.monotonic() - began
        # The trainer goes on, and publishes the next state in the same memory.
        weights.fill_(2)
        source.send_checkpoint([1], 2, {"w": weights}, timedelta(seconds=PATIENCE_S))
        assert took < BOUND_S
    finally:
        os.kill(process.pid, signal.SIGCONT)
    said = process.stdout.readline()
    assert said in ("received [1]\n", *(f"failed {kind}\n" for kind in ("SourceChanged", "WrongStep", "ConnectError")))
    assert process.wait(60) == 0
