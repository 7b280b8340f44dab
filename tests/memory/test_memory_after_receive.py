"""How much memory of a receive remains when most of its tensors are freed: resident bytes of a child process."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from child import Child

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(200), pytest.mark.beyond_torchft]

TIMEOUT = timedelta(seconds=30)
MIB = 1 << 20

RECEIVE = """
def resident():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) / 1024

target = HTTPTransport(LONG, 4, reuse_bytes=REUSED)
before = resident()
state = target.recv_checkpoint(0, METADATA, 1, LONG)
arrived = resident() - before
# As load_state_dict does on a device: all but the counters is copied, and the counters are used as they are.
state = {i: of["step"] for i, of in state["optimizer"].items()}
of = None
second = target.recv_checkpoint(0, METADATA, 1, LONG) if REUSED else None
gc.collect()
print(arrived, resident() - before, flush=True)
assert torch.equal(state[3], torch.tensor(3.0))
"""


def optimizer_state() -> dict[str, Any]:
    """Returns parameters and Adam's state for them, 96 MiB in 48 tensors, with 16 counters of 4 bytes."""
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    for i in range(16):
        state["model"][f"w{i}"] = torch.full((MIB // 2 + i,), float(i))
        state["model"][f"b{i}"] = torch.full((100,), float(i))
        state["optimizer"][i] = {
            "step": torch.tensor(float(i)),
            "avg": torch.ones(MIB // 2),
            "sq": torch.ones(1000, 500),
        }
    return state


@pytest.mark.parametrize("reused", [0, 256 * MIB])
def test_counters_of_an_optimizer_hold_themselves_and_not_the_parameters(
    reused: int, open_transport: Callable[..., Any], forked_child: Child
) -> None:
    """While they are held, the next receive reuses the memory of the first."""
    source = open_transport()
    source.send_checkpoint([1], 1, optimizer_state(), TIMEOUT)
    script = RECEIVE.replace("REUSED", str(reused)).replace("METADATA", repr(source.metadata()))
    arrived, left = map(float, forked_child.run(script).split())
    assert arrived > 90
    assert left < (arrived + 16 if reused else 8), f"{left} of {arrived} MiB are left"
