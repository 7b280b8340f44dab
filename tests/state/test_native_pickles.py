"""What is known is pickled natively, everything else by Python: a receiver gets the same from both."""

from __future__ import annotations

import collections
import copyreg
import datetime
import io
import math
import pickle
import random
from typing import TYPE_CHECKING, Any

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
TEXTS = [
    "", "typed", "leaf", "float32", "\ud800", "a\udfffb", "\U0001f980", "h\x05.", "x" * 255, "é" * 300,
    b"", b"h\x05.", b"\x94" * 9, b"b" * 256, bytearray(b"mutable"),
]  # fmt: skip
DTYPES = [
    "?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "g", "F", "D", "G",
    "M8[s]", "m8[ns]", "S3", "U2", "V5", "O", "i4,f8", [("a", "<i4"), ("b", ">f8", (2,))],
]  # fmt: skip

#: numpy reads arrays of these from a pickle as arrays in the order of bytes of this machine.
SWAPPED = [">i2", ">f4", ">c8"]


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


def scalar(draw: random.Random) -> Any:
    kind = draw.randrange(9)
    if kind < 5:
        return draw.choice([*EDGES, draw.getrandbits(300), -draw.getrandbits(40), draw.random(), draw.randrange(9)])
    if kind == 5:
        return draw.choice([math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e300, complex(1, -0.0)])
    return draw.choice([None, True, False, *TEXTS])


def array(draw: random.Random, classes: bool, swapped: bool) -> Any:
    dtype = np.dtype(draw.choice(DTYPES + SWAPPED if swapped else DTYPES))
    if draw.randrange(10) == 0 and not dtype.hasobject:
        dtype = np.dtype(dtype, metadata={"unit": "m"})
    shape = tuple(draw.randrange(4) for _ in range(draw.randrange(4)))
    count = math.prod(shape)
    if dtype.hasobject:
        made = np.array([None, "text", 3, (1, 2)] * count + [None], dtype)[:count].reshape(shape)
    else:
        made = (np.arange(count * dtype.itemsize) % 2).astype(np.uint8).view(dtype).reshape(shape)
    how = draw.choice(["", "", "transposed", "fortran", "step", "expanded", "masked", "class", "scalar", "read only"])
    if how == "transposed":
        return made.T
    if how == "fortran":
        return np.asfortranarray(made)
    if how == "step" and made.ndim:
        return made[::2]
    if how == "expanded":
        return np.broadcast_to(made, (2, *made.shape))
    if how == "masked" and classes and swapped and dtype.kind in "biufc":
        return np.ma.MaskedArray(made, mask=np.zeros(made.shape, bool))
    if how == "class" and classes:
        return made.view(Array)
    if how == "scalar" and made.size and not dtype.hasobject:
        return made.reshape(-1)[0]
    if how == "read only":
        made.flags.writeable = False
    return made


def tensor(draw: random.Random, pool: list[torch.Tensor], classes: bool) -> torch.Tensor:
    dtype = draw.choice(
        [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.uint16]
    )
    made = draw.choice(pool).view(dtype)
    shapes = [
        made[:7].clone(), made[3:9], made[1::3], made[2].expand(2, 3), made[:16].view(4, 4).T,
        made[:1].as_strided((1, 3, 1), (9, 1, 7)), made[:0],
    ]  # fmt: skip
    made = draw.choice(shapes)
    wrap = draw.choice(["", "", "grad", "parameter", "frozen", "attribute", "class"])
    if wrap == "class" and classes:
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


def state_of(seed: int, classes: bool) -> list[Any]:
    """Makes a state; unless `classes`, one that a receiver reads without trusting the source.

    With an even seed it may hold arrays that no pickle of numpy keeps as they are: of swapped bytes, or masked.
    """
    draw = random.Random(seed)
    pool = [torch.arange(256).remainder(2).to(torch.uint8) for _ in range(3)]
    made: list[Any] = []

    def node(levels: int) -> Any:
        kind = draw.randrange(12)
        if made and kind == 0:
            return draw.choice(made)
        if kind < 3:
            value = scalar(draw)
        elif kind < 5:
            value = array(draw, classes, seed % 2 == 0)
        elif kind < 7:
            value = tensor(draw, pool, classes)
        elif kind == 7 or not levels:
            value = draw.choice([torch.float32, torch.Size([2]), datetime.timedelta(3), {1, 2}, slice(3), ...])
        else:
            return wrapped(levels)
        made.append(value)
        return value

    def wrapped(levels: int) -> Any:
        items = [node(levels - 1) for _ in range(draw.randrange(1, 4))]
        keys = ["a", "b", "\ud800", 1, None, 2**70, (1, "a")]
        kinds: list[Callable[[], Any]] = [
            lambda: items,
            lambda: tuple(items),
            lambda: dict(zip(draw.sample(keys, len(items)), items, strict=True)),
            lambda: collections.OrderedDict(enumerate(items)),
            lambda: collections.deque(items),
            lambda: in_array(items),
        ]
        of_users: list[Callable[[], Any]] = [
            lambda: Holder(items=items),
            lambda: cycle(items),
            lambda: Slotted(items[0], items[-1]),
            lambda: Reduced(items[0]),
            lambda: ListSubclass(items),
            lambda: DictSubclass(a=items),
            lambda: draw.choice([StrSubclass("s"), Integer(3), Level.HIGH, Colour.RED]),
        ]
        return draw.choice(kinds + of_users if classes else kinds)()

    return [node(2) for _ in range(draw.randrange(1, 8))]


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

    for seed in range(250):
        state = state_of(seed, trust)
        received = []
        for function in (counting, lambda *_: None):
            step += 1
            monkeypatch.setattr(pickling, "_pickle_objects", function)
            received.append(send_and_receive(sender, receiver, state, step))
            if seed % 2:
                assert_same_state(received[-1], state)
            sender.disallow_checkpoint()
        assert_same_state(*received)
        assert layouts(received[0]) == layouts(received[1]), seed
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
