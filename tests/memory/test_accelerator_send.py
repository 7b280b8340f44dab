"""State on an accelerator is copied to the host while it is served (with a simulated device)."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import tensorferry
from equality import assert_same_state
from exchange import TIMEOUT, Reader, in_background, receive, until
from stand_in import POISON, StandIn, open_on, stand_in
from tensorferry.memory import staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.timeout(90), pytest.mark.beyond_torchft]

MIB = 1 << 20
#: How much is copied at a time in these tests.
PART = 2 * MIB


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(staging, "PART", PART)
    with stand_in() as device:
        yield device


@pytest.fixture
def source(device: StandIn, monkeypatch: pytest.MonkeyPatch, open_transport: Callable[..., Any]) -> Iterator[Any]:
    """Yields a transport whose state is on the stand-in."""
    yield open_on(device, monkeypatch, open_transport)
    # This comes before the transport's shutdown, which would wait for a stream that is held.
    device.release()


def weights(count: int = 8, mib: int = 3, seed: float = 1.0) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((mib * MIB // 4,), seed + i) for i in range(count)}


def send(source: Any, step: int, state: Any) -> None:
    source.send_checkpoint([1], step, state, TIMEOUT)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("how", ["network", "same host", "stock"])
def test_what_is_queued_is_sent_and_what_comes_later_is_not(
    how: str, device: StandIn, source: Any, open_transport: Callable[..., Any], open_stock: Callable[..., Any]
) -> None:
    target = open_stock() if how == "stock" else open_transport(same_host=how == "same host")
    state = {**weights(), "host": torch.ones(7), "step": 3}
    device.adopt(*weights_of(state))
    device.trainer.hold()
    for weight in weights_of(state):
        device.trainer.queue(functools.partial(weight.add_, 100))
    expected = {name: v.clone() + 100 if name.startswith("w") else v for name, v in state.items()}
    with in_background(send, source, 1, state) as sending:
        until(lambda: len(device.copies) > 0, "copies are queued")
        assert not sending.done()
        device.trainer.release()
        sending.result(30)
    for weight in weights_of(state):
        weight.fill_(-1)
    assert_same_state(target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT), expected)


def held_weights(device: StandIn) -> dict[str, torch.Tensor]:
    """Returns weights on the device; none of them is copied until the test lets the device's new streams run."""
    state = weights()
    device.adopt(*state.values())
    device.hold_new = True
    return state


def weights_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for name, value in state.items() if name.startswith("w")]


def test_the_first_bytes_leave_while_later_ones_are_copied(
    device: StandIn, source: Any, open_transport: Callable[..., Any]
) -> None:
    state = held_weights(device)
    target = open_transport(2)
    with in_background(send, source, 1, state) as sending, in_background(receive, target, source, 1) as received:
        until(lambda: len(device.side) > 0, "a stream is made")
        side, copied = device.side[0], 0
        for number in range(15):
            side.let()
            until(lambda number=number: len(device.copies) > number, "the copy is queued")
            copied += device.copies[number][0]
            # A batch is copied, then sent except for the last incomplete block, and only then the next one is copied.
            until(lambda least=copied - MIB: source._server.bytes_served >= least, "bytes leave")
            # With the header comes a MiB of payload that is sent again later.
            assert source._server.bytes_served <= copied + 2 * MIB
        assert side.done < len(device.copies), "all is copied: the test shows nothing"
        assert not sending.done()
        assert not received.done()
        side.release()
        sending.result(30)
        assert_same_state(received.result(30), weights())


def test_nothing_that_is_not_copied_is_sent(device: StandIn, source: Any) -> None:
    """Here, page-locked memory is filled with poison before anything is copied into it."""
    state = weights(4)
    device.adopt(*state.values())
    device.hold_new = True
    with in_background(send, source, 1, state) as sending:
        until(lambda: len(device.side) > 0 and source._server.allowed, "it is published")
        reader = Reader(f"{source.metadata()}1.safetensors")
        with reader.socket:
            for _ in range(3):
                device.side[0].let()
            # The three copies have 2, 1 and 2 MiB.
            reader.read_to(5 * MIB)
            reader.socket.settimeout(0.2)
            with pytest.raises(TimeoutError):
                reader.read_to(6 * MIB + len(reader.head) + 8192)
            reader.socket.settimeout(30)
            device.side[0].release()
            body = reader.read_rest()
    sending.result(30)
    assert len(body) == reader.content_length
    assert bytes([POISON]) * 64 not in body


class Measured:
    """Reads the device while it is pickled, as torch's tensors on some kinds of device do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return list, (self.tensor.cpu().tolist(),)


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("how", ["dense", "view", "object"])
@pytest.mark.waits
def test_the_default_stream_is_waited_for_whichever_stream_sends(
    how: str, own_stream: bool, device: StandIn, source: Any, open_transport: Callable[..., Any]
) -> None:
    base = torch.zeros(MIB)
    value = {"dense": base, "view": base[10:20], "object": Measured(base[10:20])}[how]
    device.adopt(base)
    device.trainer.hold()
    device.trainer.queue(functools.partial(base.fill_, 7))

    def send_one() -> None:
        with device.on_stream() if own_stream else contextlib.nullcontext():
            send(source, 1, {"w": value})

    with in_background(send_one) as sending:
        until(lambda: device.followed > 0 or sending.done(), "it is about to read")
        with pytest.raises(TimeoutError):
            sending.result(0.3)
        device.trainer.release()
        sending.result(30)
    base.fill_(-1)
    received = receive(open_transport(trust_pickle=True), source, 1)["w"]
    assert set(received if how == "object" else received.tolist()) == {7.0}


@pytest.mark.waits
def test_a_copy_that_fails_is_reported_to_both_sides(
    device: StandIn, source: Any, open_transport: Callable[..., Any]
) -> None:
    before = {"w": torch.ones(3)}
    send(source, 1, before)
    state = weights(8)
    device.adopt(*state.values())
    device.hold_new = True
    device.fails = lambda number: number == 6
    target = open_transport()
    with in_background(send, source, 2, state) as sending, in_background(receive, target, source, 2) as received:
        until(lambda: len(device.side) > 0, "a stream is made")
        for _ in range(6):
            device.side[0].let()
        until(lambda: source._server.bytes_served > 4 * MIB, "the receive is under way")
        device.side[0].release()
        with pytest.raises(RuntimeError, match="the device is lost"):
            sending.result(30)
        # The receive fails at once, not at its deadline.
        with pytest.raises(tensorferry.SourceChanged):
            received.result(15)
    assert source._disallowed
    # Memory to which the device may still write is not reused, even when nothing references the error any more.
    device.fails = lambda _: False
    device.side[0].error = None
    del sending, received
    gc.collect()
    assert not source._stager._pinned._kept
    send(source, 3, state)
    assert_same_state(receive(target, source, 3), state)


def test_objects_and_views_on_the_device(device: StandIn, source: Any, open_transport: Callable[..., Any]) -> None:
    base = torch.arange(MIB, dtype=torch.float32)
    tied = torch.ones(MIB)
    state = {"view": base[10:90].view(8, 10).t(), "every": base[1000::7], "a": tied, "b": tied, "empty": torch.ones(0)}
    device.adopt(base, tied, state["empty"])
    send(source, 1, state)
    base.fill_(-1)
    tied.fill_(-1)
    first = torch.arange(MIB, dtype=torch.float32)
    expected = {**state, "view": first[10:90].view(8, 10).t(), "every": first[1000::7]}
    expected["a"] = expected["b"] = torch.ones(MIB)
    for one in (receive(open_transport(), source, 1), receive(open_transport(3), source, 1)):
        assert_same_state(one, expected)


@pytest.mark.parametrize("fails", [False, True])
def test_the_tensors_are_released_when_they_are_copied(fails: bool, device: StandIn, source: Any) -> None:
    state = weights(3)
    held = [StorageWeakRef(weight.untyped_storage()) for weight in state.values()]
    device.adopt(*state.values(), keep=False)
    device.fails = lambda number: fails and number == 2
    if fails:
        with pytest.raises(RuntimeError):
            send(source, 1, state)
        # The traceback of the stand-in's error references the memory that it was to copy.
        device.side[0].error = None
    else:
        send(source, 1, state)
        assert source._server.allowed
    del state
    for _ in range(50):
        gc.collect()
        if all(one.expired() for one in held):
            break
        time.sleep(0.05)
    assert all(one.expired() for one in held)
