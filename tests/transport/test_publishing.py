"""The contract of a source: sending, disallowing, shutting down, and which memory is held meanwhile."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import threading
import time
import urllib.error
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from equality import assert_same_state
from exchange import CLEAN, POISON, TIMEOUT, big_state, connect, path, receive, small_state, until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(90)


def test_what_is_served_after_each_call(open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(3), open_transport(3)
    for step in range(1, 30):
        state = {"w": torch.full((100,), float(step)), "step": step}
        source.send_checkpoint([1] if step % 2 else [], step, state, TIMEOUT)
        if step % 3:
            assert_same_state(receive(target, source, step), state)
        if step % 5:
            source.disallow_checkpoint()
            source.disallow_checkpoint()
    # Without a call in between, the last one sent is served, the same step again, and under another name.
    for value in (1.0, 2.0):
        source.send_checkpoint([1], 50, {"w": torch.tensor(value)}, TIMEOUT)
        assert source.recv_checkpoint(77, source.metadata(), 50, TIMEOUT)["w"] == value
    for _ in range(3):
        source.allow_checkpoint(51)
    assert receive(target, source, 51)["w"] == 2.0
    with pytest.raises(urllib.error.HTTPError, match="serving 51 but got step=50") as caught:
        receive(target, source, 50)
    caught.value.close()


@pytest.mark.beyond_torchft
def test_after_disallow_there_is_nothing_to_allow(open_transport: Callable[..., Any]) -> None:
    transport = open_transport()
    transport.send_checkpoint([1], 1, small_state(), TIMEOUT)
    transport.disallow_checkpoint()
    transport.allow_checkpoint(1)
    with pytest.raises(urllib.error.HTTPError, match="no state was sent") as caught:
        receive(transport, transport, 1)
    assert caught.value.code == 404
    caught.value.close()


def test_containers_are_those_of_the_send_and_borrowed_tensors_are_live(open_transport: Callable[..., Any]) -> None:
    transport = open_transport(3)
    state, expected = small_state(), small_state()
    transport.send_checkpoint([1], 1, state, TIMEOUT)
    state["user"]["w"].fill_(5)
    expected["user"]["w"].fill_(5)
    state["user"]["later"] = torch.ones(3)
    state["torchft"]["step"] = 99
    del state["user"]["b"]
    assert_same_state(receive(transport, transport, 1), expected)


@pytest.mark.beyond_torchft
def test_copied_tensors_are_those_of_the_send(open_transport: Callable[..., Any]) -> None:
    def made() -> dict[str, Any]:
        base = torch.arange(24.0)
        return {**small_state(), "views": [base[::2], base.view(4, 6).t()], "sparse": torch.eye(3).to_sparse()}

    transport, state = open_transport(3, snapshot="copy"), made()
    transport.send_checkpoint([1], 1, state, TIMEOUT)
    for tensor in [state["views"][0], state["user"]["w"], state["user"]["b"], state["sparse"]._values()]:
        tensor.fill_(5)
    assert_same_state(receive(transport, transport, 1), made())
    # Once more, from the state as it is now.
    transport.send_checkpoint([1], 2, state, TIMEOUT)
    assert_same_state(receive(transport, transport, 2), state)


def test_transfer_begun_before_the_next_send_ends_with_the_old_state(
    open_transport: Callable[..., Any], ours: bool
) -> None:
    source = open_transport()
    source.send_checkpoint([1], 1, big_state(), TIMEOUT)
    with contextlib.closing(connect(source)) as connection:
        connection.request("GET", path(source, "1.safetensors" if ours else "1/full"))
        answer = connection.getresponse()
        body = answer.read(1 << 20)
        source.send_checkpoint([1], 2, {"w": torch.full((64 << 20,), POISON, dtype=torch.uint8)}, TIMEOUT)
        body += answer.read()
    assert body.count(bytes([CLEAN])) >= 64 << 20
    assert bytes([POISON]) * 64 not in body


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("snapshot", ["borrow", "copy"])
@pytest.mark.waits
def test_a_state_is_never_torn(snapshot: str, open_transport: Callable[..., Any]) -> None:
    """A trainer writes as soon as disallow has returned, while receivers request the state all the time."""
    import tensorferry

    source = open_transport(timeout=timedelta(seconds=5), snapshot=snapshot)
    weights = [torch.zeros(1 << 18) for _ in range(16)]
    stop, current = threading.Event(), [0]

    def keep_receiving() -> int:
        target, whole = open_transport(num_chunks=2), 0
        while not stop.is_set():
            step = current[0]
            try:
                state = receive(target, source, step, seconds=5)
            except tensorferry.TensorferryError:
                continue
            assert state["step"] == step
            for weight in state["weights"]:
                assert float(weight.min()) == float(weight.max()) == step
            whole += 1
        return whole

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        receivers = [pool.submit(keep_receiving) for _ in range(3)]
        try:
            for step in range(1, 40):
                for weight in weights:
                    weight.fill_(step)
                current[0] = step
                source.send_checkpoint([1], step, {"weights": list(weights), "step": step}, TIMEOUT)
                time.sleep(0.02 if step % 3 else 0.1)
                source.disallow_checkpoint()
        finally:
            stop.set()
            # A receiver that waits for a step now gets an answer.
            source.send_checkpoint([1], 1000, {}, TIMEOUT)
        assert sum(one.result(30) for one in receivers) > 0


def _is_freed(*references: weakref.ref) -> bool:
    """Returns whether the state is freed, after waiting a moment: another thread may drop the owner."""
    for _ in range(100):
        gc.collect()
        if all(reference() is None for reference in references):
            return True
        time.sleep(0.05)
    return False


class Anything:
    pass


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("snapshot", ["borrow", "copy"])
def test_states_are_released(snapshot: str, open_transport: Callable[..., Any]) -> None:
    ends = {
        "disallow": lambda transport: transport.disallow_checkpoint(),
        "send": lambda transport: transport.send_checkpoint([1], 2, {}, TIMEOUT),
        "shutdown": lambda transport: transport.shutdown(),
    }
    for name, end in ends.items():
        transport = open_transport(num_chunks=2, snapshot=snapshot, trust_pickle=True)
        state = {"w": torch.ones(1 << 20), "p": torch.nn.Parameter(torch.ones(3)), "view": torch.ones(9)[::2]}
        state["o"] = Anything()
        transport.send_checkpoint([1], 1, state, TIMEOUT)
        received = receive(transport, transport, 1)
        held = [weakref.ref(value) for value in (*state.values(), *received.values())]
        end(transport)
        del state, received
        assert _is_freed(*held), (name, [reference() is None for reference in held])


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("wait", [True, False])
def test_shutdown_stops_serving(wait: bool, open_transport: Callable[..., Any]) -> None:
    source, target = open_transport(), open_transport()
    source.send_checkpoint([1], 1, small_state(), TIMEOUT)
    source.shutdown(wait=wait)

    def is_refused() -> bool:
        try:
            receive(target, source, 1, seconds=3)
        except urllib.error.URLError:
            return True
        return False

    assert is_refused() or not wait
    until(is_refused, "the port is closed")
    source.disallow_checkpoint()
    source.shutdown()
    assert source.metadata().startswith("http://")
