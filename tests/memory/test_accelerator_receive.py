"""Receives into tensors on an accelerator use a small amount of page-locked memory (with a simulated device)."""

from __future__ import annotations

import contextlib
import functools
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tensorferry
from equality import assert_same_state
from exchange import TIMEOUT, in_background, receive, until
from faults.proxy.faults import FlipByte
from faults.proxy.proxy import FaultProxy
from stand_in import StandIn, open_on, parts, stand_in
from tensorferry.memory import bounce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.timeout(90), pytest.mark.beyond_torchft]

MIB = 1 << 20
#: In these tests a slot of this size is filled before it is copied to the device.
SLOT = 4 * MIB


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(bounce, "SLOT", SLOT)
    with stand_in() as device:
        yield device


@pytest.fixture
def open_target(
    device: StandIn, monkeypatch: pytest.MonkeyPatch, open_transport: Callable[..., Any]
) -> Iterator[Callable[..., Any]]:
    """Opens transports that receive into a live state on the stand-in."""

    def open_one(live: Any, *arguments: Any, **options: Any) -> Any:
        return open_on(device, monkeypatch, open_transport, *arguments, state_dict=lambda: live, **options)

    yield open_one
    device.release()


@pytest.fixture
def source(open_transport: Callable[..., Any]) -> Any:
    return open_transport()


def weights(count: int = 6, mib: int = 3, seed: float = 1.0) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.arange(mib * MIB // 4, dtype=torch.float32) + seed * i for i in range(count)}


def zeros(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for name, v in state.items()}


def test_written_where_the_live_tensors_lie(device: StandIn, open_target: Callable[..., Any], source: Any) -> None:
    """The state has large and small tensors on the device, tensors in host memory between them, and other objects."""
    sent: dict[str, Any] = {}
    for i, weight in enumerate(weights().values()):
        sent |= {f"w{i}": weight, f"step{i}": torch.tensor(float(i)), f"b{i}": torch.full((i + 1,), 7.0)}
    sent |= {"bf16": torch.ones(100, dtype=torch.bfloat16), "host": torch.ones(2 * MIB), "lr": 0.5}
    live = zeros(sent)
    live["p"] = sent["p"] = torch.nn.Parameter(torch.ones(5))
    live["p"] = torch.nn.Parameter(torch.zeros(5))
    on_device = {name: t for name, t in live.items() if name[0] in "wb" or name == "p"}
    device.adopt(*on_device.values())
    kept, where = dict(live), {name: t.data_ptr() for name, t in on_device.items()}
    source.send_checkpoint([1], 1, sent, TIMEOUT)
    target = open_target(live)
    received = receive(target, source, 1)
    assert_same_state(received, sent)
    for name, tensor in on_device.items():
        assert received[name] is kept[name]
        assert tensor.data_ptr() == where[name]
    # All copies run on one stream, and each byte is copied once.
    assert sum(nbytes for nbytes, _ in device.copies) == sum(t.nbytes for t in on_device.values())
    assert len(device.side) == 1
    assert device.pinned_bytes == [2 * SLOT], "and no more of it in host memory"


def test_the_network_goes_on_while_the_device_copies(
    device: StandIn, open_target: Callable[..., Any], source: Any
) -> None:
    """While one slot is copied to the device the other one is filled, and then the network waits for the device."""
    sent = weights(8)
    live = zeros(sent)
    device.adopt(*live.values())
    device.hold_new = True
    here = [0]
    target = open_target(live, progress=lambda there, _: here.__setitem__(0, there))
    source.send_checkpoint([1], 1, sent, TIMEOUT)
    with in_background(receive, target, source, 1) as received:
        until(lambda: len(device.side) > 0, "a stream is made")
        until(lambda: sum(nbytes for nbytes, _ in device.copies) > SLOT, "the second wave is here")
        assert device.side[0].done == 0, "not one copy is made"
        served = source._server.bytes_served
        assert served < 3 * SLOT + 2 * MIB, "a slot was filled that is copied from"
        assert all(not bool(t.any()) for t in live.values())
        device.side[0].release()
        received.result(30)
    assert_same_state(live, sent)
    assert here[0] >= 24 * MIB


#: Cases in which bytes are not copied from the slots: layouts of the live tensor, and kinds of sources.
LATE = ["strided", "view", "offset", "tied to another", "dtensor", "sparse", "several sources", "stock"]


def late(how: str, device: StandIn) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a live tensor on the device into which bytes are not copied directly, and a tensor to send for it."""
    sent = torch.arange(24.0).view(6, 4)
    live = torch.zeros(6, 4)
    if how == "strided":
        live = torch.zeros(4, 6).t()
    elif how == "view":
        live = torch.zeros(12, 4)[3:9]
    elif how == "offset":
        sent, live = torch.arange(30.0)[6:].view(6, 4), torch.zeros(30)[6:].view(6, 4)
    elif how == "sparse":
        sent, live = sent.to_sparse(), torch.full((6, 4), 9.0).to_sparse()
    device.adopt(*parts(live))
    return live, sent


def on_mesh(local: torch.Tensor) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)])


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("how", LATE)
@pytest.mark.usefixtures("process_group")
@pytest.mark.waits
def test_the_trainer_is_waited_for_past_the_slots(
    how: str,
    own_stream: bool,
    device: StandIn,
    open_target: Callable[..., Any],
    open_transport: Callable[..., Any],
    open_stock: Callable[..., Any],
) -> None:
    """Otherwise an optimizer step that is queued on the default stream would overwrite the received values."""
    live, sent = late(how, device)
    tensors = (on_mesh(live), on_mesh(sent)) if how == "dtensor" else (live, sent)
    state, other = {"w": tensors[0]}, {"w": tensors[1]}
    sources = [open_stock() if how == "stock" else open_transport() for _ in range(2 if how.startswith("sev") else 1)]
    for source in sources:
        source.send_checkpoint([1], 1, other, TIMEOUT)
    metadata = tensorferry.join_metadata(s.metadata() for s in sources) if len(sources) > 1 else sources[0].metadata()
    target = open_target(state)
    device.trainer.hold()
    seen: list[float] = []
    (values, *_) = parts(live)
    device.trainer.queue(lambda: seen.append(float(values.sum())))
    device.trainer.queue(functools.partial(values.fill_, -1))
    before = float(values.sum())

    def heal() -> Any:
        with device.on_stream() if own_stream else contextlib.nullcontext():
            return target.recv_checkpoint(0, metadata, 1, TIMEOUT)

    with in_background(heal) as received:
        until(lambda: device.followed > 0 or received.done(), "it is about to write")
        # This fails only if the receive does not wait; a slow machine cannot make it fail.
        with pytest.raises(TimeoutError):
            received.result(0.3)
        if is_held := own_stream and how in ("strided", "view"):
            device.callers[0].hold()
        device.trainer.release()
        if is_held:
            # It is over on the device when it returns: work that the trainer then queues sees the new values.
            until(lambda: "aten::copy_" in device.touched or received.done(), "it writes")
            with pytest.raises(TimeoutError):
                received.result(0.3)
            device.callers[0].release()
        result = received.result(30)
    assert result["w"] is state["w"]
    assert seen == [before]
    assert torch.equal(live.to_dense(), sent.to_dense())
    if how != "sparse":
        # Adopted memory stays in use; only a sparse tensor gets new parts.
        assert device.holding([live])


def test_damaged_bytes_are_fetched_again_before_they_are_copied(
    device: StandIn, open_target: Callable[..., Any], source: Any
) -> None:
    sent = weights(8)
    live = zeros(sent)
    device.adopt(*live.values())
    source.send_checkpoint([1], 1, sent, TIMEOUT)
    with FaultProxy.before(source.metadata(), [FlipByte(at=10 * MIB)]) as proxy:
        target = open_target(live, 1, same_host=False)
        target.recv_checkpoint(0, proxy.through(source.metadata()), 1, TIMEOUT)
        assert proxy.fired[FlipByte.__name__]
    assert_same_state(live, sent)
    assert sum(nbytes for nbytes, _ in device.copies) == 24 * MIB, "each byte was copied once: the right one"


@pytest.mark.waits
def test_a_receive_that_fails_leaves_old_and_verified_bytes(
    device: StandIn, open_target: Callable[..., Any], source: Any
) -> None:
    sent = {"w": torch.arange(6 * MIB, dtype=torch.float32)}
    live = {"w": torch.full((6 * MIB,), -7.0)}
    device.adopt(live["w"])
    device.hold_new = True
    source.send_checkpoint([1], 1, sent, TIMEOUT)
    proxy = FaultProxy.before(source.metadata())
    with proxy:
        target = open_target(live, 1, same_host=False)
        metadata = proxy.through(source.metadata())
        with in_background(target.recv_checkpoint, 0, metadata, 1, TIMEOUT) as received:
            until(lambda: sum(nbytes for nbytes, _ in device.copies) > SLOT, "the second wave is here")
            proxy.close()
            device.side[0].release()
            with pytest.raises(tensorferry.ConnectError):
                received.result(30)
    copied = sum(nbytes for nbytes, _ in device.copies) // 4
    assert MIB < copied < 3 * MIB
    assert torch.equal(live["w"][:copied], sent["w"][:copied])
    assert bool((live["w"][copied:] == -7).all())
    # The device did not fail, so its memory is reused once nothing references the error and its traceback.
    del received
    gc.collect()
    assert len(target._bounce._pool._kept) == 1


def test_two_devices(device: StandIn, open_target: Callable[..., Any], source: Any) -> None:
    sent = weights(7)
    live = zeros(sent)
    for i, tensor in enumerate(live.values()):
        device.adopt(tensor, device=i % 2)
    source.send_checkpoint([1], 1, sent, TIMEOUT)
    receive(open_target(live), source, 1)
    assert_same_state(live, sent)
    assert len(device.side) == 2
    assert device.strays == 0, "events were destroyed where another device would get a context"
