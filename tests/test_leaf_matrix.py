"""Every kind of leaf and tree goes through a transport and comes back as it was."""

from __future__ import annotations

import collections
import contextlib
import math
import pickle
import string
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import nn

from equality import OBJECTS, STORAGES, assert_same_state
from leaf import Leaf
from leaves import CARRIED, CATALOGUE, cases
from object_leaves import REFUSED, adam, all_scalars, model
from pickled_classes import Box, Holder, PlainSubclass, Point, Slotted
from tensor_leaves import nan_payloads, random_bytes, with_attribute

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = timedelta(seconds=30)

# A body that does not end in time is a failure of the test, not of the whole run.
pytestmark = pytest.mark.timeout(60)


def send_and_receive(sender: Any, receiver: Any, state: Any, step: int = 1) -> Any:
    sender.send_checkpoint([1], step, state, TIMEOUT)
    return receiver.recv_checkpoint(0, sender.metadata(), step, TIMEOUT)


@pytest.fixture
def group_if_needed(request: pytest.FixtureRequest) -> None:
    if request.getfixturevalue("leaf").group:
        request.getfixturevalue("process_group")


def _with(tensor: torch.Tensor, index: int, value: float) -> torch.Tensor:
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float16)),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), nn.Parameter(torch.zeros(2))),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2), torch.zeros(2).requires_grad_()),
        (torch.zeros(2), torch.zeros(3)[:2]),
        (torch.zeros(2), torch.zeros(3)[1:]),
        (torch.zeros(3)[1:], torch.zeros(3)[:2]),
        (torch.zeros(4)[::2], torch.zeros(4)[:2]),
        (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64).conj()),
        (torch.zeros(2), with_attribute(torch.zeros(2))),
        (torch.zeros(2), torch.zeros(2).as_subclass(PlainSubclass)),
        (nan_payloads(), _with(nan_payloads(), 0, math.nan + 0)[torch.arange(7)].mul(1)),
        ([t := torch.zeros(2), t], [torch.zeros(2), torch.zeros(2)]),
        ([torch.zeros(2), torch.zeros(2)], [t := torch.zeros(2), t]),
        ([torch.zeros(4)[:2], torch.zeros(4)[2:]], list((t := torch.zeros(4)).split(2))),
        (list(torch.zeros(4).split(2)), [torch.zeros(4)[:2], torch.zeros(4)[2:]]),
        ([t := torch.zeros(2), t.detach()], [t := torch.zeros(2), t]),
        ([h := Holder(), h], [Holder(), Holder()]),
        (Holder(w=torch.zeros(2)), Holder(w=torch.ones(2))),
        (Holder(w=1), Holder(w=1, v=2)),
        (Slotted(1, 2), Slotted(1, 3)),
        (torch.eye(2).to_sparse(), (torch.eye(2) * 2).to_sparse()),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, collections.OrderedDict(a=1)),
        ({1: 1}, {True: 1}),
        ((1, 2), [1, 2]),
        (torch.Size([1]), (1,)),
        (Point(1, 2), (1, 2)),
        (model().state_dict(), collections.OrderedDict(model().state_dict())),
        (collections.deque([1], maxlen=2), collections.deque([1])),
        (collections.defaultdict(list), collections.defaultdict(dict)),
        (1, True),
        (1.0, 1),
        (0.0, -0.0),
        (all_scalars()[15], math.nan),
        (np.float64(1), 1.0),
        (np.zeros(2), np.zeros(2, dtype=np.float32)),
        (np.zeros(2), np.ones(2)),
        (Box(1, 2, "a"), Box(1, 2, "b")),
        (adam(1), adam(2)),
    ],
)
def test_the_comparison_sees_the_difference(actual: Any, expected: Any) -> None:
    with pytest.raises(AssertionError, match=r"^state"):
        assert_same_state(actual, expected)
    assert_same_state(actual, actual)
    assert_same_state(expected, expected)


@pytest.mark.parametrize("num_chunks", [0, 3])
@pytest.mark.parametrize("leaf", cases(CARRIED))
@pytest.mark.usefixtures("group_if_needed")
def test_leaf_comes_back_as_it_was(leaf: Leaf, num_chunks: int, open_transport: Callable[..., Any], ours: bool) -> None:
    value = leaf.value()
    sender, receiver = (open_transport(num_chunks, trust_pickle=leaf.trust) for _ in range(2))
    with contextlib.nullcontext() if ours or num_chunks in leaf.torchft else pytest.raises(Exception):  # noqa: PT011
        received = send_and_receive(sender, receiver, leaf.state(value))
        assert_same_state(received, leaf.state(leaf.expect(value)))


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("leaf", cases(CARRIED))
@pytest.mark.usefixtures("group_if_needed")
def test_sending_leaves_the_senders_state_alone(leaf: Leaf, open_transport: Callable[..., Any]) -> None:
    value = leaf.value()
    state = leaf.state(value)
    versions = [t._version for t in torch.utils._pytree.tree_leaves(state) if type(t) in (torch.Tensor, nn.Parameter)]
    transport = open_transport(trust_pickle=leaf.trust)
    transport.send_checkpoint([1], 1, state, TIMEOUT)
    transport.disallow_checkpoint()
    assert versions == [
        t._version for t in torch.utils._pytree.tree_leaves(state) if type(t) in (torch.Tensor, nn.Parameter)
    ]


@pytest.mark.parametrize("name", ["dtype float32", "Parameter", "transposed", "DTensor shard(0)", "sparse COO"])
@pytest.mark.parametrize("num_chunks", [0, 3])
@pytest.mark.usefixtures("process_group")
def test_received_memory_is_the_receivers_own(name: str, num_chunks: int, open_transport: Callable[..., Any]) -> None:
    """Writable, nobody else's, and a second receive is not the first one again."""
    state = CATALOGUE[name].state(CATALOGUE[name].value())
    sender, receiver = open_transport(num_chunks), open_transport(num_chunks)
    first = send_and_receive(sender, receiver, state)
    second = receiver.recv_checkpoint(0, sender.metadata(), 1, TIMEOUT)
    with torch.no_grad():
        first["user"]["leaf"].zero_()
        first["user"]["last"].fill_(9)
    assert_same_state(second, state)


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("leaf", cases(REFUSED))
@pytest.mark.parametrize("num_chunks", [0, 3])
def test_what_cannot_be_carried_is_refused_by_the_sender(
    leaf: Leaf, num_chunks: int, open_transport: Callable[..., Any]
) -> None:
    import tensorferry

    transport = open_transport(num_chunks, trust_pickle=True)
    started = time.monotonic()
    with pytest.raises(tensorferry.UnsupportedLeaf, match=r"\buser\.leaf\b"):
        transport.send_checkpoint([1], 1, leaf.state(leaf.value()), TIMEOUT)
    assert time.monotonic() - started < 10
    good = CATALOGUE["Adam.state_dict()"].value()
    assert_same_state(send_and_receive(transport, transport, good, step=2), good)


@pytest.mark.beyond_torchft
@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"user": {"model": {"lock": lambda: 0}}}, r"\buser\.model\.lock\b"),
        ({"user": [1, {"f": lambda: 0}]}, r"\buser\.1\.f\b"),
        ({"a": collections.OrderedDict(b=(1, 2, lambda: 0))}, r"\ba\.b\.2\b"),
        ({"a": {3: lambda: 0}}, r"\ba\.3\b"),
        ({"a": {"b": torch.ones(1), "c": lambda: 0, "d": torch.ones(1)}}, r"\ba\.c\b"),
    ],
)
def test_refusal_names_the_path(state: Any, path: str, open_transport: Callable[..., Any]) -> None:
    import tensorferry

    with pytest.raises(tensorferry.UnsupportedLeaf, match=path) as caught:
        open_transport().send_checkpoint([1], 1, state, TIMEOUT)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, tensorferry.TensorferryError)


@pytest.mark.beyond_torchft
def test_refusal_of_a_bare_root(open_transport: Callable[..., Any]) -> None:
    import tensorferry

    transport = open_transport()
    with pytest.raises(tensorferry.UnsupportedLeaf):
        transport.send_checkpoint([1], 1, lambda: 0, TIMEOUT)
    assert send_and_receive(transport, transport, 3, step=2) == 3


@pytest.mark.beyond_torchft
@pytest.mark.parametrize(
    "leaf", cases([leaf for leaf in CARRIED if leaf.trust and leaf.name in {
        "tensor subclass", "enum", "function, module-level", "class", "dataclass", "object with slots", "namedtuple",
        "wrapper subclass, __reduce_ex__", "dict subclass", "registered node", "defaultdict, own factory", "enum keys",
        "root is an object",
    }])
)  # fmt: skip
def test_a_class_off_the_allow_list_is_refused_by_name(leaf: Leaf, open_transport: Callable[..., Any]) -> None:
    import tensorferry

    transport = open_transport()
    with pytest.raises(tensorferry.UnsafePickle, match=r"\bpickled_classes\b") as caught:
        send_and_receive(transport, transport, leaf.state(leaf.value()))
    assert isinstance(caught.value, tensorferry.TensorferryError)
    assert isinstance(caught.value, pickle.UnpicklingError)
    # The tensors of the same state were never in the way: without the object all is well.
    assert_same_state(send_and_receive(transport, transport, {"w": torch.ones(2)}, step=2), {"w": torch.ones(2)})


class Attack:
    """Pickles as a call that a receiver must not make."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.beyond_torchft
@pytest.mark.parametrize(
    "attack",
    [
        Attack(exec, "raise SystemExit(99)"),
        Attack(eval, "1 + 1"),
        Attack(__import__("os").system, "exit 1"),
        Attack(__import__("subprocess").check_call, ["false"]),
        Attack(getattr, "", "join"),
        Attack(torch.load, "/nonexistent"),
        Attack(torch.hub.load, "a/b", "c"),
        Attack(__import__("importlib").import_module, "antigravity"),
        Attack(__import__("functools").partial, print, "called"),
        Attack(open, "/dev/null"),
        Attack(__import__("collections").defaultdict, exec),
        Attack(__import__("operator").attrgetter, "__class__"),
        Attack(__import__("numpy").load, "/nonexistent"),
        Attack(pickle.loads, b"N."),
    ],
    ids=lambda attack: f"{attack.call[0].__module__}.{attack.call[0].__qualname__}",
)
def test_a_hostile_pickle_is_not_run(attack: Attack, open_transport: Callable[..., Any]) -> None:
    import tensorferry

    transport = open_transport()
    with pytest.raises(tensorferry.UnsafePickle):
        send_and_receive(transport, transport, {"user": {"leaf": attack, "w": torch.ones(2)}})


@pytest.mark.beyond_torchft
def test_only_covered_bytes_travel(open_transport: Callable[..., Any]) -> None:
    """And what a tensor does not cover stays at home: it may be another user's data."""
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
    with contextlib.closing(_get(f"{transport.metadata()}1.safetensors")) as response:
        assert int(response.headers["Content-Length"]) < 64 << 10


def _get(url: str) -> Any:
    import urllib.request

    return urllib.request.urlopen(url, timeout=30)


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("num_chunks", [0, 3])
def test_bytes_of_shared_storages_travel_once(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    base = torch.arange(1 << 16, dtype=torch.float32)
    state = {
        "views": [base[i:] for i in range(64)],
        "dtype": base.view(torch.int16),
        "again": base,
        "rows": base.view(256, 256),
    }
    transport = open_transport(num_chunks)
    assert_same_state(send_and_receive(transport, transport, state), state)
    with contextlib.closing(_get(f"{transport.metadata()}1.safetensors")) as response:
        assert int(response.headers["Content-Length"]) < base.nbytes + (64 << 10)


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 8])
def test_fewer_leaves_than_chunks(num_chunks: int, open_transport: Callable[..., Any]) -> None:
    transport = open_transport(num_chunks)
    for step, state in enumerate([{}, {"a": torch.ones(3)}, [torch.ones(1), 2]], start=1):
        assert_same_state(send_and_receive(transport, transport, state, step), state)


@pytest.mark.parametrize(("there", "here"), [(0, 3), (3, 0), (3, 5), (5, 3)])
@pytest.mark.beyond_torchft
def test_chunk_counts_need_not_agree(there: int, here: int, open_transport: Callable[..., Any]) -> None:
    state = {"model": CATALOGUE["tied weights state_dict"].value(), "optim": CATALOGUE["Adam.state_dict()"].value()}
    assert_same_state(send_and_receive(open_transport(there), open_transport(here), state), state)


# ---------------------------------------------------------------------------------------------------------------------
# Random trees

PLAIN_DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.float8_e4m3fn]
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=6)
KEYS = st.one_of(
    ANY_TEXT,
    st.sampled_from(["a", "b", "a.b", "weight", "__metadata__", "__tensorferry__/manifest", "0", ""]),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.tuples(st.integers(0, 3), st.sampled_from("ab")),
    st.binary(max_size=3),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), ANY_TEXT, st.binary(max_size=8), st.complex_numbers()
)


@st.composite
def tensor_leaf(draw: Any, pool: dict[int, torch.Tensor], made: list[torch.Tensor]) -> torch.Tensor:
    """A tensor of its own, a view into one of a few shared storages, or one that was drawn before."""
    kind = draw(st.sampled_from(["own", "own", "view", "again"]))
    if kind == "again" and made:
        return draw(st.sampled_from(made))
    dtype = draw(st.sampled_from(PLAIN_DTYPES))
    if kind == "view":
        number = draw(st.integers(0, 2))
        tensor = pool.setdefault(number, random_bytes(256, seed=number)).view(dtype)
    else:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        count = torch.Size(shape).numel()
        tensor = random_bytes(count * dtype.itemsize, seed=draw(st.integers(0, 9))).view(dtype).reshape(shape)
    for _ in range(draw(st.integers(0, 2))):
        how = draw(st.sampled_from(["slice", "step", "transpose", "expand", "unsqueeze"]))
        if how == "expand":
            tensor = tensor.expand(2, *tensor.shape)
        elif how == "unsqueeze":
            tensor = tensor.unsqueeze(-1)
        elif tensor.dim() and how == "slice":
            low = draw(st.integers(0, tensor.shape[0]))
            tensor = tensor[low : draw(st.integers(low, tensor.shape[0]))]
        elif tensor.dim() and how == "step":
            tensor = tensor[:: draw(st.integers(1, 3))]
        elif tensor.dim() > 1 and how == "transpose":
            tensor = tensor.transpose(0, -1)
    if dtype.is_floating_point:
        wrap = draw(st.sampled_from([None, None, "grad", "parameter", "frozen", "attribute"]))
        if wrap == "grad":
            tensor = tensor.detach().requires_grad_()
        elif wrap in ("parameter", "frozen"):
            tensor = nn.Parameter(tensor, requires_grad=wrap == "parameter")
        elif wrap == "attribute":
            tensor = with_attribute(tensor.detach(), draw(SCALARS))
    made.append(tensor)
    return tensor


@st.composite
def trees(draw: Any) -> Any:
    pool: dict[int, torch.Tensor] = {}
    made: list[torch.Tensor] = []
    sizes = st.lists(st.integers(0, 9), max_size=3).map(torch.Size)
    leaf = st.one_of(
        tensor_leaf(pool, made),
        tensor_leaf(pool, made),
        SCALARS,
        sizes,
        st.sampled_from(PLAIN_DTYPES),
        st.frozensets(st.integers(), max_size=3),
    )

    def containers(inner: Any) -> Any:
        pairs = st.dictionaries(KEYS, inner, max_size=5)
        named = st.dictionaries(st.sampled_from(list(string.ascii_lowercase)), inner, max_size=5)
        several = st.lists(inner, max_size=5)
        return st.one_of(
            named,
            named,
            pairs,
            several,
            several.map(tuple),
            pairs.map(collections.OrderedDict),
            pairs.map(lambda d: collections.defaultdict(list, d)),
            several.map(collections.deque),
            several.map(lambda items: Holder(items=items)),
            st.tuples(inner, inner).map(lambda pair: Point(*pair)),
            st.tuples(inner, inner, SCALARS).map(lambda three: Box(*three)),
        )

    return draw(st.recursive(leaf, containers, max_leaves=12))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_chunks", [0, 3])
def test_random_trees_come_back_as_they_were(num_chunks: int, open_transport: Callable[..., Any], ours: bool) -> None:
    sender, receiver = (open_transport(num_chunks, trust_pickle=True) for _ in range(2))
    step = 0

    @hypothesis.given(trees())
    def check(state: Any) -> None:
        nonlocal step
        step += 1
        if not ours and _torchft_cannot(state):
            return
        received = send_and_receive(sender, receiver, state, step)
        assert_same_state(received, state, lax=() if ours else (STORAGES, OBJECTS, "size"))
        sender.disallow_checkpoint()

    check()


def _torchft_cannot(state: Any) -> bool:
    """One storage looked at in several dtypes, or float8 that requires grad: torch's own pickling fails on these."""
    seen: dict[int, torch.dtype] = {}

    def tensors(node: Any) -> Any:
        for leaf in torch.utils._pytree.tree_leaves(node):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif isinstance(leaf, Holder):
                yield from tensors(leaf.items)

    return any(
        (t.dtype == torch.float8_e4m3fn and t.requires_grad and not isinstance(t, nn.Parameter))
        or seen.setdefault(t.untyped_storage()._cdata, t.dtype) != t.dtype
        for t in tensors(state)
    )
