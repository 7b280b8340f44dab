"""With `state_dict=`, a receive writes into the live tensors and returns the live state."""

from __future__ import annotations

import collections
import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

from equality import METADATA, assert_same_state
from leaf import Leaf
from leaves import ALONE, cases
from pickled_classes import Colour, Point

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = timedelta(seconds=30)

pytestmark = [pytest.mark.timeout(60), pytest.mark.beyond_torchft]


@pytest.fixture(params=[0, 3])
def heal(request: pytest.FixtureRequest, open_transport: Callable[..., Any]) -> Callable[..., Any]:
    """Sends one state and receives it into another."""

    def heal(sent: Any, live: Any, *, trust: bool = False) -> Any:
        source = open_transport(request.param)
        target = open_transport(request.param, state_dict=lambda: live, trust_pickle=trust)
        source.send_checkpoint([1], 4, sent, TIMEOUT)
        return target.recv_checkpoint(0, source.metadata(), 4, TIMEOUT)

    return heal


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Frees the storage of a tensor, as FSDP does with parameters between steps."""
    tensor.untyped_storage().resize_(0)
    return tensor


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3, dtype=torch.bfloat16))


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(5, 8)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_written_where_the_live_tensors_lie(heal: Callable[..., Any]) -> None:
    live = {"user": {"model": net(1).state_dict()}, "list": [torch.zeros(3), torch.zeros(())], "step": 0}
    sent = {"user": {"model": net(2).state_dict()}, "list": [torch.ones(3), torch.tensor(7.0)], "step": 9}
    tensors = {**live["user"]["model"], "l0": live["list"][0], "l1": live["list"][1]}
    where = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    received = heal(sent, live)
    assert_same_state(received, sent)
    got = {**received["user"]["model"], "l0": received["list"][0], "l1": received["list"][1]}
    for name, tensor in tensors.items():
        assert got[name] is tensor, name
        assert tensor.data_ptr() == where[name]
    assert received["step"] == 9


def test_a_live_module_follows(heal: Callable[..., Any]) -> None:
    """A module's state_dict() holds views of its parameters, so writing to them changes the module."""
    healthy, broken = net(3), net(4)
    heal({"model": healthy.state_dict()}, {"model": broken.state_dict()})
    for (name, mine), theirs in zip(broken.named_parameters(), healthy.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert mine.requires_grad
    for mine, theirs in zip(broken.buffers(), healthy.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_parameters_stay_parameters(heal: Callable[..., Any]) -> None:
    live = {"w": nn.Parameter(torch.zeros(4, 3)), "frozen": nn.Parameter(torch.zeros(2), requires_grad=False)}
    sent = {"w": torch.ones(4, 3), "frozen": torch.ones(2)}
    kept = dict(live)
    live["w"].grad = torch.full((4, 3), 5.0)
    received = heal(sent, live)
    for name in kept:
        assert received[name] is kept[name]
        assert type(kept[name]) is nn.Parameter
        assert torch.equal(kept[name], sent[name])
    assert kept["w"].requires_grad
    assert kept["w"].is_leaf
    assert not kept["frozen"].requires_grad
    assert torch.equal(kept["w"].grad, torch.full((4, 3), 5.0))
    kept["w"].sum().backward()


def test_sent_parameters_into_plain_tensors(heal: Callable[..., Any]) -> None:
    live = {"w": torch.zeros(4)}
    received = heal({"w": nn.Parameter(torch.arange(4.0))}, live)
    assert received["w"] is live["w"]
    assert torch.equal(live["w"].detach(), torch.arange(4.0))


def targets() -> dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
    """Returns buffers full of -1, and for each the view that is the live tensor."""
    return {
        "transposed": (torch.full((4, 6), -1.0), lambda b: b.t()),
        "every other": (torch.full((48,), -1.0), lambda b: b[::2].view(6, 4)),
        "window": (torch.full((10, 10), -1.0), lambda b: b[2:8, 3:7]),
        "offset": (torch.full((40,), -1.0), lambda b: b[9:33].view(6, 4)),
        "last element of rows": (torch.full((6, 4, 3), -1.0), lambda b: b[:, :, 2]),
        "transposed view": (torch.full((2, 4, 3), -1.0), lambda b: b.view(4, 6).t()),
    }


@pytest.mark.parametrize("name", list(targets()))
@pytest.mark.parametrize("sent_as", ["contiguous", "transposed", "window"])
def test_strided_targets(name: str, sent_as: str, heal: Callable[..., Any]) -> None:
    values = torch.arange(24.0).view(6, 4)
    sent = {
        "contiguous": values,
        "transposed": values.t().contiguous().t(),
        "window": torch.nn.functional.pad(values, (1, 1, 1, 1))[1:-1, 1:-1],
    }[sent_as]
    buffer, look = targets()[name]
    live = look(buffer)
    expected = buffer.clone()
    look(expected).copy_(values)
    stride = live.stride()
    received = heal({"w": sent, "other": 1}, {"w": live, "other": 0})
    assert received["w"] is live
    assert live.stride() == stride
    assert torch.equal(buffer, expected), "values in place, and nothing else of the buffer touched"


def test_channels_last_target(heal: Callable[..., Any]) -> None:
    live = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    heal({"w": torch.arange(120.0).view(2, 3, 4, 5)}, {"w": live})
    assert torch.equal(live, torch.arange(120.0).view(2, 3, 4, 5))
    assert live.is_contiguous(memory_format=torch.channels_last)


def test_tied_weights_stay_tied(heal: Callable[..., Any]) -> None:
    weight = torch.zeros(5)
    live = {"a": weight, "b": weight, "view": weight[1:3]}
    source = torch.arange(5.0)
    received = heal({"a": source, "b": source, "view": source[1:3]}, live)
    assert received["a"] is weight
    assert received["b"] is weight
    assert received["view"] is live["view"]
    assert torch.equal(weight, source)


def test_tied_there_and_separate_here(heal: Callable[..., Any]) -> None:
    source = torch.arange(5.0)
    live = {"a": torch.zeros(5), "b": torch.zeros(5)}
    received = heal({"a": source, "b": source}, live)
    for name in live:
        assert received[name] is live[name]
        assert torch.equal(live[name], source)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64,
     torch.complex128, torch.float8_e4m3fn, torch.uint16],
)  # fmt: skip
def test_dtypes(dtype: torch.dtype, heal: Callable[..., Any]) -> None:
    live = torch.zeros(32, dtype=torch.uint8).view(dtype)
    sent = (torch.arange(32) % (2 if dtype == torch.bool else 256)).to(torch.uint8).view(dtype)
    received = heal({"w": sent}, {"w": live})
    assert received["w"] is live
    assert torch.equal(live.view(torch.uint8), sent.view(torch.uint8))


def test_other_leaves_are_replaced(heal: Callable[..., Any]) -> None:
    live = {"w": torch.zeros(2), "lr": 0.1, "name": "old", "betas": (0.9, 0.9), "none": None, "flag": False, "set": {1}}
    sent = {"w": torch.ones(2), "lr": 0.2, "name": "new", "betas": (0.5, 0.6), "none": 3, "flag": None, "set": {2, 3}}
    received = heal(sent, live)
    assert_same_state(received, sent)
    assert received["w"] is live["w"]


def test_optimizer_state_that_is_not_there_yet_comes_fresh(heal: Callable[..., Any]) -> None:
    """A replica that has just started has no moments: the optimizer makes them in its first step."""
    model, optimizer = trained(1)
    fresh = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    sleeping = torch.optim.AdamW(fresh.parameters(), lr=9.0)
    sent = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    live = {"model": fresh.state_dict(), "optim": sleeping.state_dict()}
    kept = dict(live["model"])
    received = heal(sent, live)
    assert_same_state(received, sent)
    for name, tensor in kept.items():
        assert received["model"][name] is tensor
    sleeping.load_state_dict(received["optim"])
    assert_same_state(sleeping.state_dict(), optimizer.state_dict())


def test_optimizer_state_that_is_there_is_written_in_place(heal: Callable[..., Any]) -> None:
    (_, healthy), (_, broken) = trained(1), trained(2, steps=1)
    live = {"optim": broken.state_dict()}
    moments = {(k, name): t for k, one in live["optim"]["state"].items() for name, t in one.items()}
    received = heal({"optim": healthy.state_dict()}, live)
    assert_same_state(received, {"optim": healthy.state_dict()})
    for (k, name), tensor in moments.items():
        assert received["optim"]["state"][k][name] is tensor
        assert torch.equal(tensor, healthy.state_dict()["state"][k][name])


def test_containers_of_all_kinds(heal: Callable[..., Any]) -> None:
    def state(value: float) -> dict[str, Any]:
        return {
            "named": Point(torch.full((2,), value), [torch.full((3,), value)]),
            "deque": collections.deque([torch.full((1,), value)]),
            "ordered": collections.OrderedDict([(1, torch.full((1,), value)), ("1", torch.full((2,), value))]),
            3: (torch.full((1,), value),),
        }

    live, sent = state(0.0), state(5.0)
    kept = torch.utils._pytree.tree_leaves(live)
    received = heal(sent, live, trust=True)
    assert_same_state(received, sent)
    for number, (mine, tensor) in enumerate(zip(torch.utils._pytree.tree_leaves(received), kept, strict=True)):
        assert mine is tensor, f"leaf {number}: {mine} in place of {tensor}"


def test_colliding_paths_are_not_mixed_up(heal: Callable[..., Any]) -> None:
    """Leaves whose paths are equal only when joined are not mixed up, in any order of the keys."""
    live: dict[str, Any] = {
        "a.b": torch.zeros(1),
        "a": {"b": torch.zeros(1)},
        "d": {1: torch.zeros(1), "1": torch.zeros(1)},
        "l": [torch.zeros(1)],
        "l.0": torch.zeros(1),
    }
    sent: dict[str, Any] = {
        "l.0": torch.tensor([1.0]),
        "l": [torch.tensor([2.0])],
        "d": {"1": torch.tensor([3.0]), 1: torch.tensor([4.0])},
        "a": {"b": torch.tensor([5.0])},
        "a.b": torch.tensor([6.0]),
    }
    received = heal(sent, live)
    assert_same_state(received, sent)
    for mine, theirs in (
        (live["l.0"], 1.0),
        (live["l"][0], 2.0),
        (live["d"]["1"], 3.0),
        (live["d"][1], 4.0),
        (live["a"]["b"], 5.0),
        (live["a.b"], 6.0),
    ):
        assert float(mine) == theirs, "another leaf's value, or none, was written here"


def test_keys_that_are_objects_find_their_own_tensor(heal: Callable[..., Any]) -> None:
    keys = [(1, 2), (3, 4), 1.5, frozenset({7}), Colour.RED, 1 << 70]
    sent = {"d": {key: torch.full((2,), float(n + 1)) for n, key in enumerate(keys)}}
    live: dict[str, Any] = {"d": {key: torch.zeros(2) for key in reversed(keys[:-1])}}
    received = heal(sent, live, trust=True)
    assert_same_state(received, sent)
    for key, mine in live["d"].items():
        assert received["d"][key] is mine
        assert torch.equal(mine, sent["d"][key]), f"the tensor of another key, or none, was written to {key}"


def test_order_of_keys_does_not_matter(heal: Callable[..., Any]) -> None:
    live = {"b": torch.zeros(2), "a": torch.zeros(3)}
    received = heal({"a": torch.ones(3), "b": torch.full((2,), 2.0)}, live)
    assert received["a"] is live["a"]
    assert received["b"] is live["b"]
    assert torch.equal(live["a"], torch.ones(3))
    assert torch.equal(live["b"], torch.full((2,), 2.0))


@pytest.mark.usefixtures("process_group")
def test_dtensors(heal: Callable[..., Any]) -> None:
    mesh = DeviceMesh("cpu", [0])
    live = {"w": nn.Parameter(distribute_tensor(torch.zeros(8), mesh, [Replicate()]))}
    sent = {"w": nn.Parameter(distribute_tensor(torch.arange(8.0), mesh, [Replicate()]))}
    local = live["w"].to_local()
    received = heal(sent, live)
    assert_same_state(received, sent)
    assert received["w"] is live["w"]
    assert received["w"].to_local().data_ptr() == local.data_ptr()


@pytest.mark.parametrize("leaf", cases(ALONE))
def test_every_leaf_into_an_empty_live_state(leaf: Leaf, heal: Callable[..., Any]) -> None:
    """There is nothing to write into, so every leaf is returned in new memory."""
    value = leaf.value()
    received = heal(leaf.state(value), {}, trust=leaf.trust)
    assert_same_state(received, leaf.state(leaf.expect(value)))


def snapshot_of(state: Any) -> Any:
    return copy.deepcopy(state)


@pytest.mark.parametrize(
    ("wrong", "paths"),
    [
        ({"w": torch.zeros(5)}, ["user.w"]),
        ({"w": torch.zeros(4, dtype=torch.float64)}, ["user.w"]),
        ({"w": torch.zeros(2, 2)}, ["user.w"]),
        ({"w": torch.zeros(4, dtype=torch.int32)}, ["user.w"]),
        ({"w": torch.zeros(5), "inner": [torch.zeros(1), torch.zeros(3)]}, ["user.w", "user.inner.0", "user.inner.1"]),
        ({"last": nn.Parameter(torch.zeros(7))}, ["user.last"]),
        ({"scalar": torch.zeros(1)}, ["user.scalar"]),
    ],
)
def test_mismatch_names_every_leaf_and_changes_nothing(
    wrong: dict[str, Any], paths: list[str], heal: Callable[..., Any]
) -> None:
    import tensorferry

    fitting = {
        "first": torch.zeros(1 << 16),
        "w": torch.zeros(4),
        "inner": [torch.zeros(2), torch.zeros(2)],
        "scalar": torch.zeros(()),
        "last": nn.Parameter(torch.zeros(3)),
    }
    sent = {"user": {name: torch.utils._pytree.tree_map(torch.ones_like, value) for name, value in fitting.items()}}
    live = {"user": {**fitting, **wrong}, "step": 1}
    before = snapshot_of(live)
    with pytest.raises(tensorferry.StateMismatch) as caught:
        heal({**sent, "step": 2}, live)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, tensorferry.TensorferryError)
    for path in paths:
        assert path in str(caught.value)
    for path in {"user.first", "user.w", "user.inner.0", "user.inner.1", "user.scalar", "user.last"} - set(paths):
        assert path not in str(caught.value)
    assert_same_state(live, before)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.empty(4, device="meta"), "meta device"),
        (lambda: torch.zeros(1).expand(4), "share one place"),
        (lambda: freed(torch.zeros(4)), "was freed"),
        (lambda: nn.Parameter(freed(torch.zeros(4))), "was freed"),
        (lambda: freed(torch.zeros(8)[::2]), "was freed"),
    ],
)
def test_targets_that_cannot_be_written_to_are_named_and_nothing_changes(
    make: Callable[[], torch.Tensor], why: str, heal: Callable[..., Any]
) -> None:
    import tensorferry

    live = {"first": torch.zeros(4), "w": make(), "x": {"last": torch.zeros(2)}}
    with pytest.raises(tensorferry.StateMismatch, match=rf"w: .*{why}"):
        heal({"first": torch.ones(4), "w": torch.ones(4), "x": {"last": torch.ones(2)}}, live)
    assert not live["first"].any()
    assert not live["x"]["last"].any()


@pytest.mark.parametrize("here", ["behind its storage", "expanded", "of freed memory", "plain"])
@pytest.mark.parametrize("there", ["behind its storage", "expanded", "of freed memory", "plain"])
def test_tensors_without_elements_need_no_memory(here: str, there: str, heal: Callable[..., Any]) -> None:
    make: dict[str, Callable[[], torch.Tensor]] = {
        "behind its storage": lambda: torch.zeros(0, 6)[:, 2:4],
        "expanded": lambda: torch.zeros(0, 1).expand(0, 2),
        "of freed memory": lambda: freed(torch.zeros(4, 6)[4:][:, 2:4]),
        "plain": lambda: torch.zeros(0, 2),
    }
    live = {"w": torch.zeros(2), "empty": make[here]()}
    received = heal({"w": torch.ones(2), "empty": make[there]()}, live)
    assert received["empty"] is live["empty"]
    assert live["w"].all()


def test_a_sparse_target_of_a_dense_tensor_is_named_and_nothing_changes(heal: Callable[..., Any]) -> None:
    import tensorferry

    live = {"first": torch.zeros(4), "s": torch.eye(3).to_sparse()}
    with pytest.raises(tensorferry.StateMismatch, match=r"s: sparse_coo here, strided at the source"):
        heal({"first": torch.ones(4), "s": torch.ones(3, 3)}, live)
    assert not live["first"].any()


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (lambda: torch.eye(3).to_sparse(), lambda: torch.ones(3, 6)[:, ::2]),
        (lambda: torch.eye(3).to_sparse_csr(), lambda: torch.eye(3).to_sparse()),
        (lambda: torch.eye(3), lambda: torch.eye(3).to_sparse()),
        (lambda: torch.eye(3), lambda: torch.empty(3, 3, device="meta")),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_tensors_of_another_kind_are_named(
    here: Callable[[], torch.Tensor], there: Callable[[], torch.Tensor], heal: Callable[..., Any]
) -> None:
    import tensorferry

    live = {"direct": torch.zeros(2), "late": torch.zeros(2), "s": here()}
    with pytest.raises(tensorferry.StateMismatch, match=r"nothing was overwritten.*\n  s: .* here, .* at the source"):
        heal({"direct": torch.ones(2), "late": torch.ones(4)[::2], "s": there()}, live)
    assert not live["direct"].any()
    assert not live["late"].any()


def test_what_torch_cannot_copy_is_named(heal: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorferry
    from tensorferry.state import in_place

    def fail(*_: Any) -> None:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(in_place, "copy_into", fail)
    with pytest.raises(tensorferry.StateMismatch, match=r"^s cannot take .*no kernel"):
        heal({"s": torch.ones(4)[::2]}, {"s": torch.zeros(2)})


def test_after_a_mismatch_all_goes_on(open_transport: Callable[..., Any]) -> None:
    import tensorferry

    live = {"w": torch.zeros(4)}
    source, target = open_transport(), open_transport(state_dict=lambda: live)
    source.send_checkpoint([1], 1, {"w": torch.ones(5)}, TIMEOUT)
    with pytest.raises(tensorferry.StateMismatch, match=r"\bw\b"):
        target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    source.send_checkpoint([1], 2, {"w": torch.ones(4)}, TIMEOUT)
    assert target.recv_checkpoint(0, source.metadata(), 2, TIMEOUT)["w"] is live["w"]
    assert torch.equal(live["w"], torch.ones(4))


def test_live_state_is_asked_for_at_every_receive(open_transport: Callable[..., Any]) -> None:
    made: list[dict[str, torch.Tensor]] = []

    def live() -> dict[str, torch.Tensor]:
        made.append({"w": torch.zeros(4)})
        return made[-1]

    source, target = open_transport(), open_transport(state_dict=live)
    for step in (1, 2):
        source.send_checkpoint([1], step, {"w": torch.full((4,), float(step))}, TIMEOUT)
        assert target.recv_checkpoint(0, source.metadata(), step, TIMEOUT)["w"] is made[-1]["w"]
    assert len(made) == 2
    assert [float(one["w"][0]) for one in made] == [1.0, 2.0]


def test_error_of_the_callable_reaches_the_caller(open_transport: Callable[..., Any]) -> None:
    def live() -> Any:
        raise RuntimeError("the model is not built yet")

    source, target = open_transport(), open_transport(state_dict=live)
    source.send_checkpoint([1], 1, {"w": torch.ones(1)}, TIMEOUT)
    with pytest.raises(RuntimeError, match="not built yet"):
        target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)


def test_timeout_leaves_the_live_state_alone(open_transport: Callable[..., Any]) -> None:
    live = {"w": torch.zeros(1000)}
    source, target = open_transport(), open_transport(state_dict=lambda: live)
    with pytest.raises(TimeoutError):
        target.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=0.3))
    assert not live["w"].any()


@pytest.mark.parametrize("stock", [False, True])
def test_a_live_state_of_another_structure_is_logged_once(
    stock: bool, open_transport: Callable[..., Any], open_stock: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """torchft's Manager sends the user's state below "user" and the name it was registered with."""
    caplog.set_level("INFO", logger="tensorferry")
    model = net(1).state_dict()
    sent = {"user": {"default": {"model": net(2).state_dict()}}, "torchft": {"step": 3, "batches_committed": 6}}
    source = open_stock() if stock else open_transport()
    target = open_transport(state_dict=lambda: {"model": model})
    for step in (1, 2):
        source.send_checkpoint([1], step, sent, TIMEOUT)
        received = target.recv_checkpoint(0, source.metadata(), step, TIMEOUT)
        # torchft's transport loses the attributes of dicts, here `_metadata`.
        assert_same_state(received, sent, lax={METADATA} if stock else ())
        source.disallow_checkpoint()
    ours = [record for record in caplog.records if record.name == "tensorferry"]
    warnings = [record.getMessage() for record in ours if record.levelname == "WARNING"]
    assert len(warnings) == 1
    for part in ("none of the source's 9 tensors", "user.default.model.0.weight", "at model.0.weight here"):
        assert part in warnings[0]
    assert sum("0 of 9 tensors in place" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize("stock", [False, True])
def test_how_many_came_in_place_is_logged(
    stock: bool, open_transport: Callable[..., Any], open_stock: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tensorferry")
    live = {"a": torch.zeros(4), "b": torch.zeros(4)[::2], "gone": torch.zeros(1)}
    source, target = open_stock() if stock else open_transport(), open_transport(state_dict=lambda: live)
    source.send_checkpoint([1], 1, {"a": torch.ones(4), "b": torch.ones(2), "new": torch.ones(3), "n": 1}, TIMEOUT)
    target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    source.disallow_checkpoint()
    text = "2 of 3 tensors in place (new is not in the live state, so came into fresh memory)"
    assert any(text in record.getMessage() for record in caplog.records)
    assert not [record for record in caplog.records if (record.name, record.levelname) == ("tensorferry", "WARNING")]


@pytest.mark.parametrize("stock", [False, True])
def test_strict_refuses_what_only_one_side_has(
    stock: bool, open_transport: Callable[..., Any], open_stock: Callable[..., Any]
) -> None:
    import tensorferry

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


def test_strict_needs_a_live_state(open_transport: Callable[..., Any]) -> None:
    import tensorferry

    with pytest.raises(tensorferry.InvalidArgument, match="state_dict="):
        open_transport(strict=True)
    with pytest.raises(tensorferry.InvalidArgument, match="strict"):
        open_transport(strict="yes", state_dict=dict)


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("given", [None, 3, nn.Linear(2, 2), "text"])
def test_a_callable_that_gives_no_state_is_refused_before_anything_is_fetched(
    given: Any, stock: bool, open_transport: Callable[..., Any], open_stock: Callable[..., Any]
) -> None:
    import tensorferry

    fetched: list[int] = []
    source = open_stock() if stock else open_transport()
    target = open_transport(state_dict=lambda: given, progress=lambda here, _: fetched.append(here))
    source.send_checkpoint([1], 1, {"w": torch.ones(4)}, TIMEOUT)
    with pytest.raises(tensorferry.InvalidArgument, match="state_dict= gave"):
        target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    source.disallow_checkpoint()
    assert not any(fetched)


def test_the_state_of_a_manager_in_place(open_transport: Callable[..., Any]) -> None:
    """The state is that of torchft's own Manager, and `state_dict=` is used as in the README."""
    manager_of = pytest.importorskip("torchft.manager").Manager
    healthy, broken = trained(1), trained(2, steps=1)

    def state(pair: Any) -> dict[str, Any]:
        return {"model": pair[0].state_dict(), "optim": pair[1].state_dict()}

    manager = manager_of.__new__(manager_of)
    manager._user_state_dicts, manager._load_state_dict_fns = {}, {}
    manager._step, manager._batches_committed = 7, 14
    manager._state_dict_lock = pytest.importorskip("torchft.checkpointing._rwlock").RWLock(timeout=5)
    manager.register_state_dict_fn("default", lambda _: None, lambda: state(healthy))
    sent = manager._manager_state_dict()
    target = open_transport(state_dict=lambda: {"user": {"default": state(broken)}}, strict=True)
    source = open_transport()
    source.send_checkpoint([1], 7, sent, TIMEOUT)
    received = target.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)
    assert received["torchft"] == {"step": 7, "batches_committed": 14}
    assert_same_state(broken[0].state_dict(), healthy[0].state_dict())
    broken[1].load_state_dict(received["user"]["default"]["optim"])
    assert_same_state(broken[1].state_dict(), healthy[1].state_dict())


def test_after_the_shutdown_nothing_is_sent_or_received(open_transport: Callable[..., Any]) -> None:
    import tensorferry

    transport, other = open_transport(), open_transport()
    other.send_checkpoint([1], 1, {"w": torch.ones(1)}, TIMEOUT)
    metadata = transport.metadata()
    transport.shutdown()
    for call in (
        lambda: transport.send_checkpoint([1], 1, {"w": torch.ones(1)}, TIMEOUT),
        lambda: transport.allow_checkpoint(1),
        lambda: transport.recv_checkpoint(0, other.metadata(), 1, TIMEOUT),
    ):
        with pytest.raises(tensorferry.TransportClosed, match="shut down") as caught:
            call()
        assert isinstance(caught.value, RuntimeError)
    for _ in range(2):
        transport.disallow_checkpoint()
        transport.shutdown()
        transport.shutdown(wait=False)
    assert transport.metadata() == transport.address() == metadata
