"""With `state_dict=`, a receive writes into the live tensors and returns the live state."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import tensorferry
from equality import assert_same_state
from leaves import ALONE, Leaf, cases

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = timedelta(seconds=30)

pytestmark = [pytest.mark.timeout(60), pytest.mark.beyond_torchft]


@pytest.fixture
def heal(open_transport: Callable[..., Any]) -> Callable[..., Any]:
    """Sends one state and receives it into another."""

    def heal(sent: Any, live: Any, *, trust: bool = False) -> Any:
        source, target = open_transport(), open_transport(state_dict=lambda: live, trust_pickle=trust)
        source.send_checkpoint([1], 4, sent, TIMEOUT)
        return target.recv_checkpoint(0, source.metadata(), 4, TIMEOUT)

    return heal


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Frees the storage of a tensor, as FSDP does with parameters between steps."""
    tensor.untyped_storage().resize_(0)
    return tensor


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(5, 8)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_module_and_its_optimizer_follow(heal: Callable[..., Any]) -> None:
    """What there is of tensors is written where it lies, keys in any order; everything else is replaced."""
    (healthy, optimizer), (broken, sleeping) = trained(1), trained(2, steps=1)

    def state(model: nn.Module, of: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": of.state_dict(), **more}

    sent = state(healthy, optimizer, step=9, name="new", none=3, set={2, 3}, betas=(0.5, 0.6))
    live = dict(reversed(state(broken, sleeping, step=0, name="old", none=None, set={1}, betas=(0.9, 0.9)).items()))
    kept = {id(one): one.data_ptr() for one in torch.utils._pytree.tree_leaves(live) if isinstance(one, torch.Tensor)}
    received = heal(sent, live)
    assert_same_state(received, sent)
    got = [one for one in torch.utils._pytree.tree_leaves(received) if isinstance(one, torch.Tensor)]
    assert {id(one): one.data_ptr() for one in got} == kept
    assert_same_state(broken.state_dict(), healthy.state_dict())
    assert all(weight.requires_grad for weight in broken.parameters())


def test_parameters_stay_parameters_and_tensors_stay_tensors(heal: Callable[..., Any]) -> None:
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    live = {"w": nn.Parameter(torch.zeros(4, 3)), "frozen": frozen, "plain": torch.zeros(4)}
    sent = {"w": torch.ones(4, 3), "frozen": torch.ones(2), "plain": nn.Parameter(torch.ones(4))}
    live["w"].grad = torch.full((4, 3), 5.0)
    received = heal(sent, live)
    for name, value in live.items():
        assert received[name] is value
        assert bool((value == 1).all())
    assert [(type(value), value.requires_grad) for value in live.values()] == [
        (nn.Parameter, True), (nn.Parameter, False), (torch.Tensor, False),
    ]  # fmt: skip
    assert torch.equal(live["w"].grad, torch.full((4, 3), 5.0))
    live["w"].sum().backward()


#: Buffers full of -1, each with the view of it that is the live tensor.
TARGETS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "transposed": (lambda: torch.full((4, 6), -1.0), lambda b: b.t()),
    "every other": (lambda: torch.full((48,), -1.0), lambda b: b[::2].view(6, 4)),
    "window": (lambda: torch.full((10, 10), -1.0), lambda b: b[2:8, 3:7]),
    "offset": (lambda: torch.full((40,), -1.0), lambda b: b[9:33].view(6, 4)),
    "last element of rows": (lambda: torch.full((6, 4, 3), -1.0), lambda b: b[:, :, 2]),
}


@pytest.mark.parametrize("name", TARGETS)
def test_strided_targets(name: str, heal: Callable[..., Any]) -> None:
    values = torch.arange(24.0).view(6, 4)
    window = torch.nn.functional.pad(values, (1, 1, 1, 1))[1:-1, 1:-1]
    for sent in (values, values.t().contiguous().t(), window):
        make, look = TARGETS[name]
        buffer = make()
        live, expected = look(buffer), buffer.clone()
        look(expected).copy_(values)
        stride = live.stride()
        assert heal({"w": sent, "other": 1}, {"w": live, "other": 0})["w"] is live
        assert live.stride() == stride
        assert torch.equal(buffer, expected), "values in place, and nothing else of the buffer touched"


def test_tensors_without_elements_need_no_memory(heal: Callable[..., Any]) -> None:
    make: list[Callable[[], torch.Tensor]] = [
        lambda: torch.zeros(0, 6)[:, 2:4],
        lambda: torch.zeros(0, 1).expand(0, 2),
        lambda: freed(torch.zeros(4, 6)[4:][:, 2:4]),
        lambda: torch.zeros(0, 2),
    ]
    pairs = {f"{n}.{k}": (here, there) for n, here in enumerate(make) for k, there in enumerate(make)}
    live = {"w": torch.zeros(2), **{name: here() for name, (here, _) in pairs.items()}}
    received = heal({"w": torch.ones(2), **{name: there() for name, (_, there) in pairs.items()}}, live)
    assert all(received[name] is value for name, value in live.items())
    assert live["w"].all()


def test_colliding_paths_are_not_mixed_up(heal: Callable[..., Any]) -> None:
    """Leaves whose paths are equal only when joined are not mixed up, in any order of the keys."""

    def state(values: list[float]) -> dict[str, Any]:
        a, b, c, d, e, f = (torch.tensor([value]) for value in values)
        return {"l.0": a, "l": [b], "d": {"1": c, 1: d}, "a": {"b": e}, "a.b": f}

    sent, live = state([1, 2, 3, 4, 5, 6]), state([0] * 6)
    live = {**dict(reversed(live.items())), "d": dict(reversed(live["d"].items()))}
    assert_same_state(heal(sent, live), sent)
    assert [float(one) for one in torch.utils._pytree.tree_leaves(live)] == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("leaf", cases(ALONE))
def test_every_leaf_into_an_empty_live_state(leaf: Leaf, heal: Callable[..., Any]) -> None:
    """There is nothing to write into, so every leaf is returned in new memory."""
    value = leaf.value()
    received = heal(leaf.state(value), {}, trust=leaf.trust)
    assert_same_state(received, leaf.state(leaf.expect(value)))


FITTING: dict[str, Any] = {
    "first": torch.zeros(1 << 16),
    "w": torch.zeros(4),
    "inner": [torch.zeros(2), torch.zeros(2)],
    "scalar": torch.zeros(()),
    "last": nn.Parameter(torch.zeros(3)),
}


@pytest.mark.parametrize(
    ("wrong", "lines"),
    [
        ({"w": torch.zeros(5)}, [r"w: torch\.float32 \[5\] here"]),
        ({"w": torch.zeros(4, dtype=torch.float64)}, ["w: torch.float64"]),
        ({"w": torch.zeros(5), "inner": [torch.zeros(1), torch.zeros(3)]}, ["w: ", "inner.0: ", "inner.1: "]),
        ({"scalar": torch.zeros(1)}, ["scalar: "]),
        ({"w": torch.empty(4, device="meta")}, ["w: .*meta device"]),
        ({"w": torch.zeros(1).expand(4)}, ["w: .*share one place"]),
        ({"w": freed(torch.zeros(4))}, ["w: .*was freed"]),
        ({"w": freed(torch.zeros(8)[::2])}, ["w: .*was freed"]),
    ],
)
def test_a_mismatch_names_every_leaf_and_changes_nothing(
    wrong: dict[str, Any], lines: list[str], open_transport: Callable[..., Any]
) -> None:
    live = {"user": {**copy.deepcopy(FITTING), **wrong}, "step": 1}
    sent = {"user": torch.utils._pytree.tree_map(torch.ones_like, FITTING), "step": 2}
    source, target = open_transport(), open_transport(state_dict=lambda: live)
    source.send_checkpoint([1], 1, sent, TIMEOUT)
    with pytest.raises(
        tensorferry.StateMismatch, match="(?s)" + ".*".join(f"\n  user.{one}" for one in lines)
    ) as caught:
        target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).count("\n") == len(lines)
    assert not any(live["user"][name].any() for name in ("first", "scalar", "last"))
    # All goes on.
    live["user"] = copy.deepcopy(FITTING)
    received = target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert received["user"]["w"] is live["user"]["w"]
    assert live["user"]["w"].all()


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (lambda: torch.eye(3).to_sparse(), lambda: torch.ones(3, 3)),
        (lambda: torch.eye(3).to_sparse_csr(), lambda: torch.eye(3).to_sparse()),
        (lambda: torch.eye(3), lambda: torch.eye(3).to_sparse()),
        (lambda: torch.eye(3), lambda: torch.empty(3, 3, device="meta")),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_tensors_of_another_kind_are_named(
    here: Callable[[], torch.Tensor], there: Callable[[], torch.Tensor], heal: Callable[..., Any]
) -> None:
    live = {"direct": torch.zeros(2), "late": torch.zeros(2), "s": here()}
    with pytest.raises(tensorferry.StateMismatch, match=r"nothing was overwritten.*\n  s: .* here, .* at the source"):
        heal({"direct": torch.ones(2), "late": torch.ones(4)[::2], "s": there()}, live)
    assert not live["direct"].any()
    assert not live["late"].any()


@pytest.mark.parametrize("stock", [False, True])
def test_how_much_came_in_place_is_logged(
    stock: bool, open_transport: Callable[..., Any], open_stock: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """That nothing did is a warning, once: torchft's Manager sends the user's state below "user" and its name."""
    caplog.set_level("INFO", logger="tensorferry")
    live = {"a": torch.zeros(4), "b": torch.zeros(4)[::2], "gone": torch.zeros(1)}
    sent = {"a": torch.ones(4), "b": torch.ones(2), "new": torch.ones(3), "n": 1}
    source, target = open_stock() if stock else open_transport(), open_transport(state_dict=lambda: live)
    for step, state in enumerate((sent, {"user": {"default": sent}}, {"user": {"default": sent}})):
        source.send_checkpoint([1], step, state, TIMEOUT)
        target.recv_checkpoint(0, source.metadata(), step, TIMEOUT)
        source.disallow_checkpoint()
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("tensorferry")]
    assert sum("2 of 3 tensors in place (new is not in the live state" in text for _, text in lines) == 1
    assert sum("0 of 3 tensors in place" in text for _, text in lines) == 2
    (warning,) = [text for level, text in lines if level == "WARNING"]
    assert "none of the source's 3 tensors" in warning


@pytest.mark.parametrize("stock", [False, True])
def test_strict_refuses_what_only_one_side_has(
    stock: bool, open_transport: Callable[..., Any], open_stock: Callable[..., Any]
) -> None:
    live = {"a": torch.zeros(4), "gone": {"b": torch.zeros(2)}, "lr": 0.1}
    source = open_stock() if stock else open_transport()
    target = open_transport(state_dict=lambda: live, strict=True)
    source.send_checkpoint([1], 1, {"a": torch.ones(4), "new": [torch.ones(3)], "lr": 0.2}, TIMEOUT)
    with pytest.raises(tensorferry.StateMismatch) as caught:
        target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert "new.0: only at the source" in str(caught.value)
    assert "gone.b: only here" in str(caught.value)
    assert not live["a"].any()
    source.disallow_checkpoint()
    fitting = {"a": torch.ones(4), "gone": {"b": torch.ones(2)}, "other": "text"}
    source.send_checkpoint([1], 2, fitting, TIMEOUT)
    received = target.recv_checkpoint(0, source.metadata(), 2, TIMEOUT)
    source.disallow_checkpoint()
    assert received["a"] is live["a"]
    assert live["a"].all()


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("given", [None, 3, nn.Linear(2, 2), "text"])
def test_a_callable_that_gives_no_state_is_refused_before_anything_is_fetched(
    given: Any, stock: bool, open_transport: Callable[..., Any], open_stock: Callable[..., Any]
) -> None:
    fetched: list[int] = []
    source = open_stock() if stock else open_transport()
    target = open_transport(state_dict=lambda: given, progress=lambda here, _: fetched.append(here))
    source.send_checkpoint([1], 1, {"w": torch.ones(4)}, TIMEOUT)
    with pytest.raises(tensorferry.errors.InvalidArgument, match="state_dict= gave"):
        target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    source.disallow_checkpoint()
    assert not any(fetched)
