"""A state that is changed or withdrawn during a fetch: the result is of one moment, or the receive fails."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tensorferry
from exchange import TIMEOUT, figure, until
from nights import mostly_at_night

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.timeout(120), pytest.mark.beyond_torchft]

MIB = 1 << 20


class Middle:
    """A `progress` callback that calls `then` once, when a third of the bytes has arrived, and sets `reached`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.then: Callable[[], object] = lambda: None

    def __call__(self, here: int, total: int) -> None:
        if not self.reached.is_set() and here > total // 3:
            self.then()
            self.reached.set()


@pytest.mark.parametrize(("same_host", "in_place"), mostly_at_night([(False, True), (True, False)]))
def test_a_state_changed_in_the_middle_arrives_as_it_is_afterwards(
    same_host: bool, in_place: bool, open_transport: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As with torchft's sync quorum, the forward pass changes some small buffers and then leaves them alone."""
    middle = Middle()
    # The weights are not whole pages, which would be sent first.
    weights = {f"w{i}": torch.ones(MIB + 1) for i in range(4)}
    buffers = {f"b{i}": torch.zeros(100) for i in range(50)}
    state = {**buffers, **weights}

    def forward() -> None:
        for buffer in buffers.values():
            buffer.fill_(1.0)

    middle.then = forward
    source = open_transport(same_host=same_host, max_bandwidth=64 * MIB)
    own = {name: torch.full_like(value, -1.0) for name, value in state.items()}
    live = {"state_dict": lambda: own} if in_place else {}
    target = open_transport(2, same_host=same_host, progress=middle, **live)
    source.send_checkpoint([1], 1, state, TIMEOUT)
    received = target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert middle.reached.is_set()
    assert {float(value.min()) for value in received.values()} == {1.0}
    assert not in_place or all(received[name] is value for name, value in own.items())
    assert 'snapshot="copy"' in caplog.text


@pytest.mark.waits
def test_a_state_that_keeps_changing_is_an_error_that_says_what_to_do(open_transport: Callable[..., Any]) -> None:
    state = {"w": torch.zeros(16 * MIB)}
    source, target = open_transport(), open_transport(2)
    over = threading.Event()

    def train() -> None:
        while not over.is_set():
            state["w"].add_(1.0)

    source.send_checkpoint([1], 1, state, TIMEOUT)
    training = threading.Thread(target=train)
    training.start()
    torn = ""
    try:
        # On a busy machine, the trainer may stand still for the time of a receive.
        while True:
            received = target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
            assert len(received["w"].unique()) <= 2
    except tensorferry.errors.TornCheckpoint as error:
        torn = str(error)
    finally:
        over.set()
        training.join()
    assert all(word in torn for word in ("disallow_checkpoint()", 'snapshot="copy"', "w"))
    # Once the changes have stopped, the receive succeeds.
    assert torch.equal(target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)["w"], state["w"])


def test_a_failed_receive_keeps_no_connection_while_its_exception_is_kept(open_transport: Callable[..., Any]) -> None:
    source = open_transport(timeout=TIMEOUT)
    source.send_checkpoint([1], 1, {"w": torch.ones(3 * MIB)}, TIMEOUT)
    # It fails as soon as it has read the header.
    target = open_transport(state_dict=lambda: {"w": torch.ones(7)}, strict=True)
    with pytest.raises(tensorferry.StateMismatch) as kept:
        target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    until(lambda: figure(source, "connections") == 1, str(kept.value))
