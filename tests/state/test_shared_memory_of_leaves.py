"""Tensors of the live state that share memory: they must share it exactly as those of the source do."""

from __future__ import annotations

import itertools
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tensorferry
from exchange import TIMEOUT, receive
from tensorferry.state import aliases, tree
from tensorferry.state.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.timeout(120), pytest.mark.beyond_torchft]


@pytest.fixture
def heal(open_transport: Callable[..., Any]) -> Callable[..., Any]:
    def heal(sent: Any, live: Any) -> Any:
        source, target = open_transport(), open_transport(state_dict=lambda: live)
        source.send_checkpoint([1], 1, sent, TIMEOUT)
        return receive(target, source, 1)

    return heal


def clashing() -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    """Returns live states in which `a` and `b`, both of 8 elements, share memory."""

    def of(make: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], count: int = 16) -> Any:
        return lambda: dict(zip("ab", make(torch.zeros(count)), strict=True))

    return {
        "one object": of(lambda t: (t[:8], t[:8])),
        "one whole object": lambda: dict.fromkeys("ab", torch.zeros(8)),
        "detached": of(lambda t: (t, t.detach()), 8),
        "from one array": of(lambda t: (torch.from_numpy(t.numpy()), torch.from_numpy(t.numpy())), 8),
        "parts of one array": of(lambda t: (torch.from_numpy(t.numpy()[:8]), torch.from_numpy(t.numpy()[4:])), 12),
        "overlapping views": of(lambda t: (t[:8], t[4:12])),
        "one byte": of(lambda t: (t[:8], t[7:15])),
        "strided over contiguous": of(lambda t: (t[::2], t[8:])),
        "row and column": of(lambda t: (t.view(8, 8)[:, 3], t.view(8, 8)[5]), 64),
    }


@pytest.mark.parametrize("name", clashing())
@pytest.mark.parametrize("size", [1, 1 << 12])
def test_shared_here_and_apart_at_the_source(name: str, size: int, heal: Callable[..., Any]) -> None:
    live: dict[str, Any] = {"before": torch.zeros(size), **clashing()[name](), "x": {"last": torch.zeros(size)}}
    sent = {
        "before": torch.ones(size),
        "a": torch.full((8,), 1.0),
        "b": torch.full((8,), 2.0),
        "x": {"last": torch.ones(size)},
    }
    with pytest.raises(tensorferry.StateMismatch, match=r"\ba and b: they share memory here") as caught:
        heal(sent, live)
    assert "nothing was overwritten" in str(caught.value)
    assert "last" not in str(caught.value)
    for value in (live["before"], live["a"], live["b"], live["x"]["last"]):
        assert not value.any()


def shared_alike() -> dict[str, Callable[[float], dict[str, torch.Tensor]]]:
    """Returns functions that make states whose leaves share memory, to be sent and to be received into."""

    def of(make: Callable[[torch.Tensor], Any]) -> Callable[[float], Any]:
        def state(value: float) -> Any:
            made = make(torch.arange(64.0) * value)
            return dict(zip("abc", made, strict=False))

        return state

    return {
        "one object": of(lambda t: (t, t)),
        "tied and in another shape": of(lambda t: (t, t.view(8, 8), t.view(8, 8).t())),
        "views of a flat buffer, and the buffer": of(lambda t: (t, t[:32].view(4, 8), t[32:])),
        "overlapping": of(lambda t: (t[:40], t[20:])),
        "another dtype": of(lambda t: (t, t.view(torch.int32))),
        "from one array": of(lambda t: (lambda x: (torch.from_numpy(x), torch.from_numpy(x)))(t.numpy())),
        "parts of one array": of(lambda t: (lambda x: (torch.from_numpy(x[:40]), torch.from_numpy(x[20:])))(t.numpy())),
        "windows": of(lambda t: (t.unfold(0, 8, 4), t)),
        "empty": of(lambda t: (t, t[:0], t[5:5])),
    }


@pytest.mark.parametrize("name", shared_alike())
def test_shared_here_as_at_the_source(name: str, heal: Callable[..., Any]) -> None:
    live, sent = shared_alike()[name](0.0), shared_alike()[name](3.0)
    received = heal(sent, live)
    for key, value in live.items():
        assert received[key] is value
        assert torch.equal(value, sent[key]), key


def apart() -> dict[str, Callable[[torch.Tensor], Any]]:
    """Returns views that share no byte, although the ranges from their first to their last bytes overlap."""
    return {
        "columns": lambda t: (t.view(8, 8)[:, :3], t.view(8, 8)[:, 3:5], t.view(8, 8)[:, 5:]),
        "real and imaginary": lambda t: (lambda c: (c.real, c.imag))(torch.view_as_complex(t.view(32, 2))),
    }


@pytest.mark.parametrize("name", apart())
def test_interleaved_leaves_come_from_a_source_that_has_them_so_as_well(name: str, heal: Callable[..., Any]) -> None:
    live = dict(zip("abc", apart()[name](torch.zeros(64)), strict=False))
    with pytest.raises(tensorferry.StateMismatch, match="or not in the same way"):
        heal({key: torch.rand(value.shape) for key, value in live.items()}, live)
    assert not any(value.any() for value in live.values())
    sent = dict(zip("abc", apart()[name](torch.rand(64)), strict=False))
    heal(sent, live)
    for key, value in live.items():
        assert torch.equal(value, sent[key]), key


@pytest.mark.parametrize(("here", "there"), [*itertools.permutations([(0, 2), (0, 4), (2, 0), (4, 4)], 2)])
def test_shared_in_another_way(here: tuple[int, int], there: tuple[int, int], heal: Callable[..., Any]) -> None:
    mine, theirs = torch.zeros(12), torch.arange(12.0)
    live = {"a": mine[here[0] :][:8], "b": mine[here[1] :][:8], "c": torch.zeros(8)}
    sent = {"a": theirs[there[0] :][:8], "b": theirs[there[1] :][:8], "c": theirs[:8]}
    if here[1] - here[0] != there[1] - there[0]:
        with pytest.raises(tensorferry.StateMismatch, match="or not in the same way"):
            heal(sent, live)
        return
    heal(sent, live)
    # What only the source shares is written to each.
    assert all(torch.equal(value, sent[name]) for name, value in live.items())


def test_the_stride_of_a_single_row_says_nothing(heal: Callable[..., Any]) -> None:
    mine, theirs = torch.zeros(16), torch.arange(16.0)
    live = {"a": mine[:8].as_strided((1, 8), (99, 1)), "b": mine[:8]}
    heal({"a": theirs[:8].view(1, 8), "b": theirs[:8]}, live)
    assert torch.equal(mine[:8], theirs[:8])


def test_a_live_tensor_whose_elements_share_memory(heal: Callable[..., Any]) -> None:
    live = {"w": torch.zeros(12).unfold(0, 8, 4)}
    with pytest.raises(tensorferry.StateMismatch, match="several of its elements"):
        heal({"w": torch.arange(16.0).view(2, 8)}, live)
    assert not live["w"].any()


def test_a_tie_with_what_the_source_does_not_have(heal: Callable[..., Any]) -> None:
    weight = torch.zeros(4)
    heal({"a": torch.ones(4)}, {"a": weight, "not there": weight, "nor this": weight[1:]})
    assert bool((weight == 1).all())


def test_groups_are_found_by_address_natively_as_by_looking() -> None:
    chance = random.Random(1)
    for _ in range(100):
        buffer = torch.zeros(200)
        state = {}
        for number in range(12):
            start, length = chance.randrange(190), chance.randrange(10)
            view = buffer[start : start + length]
            state[f"{number}"] = torch.from_numpy(view.numpy()) if chance.random() < 0.5 else view
        state["alone"] = torch.zeros(3)
        flat = tree.flatten(state)
        groups = aliases.LeafMemory(flat).groups
        found = {layout.leaf: n for n, group in enumerate(groups) for layout in group}
        spans = {k: (v.data_ptr(), v.data_ptr() + v.nbytes) for k, v in state.items() if v.nbytes}
        numbers = json.loads(flat.tree)
        for one, two in itertools.combinations(spans, 2):
            if spans[one][0] < spans[two][1] and spans[two][0] < spans[one][1] and numbers[one] != numbers[two]:
                assert found[numbers[one]] == found[numbers[two]]
        assert numbers["alone"] not in found
        assert all(len(group) > 1 for group in groups)


@pytest.mark.parametrize(
    "shared",
    [1, [1], [[1]], [[[1, 2, 3]]], [[["a", 0, [], 0]]], [[[0, 0, 4, 0]]], [[[0, 0, [None], 0]]], [[[0, 0.5, [1], 0]]]],
)
def test_the_description_of_shared_memory_in_a_manifest_is_checked(shared: Any) -> None:
    fields = {"flags": "", "objects": 0, "storages": []}
    with pytest.raises(tensorferry.errors.ProtocolError, match="share memory"):
        Manifest(json.dumps(fields | {"shared": shared}), "0").shared()
