"""The code paths that need a real GPU. The others are tested with simulated devices in test_accelerator*.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from equality import assert_same_state
from exchange import TIMEOUT, in_background, receive, until
from tensorferry import join_metadata
from tensorferry.checkpointing import AsyncCheckpointer
from tensorferry.errors import InvalidArgument
from tensorferry.memory.pinned import _forget_failure, pinned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.beyond_torchft,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none here"),
]

MIB = 1 << 20
#: Keeps the device busy for some hundred milliseconds.
LONG_CYCLES = 500_000_000


def weights(device: str, value: float = 1.0) -> dict[str, torch.Tensor]:
    """Returns some 300 MiB: enough for several batches and several waves."""
    large = {f"w{i}": torch.full((30 * MIB // 4,), value + i, device=device) for i in range(10)}
    small = {f"s{i}": torch.full((i + 1,), value, device=device, dtype=torch.bfloat16) for i in range(100)}
    return {**large, **small}


def on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


def queue(state: dict[str, torch.Tensor], change: Callable[[torch.Tensor], object]) -> None:
    """Queues a change of every tensor behind a long wait, and checks that the change has not happened yet."""
    torch.cuda._sleep(LONG_CYCLES)
    for tensor in state.values():
        change(tensor)
    assert not torch.cuda.current_stream().query(), "it is done already: the test shows nothing"


def warm_up(state: dict[str, torch.Tensor]) -> None:
    """Runs each operation once: its first use may wait for the whole device, which would hide a missing wait."""
    for tensor in state.values():
        tensor.add_(0).fill_(float(tensor[(0,) * tensor.dim()]))
    torch.cuda._sleep(1)
    torch.cuda.synchronize()


def send_and_release(source: Any, target: Any, state: dict[str, torch.Tensor]) -> None:
    """Makes one exchange, after which page-locked memory and streams exist."""
    source.send_checkpoint([1], 100, state, TIMEOUT)
    receive(target, source, 100)
    source.disallow_checkpoint()
    until(lambda: len(source._stager._pinned._kept) == 1, "the memory has come back")


@pytest.mark.parametrize("how", ["default stream", "own stream", "sent from another stream"])
def test_what_is_queued_is_sent_and_what_comes_later_is_not(how: str, open_transport: Callable[..., Any]) -> None:
    """The trainer's stream is still writing when the state is sent; torchft sends from a stream of its own."""
    source, target = open_transport(), open_transport()
    state = weights("cuda")
    warm_up(state)
    send_and_release(source, target, state)
    trainers = torch.cuda.Stream() if how == "own stream" else torch.cuda.current_stream()
    sent_from = torch.cuda.Stream() if how == "sent from another stream" else trainers
    with torch.cuda.stream(trainers), in_background(receive, target, source, 1) as received:
        queue(state, lambda tensor: tensor.add_(1))
        with torch.cuda.stream(sent_from):
            source.send_checkpoint([1], 1, state, TIMEOUT)
        for tensor in state.values():
            tensor.fill_(-1)
        assert_same_state(received.result(30), weights("cpu", 2.0))


def live_past_the_slots(how: str, value: float) -> torch.Tensor:
    """Returns a tensor on the device into which received bytes are not copied directly."""
    whole = torch.full((2048, 2 * 2048), value, device="cuda")
    return whole[:, :2048].t() if how == "strided" else whole.view(-1)[4096 : 4096 + 2048 * 2048].view(2048, 2048)


@pytest.mark.parametrize("how", ["strided", "view", "several sources"])
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_receive_past_the_slots_comes_after_what_is_queued_and_before_what_is_next(
    own_stream: bool, how: str, open_transport: Callable[..., Any]
) -> None:
    several = how == "several sources"
    live = {"w": torch.zeros((2048, 2048), device="cuda") if several else live_past_the_slots(how, 0.0)}
    local = live["w"]
    sent = {"w": torch.full((2048, 2048), 5.0) if several else live_past_the_slots(how, 5.0)}
    sources = [open_transport() for _ in range(2 if several else 1)]
    for source in sources:
        source.send_checkpoint([1], 1, sent, TIMEOUT)
    metadata = join_metadata(s.metadata() for s in sources) if several else sources[0].metadata()
    target = open_transport(state_dict=lambda: live)
    warm_up({"w": local})
    target.recv_checkpoint(0, metadata, 1, TIMEOUT)
    # The trainer's stream still writes the old values.
    queue({"w": local}, lambda tensor: tensor.fill_(-1))
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        received = target.recv_checkpoint(0, metadata, 1, TIMEOUT)
    # The clone runs on the trainer's stream, which waits for no other.
    found = local.clone()
    assert received["w"] is live["w"]
    assert bool((found == 5).all())


@pytest.mark.parametrize("other_stream", [False, True])
def test_received_where_the_live_tensors_lie(other_stream: bool, open_transport: Callable[..., Any]) -> None:
    live = weights("cuda", 0.0)
    where = {name: tensor.data_ptr() for name, tensor in live.items()}
    source = open_transport()
    target = open_transport(state_dict=lambda: live)
    sent = weights("cuda", 5.0)
    warm_up(live)
    send_and_release(source, target, sent)
    source.send_checkpoint([1], 1, sent, TIMEOUT)
    # The trainer's stream still writes the old values.
    queue(live, lambda tensor: tensor.fill_(-1))
    with torch.cuda.stream(torch.cuda.Stream() if other_stream else torch.cuda.current_stream()):
        received = receive(target, source, 1)
    torch.cuda.synchronize()
    for name, tensor in live.items():
        assert received[name] is tensor
        assert tensor.data_ptr() == where[name]
    assert_same_state(on_host(live), weights("cpu", 5.0))


def by_torch() -> int:
    """Returns the bytes of page-locked memory that torch's own allocator holds."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def test_locked_memory_is_what_cuda_takes_for_such() -> None:
    """It has the exact size, is not from torch's allocator, which rounds up, and is unlocked when it is freed."""
    torch.cuda.init()
    kept = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    before = by_torch()
    assert before >= kept.nbytes
    there = torch.arange(MIB, device="cuda").to(torch.uint8)
    # If it were not unlocked, locking the next memory at its address would fail, and torch's allocator would be used.
    for _ in range(3):
        memory = pinned(5 * MIB + 123)
        assert memory.is_pinned()
        assert memory[MIB:].is_pinned()
        assert by_torch() <= before
        memory[:MIB].copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(memory[:MIB], there.cpu())
        del memory


def test_a_refusal_is_not_left_for_the_trainers_next_kernel() -> None:
    memory = pinned(MIB)
    assert int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), MIB, 1)), "it was locked twice"
    _forget_failure()
    assert int(torch.ones(10, device="cuda").add_(1).sum()) == 20


def test_a_graph_that_is_captured_is_left_alone(open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(), open_transport()
    state = {"w": torch.zeros(MIB, device="cuda")}
    warm_up(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state["w"].add_(1)
        with pytest.raises(InvalidArgument, match="graph is being captured"):
            source.send_checkpoint([1], 1, state, TIMEOUT)
    graph.replay()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    assert_same_state(receive(target, source, 1), {"w": torch.ones(MIB)})


@pytest.mark.process
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_checkpointer_saves_what_is_queued_and_not_what_comes_later(own_stream: bool, tmp_path: Path) -> None:
    state, checkpointer = weights("cuda"), AsyncCheckpointer()
    warm_up(state)
    # After it, page-locked memory, streams and the process exist.
    checkpointer.save(tmp_path / "warm-up", state)[1].result(60)
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        queue(state, lambda tensor: tensor.add_(1))
        staged, written = checkpointer.save(tmp_path / "one", state)
        staged.result(60)
        for tensor in state.values():
            tensor.fill_(-1)
    written.result(60)
    assert_same_state(checkpointer.load(tmp_path / "one", default_map_location="cpu"), weights("cpu", 2.0))
    checkpointer.close()
