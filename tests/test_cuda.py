"""The paths of a real GPU. What does not need one is tried with a stand-in in test_accelerator_send and _receive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from equality import assert_same_state
from exchange import TIMEOUT, in_background, receive, until
from tensorferry.locked import locked

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.beyond_torchft,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none here"),
]

MIB = 1 << 20
#: Some hundred milliseconds of nothing.
LONG_CYCLES = 500_000_000


def weights(device: str, value: float = 1.0) -> dict[str, torch.Tensor]:
    """Some 300 MiB: several batches and several waves."""
    large = {f"w{i}": torch.full((30 * MIB // 4,), value + i, device=device) for i in range(10)}
    small = {f"s{i}": torch.full((i + 1,), value, device=device, dtype=torch.bfloat16) for i in range(100)}
    return {**large, **small}


def on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


@pytest.mark.parametrize("same_host", [False, True])
@pytest.mark.parametrize("own_stream", [False, True])
def test_what_is_queued_is_sent_and_what_comes_later_is_not(
    own_stream: bool, same_host: bool, open_transport: Callable[..., Any]
) -> None:
    source, target = open_transport(same_host=same_host), open_transport(same_host=same_host)
    state = weights("cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        for tensor in state.values():
            tensor.add_(1)
        with in_background(receive, target, source, 1) as received:
            source.send_checkpoint([1], 1, state, TIMEOUT)
            for tensor in state.values():
                tensor.fill_(-1)
            assert_same_state(received.result(30), weights("cpu", 2.0))


@pytest.mark.parametrize("same_host", [False, True])
def test_received_where_the_live_tensors_lie(same_host: bool, open_transport: Callable[..., Any]) -> None:
    live = weights("cuda", 0.0)
    where = {name: tensor.data_ptr() for name, tensor in live.items()}
    source = open_transport(same_host=same_host)
    target = open_transport(state_dict=lambda: live, same_host=same_host)
    source.send_checkpoint([1], 1, weights("cuda", 5.0), TIMEOUT)
    # The trainer's stream still writes the old values.
    torch.cuda._sleep(LONG_CYCLES)
    for tensor in live.values():
        tensor.fill_(-1)
    received = receive(target, source, 1)
    for name, tensor in live.items():
        assert received[name] is tensor
        assert tensor.data_ptr() == where[name]
    assert_same_state(on_host(live), weights("cpu", 5.0))


def test_staging_memory_is_locked_and_kept(open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(), open_transport()
    places = set()
    for step in (1, 2, 3):
        source.send_checkpoint([1], step, weights("cuda", step), TIMEOUT)
        assert_same_state(receive(target, source, step), weights("cpu", step))
        source.disallow_checkpoint()
        until(lambda: len(source._stager._pinned._free) == 1, "the memory has come back")
        (memory,) = source._stager._pinned._free
        assert memory.is_pinned()
        places.add(memory.data_ptr())
    assert len(places) == 1


def test_locked_memory_is_what_cuda_takes_for_such(open_transport: Callable[..., Any]) -> None:
    """To the byte, and none of it from torch's own allocator, which rounds up."""
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    memory = locked(5 * MIB + 123)
    assert memory.is_pinned()
    assert memory[MIB:].is_pinned()
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
    there = torch.arange(MIB, device="cuda", dtype=torch.uint8)
    memory[:MIB].copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory[:MIB], there.cpu())
    del memory
    source, target = open_transport(), open_transport(reuse_bytes=64 * MIB)
    source.send_checkpoint([1], 1, {"w": torch.ones(MIB)}, TIMEOUT)
    received = receive(target, source, 1)
    assert received["w"].is_pinned()
    assert torch.equal(received["w"].to("cuda", non_blocking=True).cpu(), torch.ones(MIB))
