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

target = HTTPTransport(LONG, 4, **OPTIONS)
before = resident()
state = target.recv_checkpoint(0, METADATA, 1, LONG)
arrived = resident() - before
KEEP
gc.collect()
print(arrived, resident() - before, flush=True)
assert torch.equal(CHECK)
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


@pytest.fixture
def measure(open_transport: Callable[..., Any], forked_child: Child) -> Callable[..., tuple[float, float]]:
    """Returns the MiB that a receive of ``state`` takes, and how many of them remain after ``keep`` has run."""

    def one(state: Any, keep: str, check: str, options: str = "{}") -> tuple[float, float]:
        source = open_transport()
        source.send_checkpoint([1], 1, state, TIMEOUT)
        script = RECEIVE.replace("OPTIONS", options).replace("KEEP", keep).replace("CHECK", check)
        out = forked_child.run(script.replace("METADATA", repr(source.metadata())))
        arrived, left = map(float, out.split())
        return arrived, left

    return one


def test_counters_of_an_optimizer_hold_themselves_and_not_the_parameters(
    measure: Callable[..., tuple[float, float]],
) -> None:
    # As load_state_dict does on a device: all but the counters is copied, and the counters are used as they are.
    keep = "state = {i: of['step'] for i, of in state['optimizer'].items()}; of = None"
    arrived, left = measure(optimizer_state(), keep, "state[3], torch.tensor(3.0)")
    assert arrived > 90
    assert left < 8, f"{left} of {arrived} MiB are left for 64 bytes"


def test_a_small_tensor_holds_a_small_part_of_all_small_ones(measure: Callable[..., tuple[float, float]]) -> None:
    state = {str(i): torch.full((1000,), float(i)) for i in range(16_000)}
    arrived, left = measure(state, "state = state['777']", "state, torch.full((1000,), 777.0)")
    assert arrived > 60
    # Meanwhile Python objects are made and freed.
    assert left < 24, f"{left} of {arrived} MiB are left for 4 KB"


def test_memory_that_is_kept_for_the_next_receive_is_not_held_by_counters(
    measure: Callable[..., tuple[float, float]],
) -> None:
    # The counters of the first receive are held, and the second one still reuses the memory of the first.
    keep = """
state = {i: of['step'] for i, of in state['optimizer'].items()}
of = None
second = target.recv_checkpoint(0, METADATA, 1, LONG)
"""
    options = "{'reuse_bytes': 256 << 20}"
    source_state = optimizer_state()
    arrived, left = measure(source_state, keep, "state[3], second['optimizer'][3]['step']", options)
    assert arrived > 90
    assert left < arrived + 16, f"{left} MiB instead of {arrived}"
