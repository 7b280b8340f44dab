"""Objects are pickled natively where their pickle is known, and by Python otherwise: a receiver gets the same from both."""

from __future__ import annotations

import collections
import copyreg
import datetime
import io
import math
import pickle
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import nn

from equality import assert_same_state
from exchange import send_and_receive
from pickled_classes import Colour, DictSubclass, FailsToPickle, Holder, Level, ListSubclass, Slotted, StrSubclass
from tensorferry import UnsupportedLeaf
from tensorferry.state import pickling, tree

if TYPE_CHECKING:
    from collections.abc import Callable

#: Where the encoding of an integer changes.
EDGES = [sign * (1 << bits) + off for bits in (8, 16, 31, 32, 53, 63, 64, 80) for sign in (1, -1) for off in (-1, 0, 1)]
NUMBERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 300), 1 << 300),
    st.sampled_from(EDGES),
    st.floats(),
    st.sampled_from([math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324]),
    st.complex_numbers(),
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=6),
    st.sampled_from(["", "typed", "leaf", "float32", "\ud800", "a\udfffb", "\U0001f980", "h\x05.", "x" * 255, "é" * 300]),
    st.sampled_from([b"", b"h\x05.", b"\x94" * 9, b"b" * 256, bytearray(b"mutable")]),
)
DTYPES = [
    "?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "g", "F", "D", "G",
    ">i2", ">f4", ">c8", "M8[s]", "m8[ns]", "S3", "U2", "V5", "O", "i4,f8", [("a", "<i4"), ("b", ">f8", (2,))],
]  # fmt: skip


class Integer(int):
    pass


class Array(np.ndarray):
    pass


class Marked(torch.Tensor):
    pass


class Reduced:
    """Is pickled as a call, with a state."""

    def __init__(self, name: Any) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return Reduced, (self.name,), self.__dict__


@st.composite
def arrays(draw: Any) -> Any:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    if draw(st.integers(0, 9)) == 0 and not dtype.hasobject:
        dtype = np.dtype(dtype, metadata={"unit": "m"})
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = int(np.prod(shape))
    if dtype.hasobject:
        made = np.array([None, "text", 3, (1, 2)] * count, dtype)[:count].reshape(shape)
    else:
        made = (np.arange(count * dtype.itemsize) % 2).astype(np.uint8).view(dtype).reshape(shape)
    how = draw(st.sampled_from(["as it is", "transposed", "fortran", "step", "expanded", "masked", "class", "scalar", "read only"]))
    if how == "transposed":
        return made.T
    if how == "fortran":
        return np.asfortranarray(made)
    if how == "step":
        return made[::2] if made.ndim else made
    if how == "expanded":
        return np.broadcast_to(made, (2, *made.shape))
    if how == "masked" and not dtype.hasobject and dtype.names is None:
        return np.ma.MaskedArray(made, mask=np.zeros(made.shape, bool))
    if how == "class":
        return made.view(Array)
    if how == "scalar" and made.size and not dtype.hasobject:
        return made.reshape(-1)[0]
    if how == "read only":
        made.flags.writeable = False
    return made


@st.composite
def tensors(draw: Any, pool: dict[int, torch.Tensor]) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.uint16]))
    number = draw(st.integers(0, 2))
    whole = pool.setdefault(number, (torch.arange(256) % 2 if number else torch.zeros(256)).to(torch.uint8))
    made = whole.view(dtype)
    how = draw(st.sampled_from(["own", "part", "step", "expanded", "square", "unsqueezed", "empty"]))
    if how == "own":
        made = made[:7].clone()
    elif how == "part":
        made = made[3:9]
    elif how == "step":
        made = made[1::3]
    elif how == "expanded":
        made = made[2].expand(2, 3)
    elif how == "square":
        made = made[:16].view(4, 4).T
    elif how == "unsqueezed":
        made = made[:1].as_strided((1, 3, 1), (9, 1, 7))
    elif how == "empty":
        made = made[:0]
    wrap = draw(st.sampled_from(["", "", "grad", "parameter", "frozen", "attribute", "class"]))
    if wrap == "class":
        return made.as_subclass(Marked)
    if wrap == "attribute":
        made.note = "kept"  # type: ignore[attr-defined]
    elif wrap == "frozen":
        return nn.Parameter(made, requires_grad=False)
    elif dtype.is_floating_point and wrap == "parameter":
        return nn.Parameter(made)
    elif dtype.is_floating_point and wrap == "grad":
        return made.detach().requires_grad_()
    return made


@st.composite
def states(draw: Any, classes: bool) -> Any:
    """Draws a state; unless `classes`, one that a receiver reads without trusting the source."""
    made: list[Any] = []
    values = st.one_of(NUMBERS, TEXTS, arrays(), arrays(), tensors({}), tensors({}))
    if not classes:
        values = values.filter(lambda v: type(v) not in (Array, Marked, np.ma.MaskedArray))
    others = st.sampled_from([torch.float32, torch.Size([2]), datetime.timedelta(3), {1, 2}, slice(3), Ellipsis])

    def wrapped(inner: Any) -> Any:
        plain = [
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from(["a", "b", "\ud800", 1, True, None, 2**70, (1, "a")]), inner, max_size=4),
            st.dictionaries(st.integers(-3, 3), inner, max_size=3).map(collections.OrderedDict),
            st.lists(inner, max_size=3).map(collections.deque),
            # A list in an object is pickled with it.
            st.lists(inner, min_size=1, max_size=3).map(in_array),
        ]
        if not classes:
            return st.one_of(*plain)
        return st.one_of(
            *plain,
            st.lists(inner, max_size=3).map(lambda items: Holder(items=items)),
            st.lists(inner, max_size=3).map(cycle),
            st.tuples(inner, inner).map(lambda pair: Slotted(*pair)),
            inner.map(Reduced),
            st.lists(inner, max_size=3).map(ListSubclass),
            inner.map(lambda value: DictSubclass(a=value)),
            st.sampled_from([StrSubclass("s"), Integer(3), Level.HIGH, Colour.RED]),
        )

    def again(value: Any) -> Any:
        made.append(value)
        return value

    leaf = st.one_of(values, values, values, others).map(again)
    node = st.recursive(st.one_of(leaf, leaf, st.integers(0, 9).map(lambda n: made[n % len(made)] if made else n)), wrapped)
    return draw(st.lists(node, max_size=6))


def in_array(items: list[Any]) -> Any:
    made = np.empty(1, object)
    made[0] = items
    return made


def cycle(items: list[Any]) -> Holder:
    made = Holder(items=items)
    made.me = [made]
    return made


@pytest.mark.beyond_torchft
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trust", [True, False])
def test_a_receiver_gets_the_same_from_both(
    trust: bool, open_transport: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = open_transport(), open_transport(trust_pickle=trust)
    step = 0
    native = pickling._pickle_objects
    pickled = 0

    def counting(*arguments: Any) -> bytes | None:
        nonlocal pickled
        data = native(*arguments)
        pickled += data is not None
        return data

    @hypothesis.given(states(trust))
    def check(state: Any) -> None:
        nonlocal step
        received = []
        for function in (counting, lambda *_: None):
            step += 1
            monkeypatch.setattr(pickling, "_pickle_objects", function)
            received.append(send_and_receive(sender, receiver, state, step))
            assert_same_state(received[-1], state)
            sender.disallow_checkpoint()
        assert_same_state(*received)
        assert layouts(received[0]) == layouts(received[1])

    check()
    assert pickled > step // 4


def layouts(state: Any) -> list[Any]:
    """Returns what `assert_same_state` does not compare of the arrays in a state's containers."""
    leaves = torch.utils._pytree.tree_leaves(state)
    return [(a.strides, str(a.flags), a.dtype.str) for a in leaves if isinstance(a, np.ndarray)]


def dump(state: Any) -> bytes:
    return pickling.dump(tree.flatten(state))[0]


def test_thousands_of_objects_keep_their_order_and_identity(open_transport: Callable[..., Any]) -> None:
    """More than a batch of a list, a frame, and a byte of memo numbers."""
    whole, shared = torch.arange(9000.0), Holder(name="one")
    kinds: list[Callable[[int], Any]] = [
        float,
        lambda n: whole[n : n + 2],
        lambda n: np.arange(n % 50),
        lambda n: np.float32(n),
        lambda n: "x" * (n % 300),
        lambda n: Holder(n=n, shared=shared),
        lambda n: nn.Parameter(whole[n : n + 1]),
        lambda n: (1 << 70) + n,
        lambda n: np.zeros(n * 20, np.uint8),
    ]
    state = {str(n): kinds[n % len(kinds)](n) for n in range(4500)}
    assert_same_state(send_and_receive(open_transport(), open_transport(trust_pickle=True), state), state)


@pytest.mark.parametrize("inside", ["array", "view"])
def test_an_object_in_another_one_and_in_the_tree_stays_one(inside: str, open_transport: Callable[..., Any]) -> None:
    one = np.arange(3) if inside == "array" else torch.arange(9)[2:4]
    for state in ({"o": Holder(one=one), "one": one}, {"one": one, "o": Holder(one=one)}):
        received = send_and_receive(open_transport(), open_transport(trust_pickle=True), state)
        assert received["o"].one is received["one"]


def test_a_class_that_copyreg_knows_is_pickled_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": np.arange(3)}
    assert pickle.loads(dump(state))[0].tolist() == [0, 1, 2]
    monkeypatch.setitem(copyreg.dispatch_table, np.ndarray, lambda array: (list, (array.tolist()[::-1],)))
    assert pickle.loads(dump(state)) == [[2, 1, 0]]


def test_an_error_of_the_native_writer_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(pickling, "_pickle_objects", fails)
    with pytest.raises(ZeroDivisionError):
        dump({"a": 1.5})


def test_what_cannot_be_pickled_is_named_among_what_is_pickled_natively() -> None:
    with pytest.raises(UnsupportedLeaf, match=r"b\.c .*no pickle of this one"):
        dump({"a": 1.5, "b": {"c": FailsToPickle()}, "d": np.arange(2)})


def test_pickles_are_those_of_pythons_opcodes() -> None:
    """A pickle can be read with Python's own tools, and has one frame after the other."""
    import pickletools

    data = dump({str(n): np.zeros(n) if n % 2 else Holder(n="y" * n) for n in range(600)})
    out = io.StringIO()
    pickletools.dis(data, out)
    assert out.getvalue().count("FRAME") > 1
