"""Every kind of leaf and tree goes through a transport and arrives unchanged."""

from __future__ import annotations

import contextlib
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from equality import assert_same_state
from exchange import TIMEOUT, send_and_receive
from leaves import CARRIED, CATALOGUE, Leaf, cases
from nights import mostly_at_night

if TYPE_CHECKING:
    from collections.abc import Callable

# A transfer that does not end in time fails the test, not the whole run.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def group_if_needed(request: pytest.FixtureRequest) -> None:
    if request.getfixturevalue("leaf").group:
        request.getfixturevalue("process_group")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2), torch.zeros(2).requires_grad_()),
        (torch.zeros(3)[1:], torch.zeros(3)[:2]),
        ([torch.zeros(2), torch.zeros(2)], [t := torch.zeros(2), t]),
        ([torch.zeros(4)[:2], torch.zeros(4)[2:]], list((t := torch.zeros(4)).split(2))),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ],
)
def test_the_comparison_sees_the_difference(actual: Any, expected: Any) -> None:
    for one, other in ((actual, expected), (expected, actual)):
        with pytest.raises(AssertionError, match=r"^state"):
            assert_same_state(one, other)
        assert_same_state(one, one)


def versions(state: Any) -> list[int]:
    leaves = torch.utils._pytree.tree_leaves(state)
    return [one._version for one in leaves if type(one) in (torch.Tensor, nn.Parameter)]


@pytest.mark.parametrize("num_chunks", mostly_at_night([0, 3]))
@pytest.mark.parametrize("leaf", cases(CARRIED))
@pytest.mark.usefixtures("group_if_needed")
def test_leaf_comes_back_as_it_was(leaf: Leaf, num_chunks: int, open_transport: Callable[..., Any], ours: bool) -> None:
    value = leaf.value()
    state = leaf.state(value)
    before = versions(state)
    # Chunk counts are torchft's, and need not agree.
    sender, receiver = (open_transport(num_chunks + extra * ours, trust_pickle=leaf.trust) for extra in (0, 2))
    with contextlib.nullcontext() if ours or num_chunks in leaf.torchft else pytest.raises(Exception):  # noqa: PT011
        received = send_and_receive(sender, receiver, state)
        assert_same_state(received, leaf.state(leaf.expect(value)))
    sender.disallow_checkpoint()
    assert versions(state) == before, "sending has written to the sender's state"


@pytest.mark.parametrize("name", ["dtype float32", "transposed", "DTensor shard(0)", "sparse COO"])
@pytest.mark.usefixtures("process_group")
def test_received_memory_is_the_receivers_own(name: str, open_transport: Callable[..., Any]) -> None:
    """A received tensor is writable and shares memory with no other receive."""
    state = CATALOGUE[name].state(CATALOGUE[name].value())
    sender, receiver = open_transport(), open_transport()
    first = send_and_receive(sender, receiver, state)
    second = receiver.recv_checkpoint(0, sender.metadata(), 1, TIMEOUT)
    with torch.no_grad():
        first["user"]["leaf"].zero_()
        first["user"]["last"].fill_(9)
    assert_same_state(second, state)


@pytest.mark.beyond_torchft
def test_only_covered_bytes_travel(open_transport: Callable[..., Any]) -> None:
    """Bytes of a storage that no tensor covers are not sent: they may be another user's data."""
    base = torch.full((1 << 20,), 42.0)
    state = {"head": base[1000:1003], "rows": base[5000:9096].view(64, 64)[::2, :3]}
    transport = open_transport()
    received = send_and_receive(transport, transport, state)
    assert_same_state(received, state)
    storage = received["head"].untyped_storage()
    assert storage.nbytes() == base.untyped_storage().nbytes()
    whole = torch.empty(0, dtype=torch.float32).set_(storage)
    whole[1000:1003] = 0
    whole[5000:9096] = 0
    assert not whole.any()
    with urllib.request.urlopen(f"{transport.metadata()}1.safetensors", timeout=30) as response:
        assert int(response.headers["Content-Length"]) < 64 << 10
