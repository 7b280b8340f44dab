"""Random trees, with tensors that share storages and other objects, arrive unchanged."""

from __future__ import annotations

import collections
import string
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

from equality import OBJECTS, STORAGES, assert_same_state
from exchange import send_and_receive
from leaves import random_bytes, with_attribute
from nights import mostly_at_night
from pickled_classes import Box, Holder, Point

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Draws a tensor with a storage of its own, a view of one of a few shared storages, or a tensor drawn before."""
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


@pytest.mark.waits
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_chunks", mostly_at_night([0, 3]))
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
    """Whether torch's own pickling fails: for a storage viewed in several dtypes, or float8 that requires grad."""
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
