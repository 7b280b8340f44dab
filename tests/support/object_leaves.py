"""Objects, training states, odd trees and values that senders refuse, each as a named constructor."""

from __future__ import annotations

import collections
import datetime
import fractions
import functools
import io
import math
import struct
import threading
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.immutable_collections import immutable_dict, immutable_list

import equality
from leaf import NEITHER, ONLY_WHOLE, Leaf
from pickled_classes import (
    Box,
    Colour,
    DictSubclass,
    EmptyTuple,
    FailsToPickle,
    Holder,
    Key,
    Level,
    ListSubclass,
    Point,
    Registered,
    Settings,
    Slotted,
    StrSubclass,
    a_function,
    lr_lambda,
)
from tensor_leaves import parameter, with_attribute

if TYPE_CHECKING:
    from collections.abc import Callable


def model(*, tied: bool = False) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    if tied:
        layers[2].weight = layers[0].weight
    return layers


def adam(steps: int = 2) -> dict[str, Any]:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
    for _ in range(steps):
        net(torch.linspace(0, 1, 8).reshape(2, 4)).sum().backward()
        optimizer.step()
    return optimizer.state_dict()


def schedule(make: Callable[[torch.optim.Optimizer], Any]) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    return scheduler.state_dict()


def plateau() -> dict[str, Any]:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([parameter()], lr=0.1)).state_dict()


def settings() -> Settings:
    return Settings(0.5, torch.arange(4.0), ["a", "b"])


def cycle() -> Holder:
    first, second = Holder(name="first"), Holder(name="second", weight=torch.arange(3.0))
    first.other, second.other = second, first
    return first


def generator() -> torch.Generator:
    made = torch.Generator().manual_seed(11)
    torch.rand(5, generator=made)
    return made


def buffer_at_three() -> io.BytesIO:
    made = io.BytesIO(b"0123456789")
    made.seek(3)
    return made


def fake_tensor() -> Any:
    with FakeTensorMode():
        return torch.empty(3, 4)


def nested_dicts(levels: int) -> dict[str, Any]:
    state: dict[str, Any] = {"leaf": torch.arange(3.0)}
    for level in range(levels):
        state = {"w": torch.tensor([level]), "d": state} if level % 2 else {"d": state, "n": level}
    return state


def nested_mixed(levels: int) -> Any:
    state: Any = torch.arange(3.0)
    for level in range(levels):
        state = [state] if level % 3 == 0 else (state, level) if level % 3 == 1 else {"deeper": state}
    return state


def odd_keys() -> dict[Any, Any]:
    keys = [
        0, 1, -1, "1", 2**80, -(2**64), None, 2.5, -0.0 + 1.5, math.inf, "", (), (1, "a"), (1, ("b", None)), b"bytes",
        frozenset({1, 2}), 1e300, "é", "a b", "\x00", "\n\"\\", "x" * 300,
    ]  # fmt: skip
    return {key: torch.tensor([float(i)]) for i, key in enumerate(keys)}


def dtype_keys() -> dict[Any, Any]:
    return {torch.float32: torch.ones(2), datetime.timedelta(seconds=3): 5, "plain": 1}


def colliding_keys() -> dict[str, Any]:
    return {
        "a.b": torch.tensor([1.0]),
        "a": {"b": torch.tensor([2.0]), "": torch.tensor([3.0]), ".": torch.tensor([4.0])},
        "a.": torch.tensor([5.0]),
        "l": [torch.tensor([6.0])],
        "l.0": torch.tensor([7.0]),
        "d": {0: torch.tensor([8.0]), "0": torch.tensor([9.0])},
        "": torch.tensor([10.0]),
    }


def reserved_keys() -> dict[str, Any]:
    return {
        "__metadata__": torch.tensor([1.0]),
        "__tensorferry__/manifest": torch.tensor([2.0]),
        "__tensorferry__/pickle": torch.tensor([3.0]),
        "__tensorferry__/storage/0/0": torch.tensor([4.0]),
        "__tensorferry__": {"manifest": torch.tensor([5.0])},
        "data_offsets": {"dtype": torch.tensor([6.0]), "shape": 3},
        "k": ["o", {"x": torch.tensor([7.0])}],
    }


def surrogate_keys() -> dict[str, Any]:
    return {
        "\ud800": torch.tensor([1.0]),
        "a\udfff.b": {"\udc80": torch.tensor([2.0]), "text": "lone \ud83d"},
        "\ud83d\ude00": torch.tensor([3.0]),
        "\U0001f600": torch.tensor([4.0]),
    }


def enum_keys() -> dict[Any, Any]:
    return {
        Key.WEIGHT: torch.tensor([1.0]),
        Level.HIGH: torch.tensor([2.0]),
        "inner": {Key.BIAS: torch.tensor([3.0]), Key.WEIGHT: 4},
        Colour.RED: 5,
    }


def numpy_keys() -> dict[Any, Any]:
    return {np.str_("weight"): torch.tensor([1.0]), np.int64(3): torch.tensor([2.0]), "inner": {np.str_("k"): 1}}


def all_scalars() -> list[Any]:
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000ABCDEF))[0]
    return [
        True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 2**200, 0.0, -0.0, 1.0, math.pi, math.inf, -math.inf, nan,
        5e-324, complex(1, -0.0), "", "text", "\x00", "\ud800", b"", b"\x00\xff", None, Ellipsis,
    ]  # fmt: skip


def module_with_metadata() -> Any:
    state = model().state_dict()
    state._metadata["0"]["version"] = 5
    return state


def ordered_with_attribute() -> Any:
    state = collections.OrderedDict(b=torch.ones(2), a=torch.zeros(2))
    state.note = {"written": "by hand"}
    return state


_METADATA = frozenset({equality.METADATA})
_SIZE = frozenset({equality.SIZE})

OBJECTS = [
    Leaf("python scalars, str, bytes, None", all_scalars),
    Leaf("tuple, list, set, frozenset", lambda: [(1, "a"), [2], {3}, frozenset({4}), ()]),
    Leaf("bytearray, range, slice", lambda: [bytearray(b"abc"), range(2, 9, 3), slice(1, None, 2)]),
    Leaf("torch dtype, device, layout", lambda: [torch.bfloat16, torch.device("cuda:1"), torch.strided]),
    Leaf("torch.Size", lambda: torch.Size([2, 3]), torchft=NEITHER, lax=_SIZE),
    Leaf(
        "torch.Size in a dict",
        lambda: {"shape": torch.Size([]), "w": torch.ones(2), "s": [torch.Size([4])]},
        torchft=NEITHER,
        lax=_SIZE,
    ),
    Leaf("Generator state", lambda: generator().get_state()),
    Leaf("Generator", generator),
    Leaf("numpy array", lambda: np.arange(6, dtype=np.int16).reshape(2, 3)),
    Leaf("numpy array, Fortran order", lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    Leaf("numpy record array", lambda: np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", ">f8")])),
    Leaf("numpy array of 1 MiB", lambda: np.arange(1 << 17, dtype=np.float64)),
    Leaf("numpy scalar", lambda: np.float32(1.25)),
    Leaf("numpy scalars", lambda: [np.float64(0.1), np.int64(3), np.bool_(True), np.complex64(1j)]),
    Leaf("numpy SeedSequence", lambda: np.random.default_rng(3)),
    Leaf("numpy random state", lambda: np.random.RandomState(3).get_state()),
    Leaf("python random state", lambda: __import__("random").Random(3).getstate()),
    Leaf("datetime, timedelta", lambda: [datetime.datetime(2026, 1, 2, 3, 4, 5), datetime.timedelta(days=1)]),
    Leaf("timezone", lambda: datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)),
    Leaf("enum", lambda: [Colour.BLUE, Level.HIGH, Key.BIAS], trust=True),
    Leaf("Fraction", lambda: fractions.Fraction(2, 3)),
    Leaf("SimpleNamespace", lambda: types.SimpleNamespace(a=1, w=torch.ones(2))),
    Leaf("function, module-level", lambda: a_function, trust=True),
    Leaf("bound method", lambda: settings().__eq__, trust=True),
    Leaf("partial", lambda: functools.partial(a_function, x=3), trust=True),
    Leaf("class", lambda: Settings, trust=True),
    Leaf("dataclass", settings, trust=True),
    Leaf(
        "object holding tensors", lambda: Holder(w=torch.ones(2), p=parameter(), n={"a": [torch.zeros(1)]}), trust=True
    ),
    Leaf("object with slots", lambda: Slotted(torch.ones(2), "right"), trust=True),
    Leaf("object with a reference cycle", cycle, trust=True),
    Leaf("dict subclass", lambda: DictSubclass(a=torch.ones(2), b=1), trust=True),
    Leaf("list subclass", lambda: ListSubclass([torch.ones(2), 1]), trust=True),
    Leaf("str subclass", lambda: StrSubclass("text"), trust=True),
    Leaf("Counter", lambda: collections.Counter("abca")),
    Leaf(
        "immutable fx containers",
        lambda: [immutable_list([torch.ones(1)]), immutable_dict(a=torch.ones(2))],
        trust=True,
    ),
    Leaf("BytesIO", buffer_at_three),
    Leaf("nn.Module", model, trust=True),
]

TRAINING = [
    Leaf("module.state_dict()", lambda: model().state_dict(), torchft=NEITHER, lax=_METADATA),
    Leaf("module.state_dict(), edited _metadata", module_with_metadata, torchft=NEITHER, lax=_METADATA),
    Leaf("tied weights state_dict", lambda: model(tied=True).state_dict(), torchft=NEITHER, lax=_METADATA),
    Leaf(
        "tied weights, keep_vars", lambda: model(tied=True).state_dict(keep_vars=True), torchft=NEITHER, lax=_METADATA
    ),
    Leaf("Adam.state_dict()", adam),
    Leaf("Adam.state_dict(), fresh", lambda: adam(0)),
    Leaf("SGD.state_dict()", lambda: torch.optim.SGD(model().parameters(), lr=0.1, momentum=0.9).state_dict()),
    Leaf("LambdaLR.state_dict()", lambda: schedule(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 0.9**e))),
    Leaf("LambdaLR, function", lambda: schedule(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lr_lambda))),
    Leaf("StepLR.state_dict()", lambda: schedule(lambda o: torch.optim.lr_scheduler.StepLR(o, 3))),
    Leaf(
        "CosineAnnealingLR.state_dict()", lambda: schedule(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9))
    ),
    Leaf("OneCycleLR.state_dict()", lambda: schedule(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10))),
    Leaf("MultiStepLR.state_dict()", lambda: schedule(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 5, 5]))),
    Leaf(
        "SequentialLR.state_dict()",
        lambda: schedule(
            lambda o: torch.optim.lr_scheduler.SequentialLR(
                o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [1]
            )
        ),
        warns=("ignore:The epoch parameter in:UserWarning",),
    ),
    Leaf("ReduceLROnPlateau.state_dict()", plateau),
    Leaf("GradScaler state", lambda: torch.amp.GradScaler("cpu").state_dict()),
]

TREES = [
    Leaf("200 levels of dicts", lambda: nested_dicts(200), torchft=ONLY_WHOLE),
    Leaf("200 levels, mixed", lambda: nested_mixed(200), torchft=ONLY_WHOLE),
    Leaf("namedtuple", lambda: Point(torch.ones(2), {"a": torch.zeros(3)}), trust=True),
    Leaf("namedtuples nested", lambda: Point(Point(1, EmptyTuple()), [Point(torch.ones(1), None)]), trust=True),
    Leaf("OrderedDict", lambda: collections.OrderedDict([("b", torch.ones(2)), ("a", 1)])),
    Leaf("OrderedDict, odd keys", lambda: collections.OrderedDict([(3, torch.ones(2)), ((1, "b"), 1)])),
    Leaf("OrderedDict with attribute", ordered_with_attribute, torchft=NEITHER, lax=_METADATA),
    Leaf("defaultdict", lambda: collections.defaultdict(list, a=[torch.ones(2)], b=[])),
    Leaf("defaultdict, no factory", lambda: collections.defaultdict(None, {1: torch.ones(2)})),
    Leaf("defaultdict, own factory", lambda: collections.defaultdict(lr_lambda, a=torch.ones(2)), trust=True),
    Leaf("deque", lambda: collections.deque([torch.ones(2), 1])),
    Leaf("deque, bounded", lambda: collections.deque([torch.ones(2), 1, 2], maxlen=2)),
    Leaf("key order", lambda: {"z": torch.ones(1), "a": torch.zeros(2), "m": 3, "b": torch.ones(3)}),
    Leaf("odd keys", odd_keys),
    Leaf("dtype and timedelta keys", dtype_keys),
    Leaf("enum keys", enum_keys, trust=True),
    Leaf("numpy keys", numpy_keys),
    Leaf("colliding keys", colliding_keys),
    Leaf("reserved keys", reserved_keys),
    Leaf("lone surrogates", surrogate_keys),
    Leaf("bool keys", lambda: {True: torch.ones(1), False: torch.zeros(1)}),
    Leaf("empty containers", lambda: [{}, [], (), collections.OrderedDict(), collections.deque(), None, {"a": {}}]),
    Leaf("empty dict", dict),
    Leaf("registered node", lambda: Box(torch.ones(2), [torch.zeros(1)], ("context", 3)), trust=True),
    Leaf("registered nodes nested", lambda: {"a": Box(Box(1, torch.ones(2), None), [], {"unhashable": 1})}, trust=True),
    Leaf("registered dataclass", lambda: Registered(torch.ones(2), torch.zeros(1), 4), trust=True),
    Leaf("root is a list", lambda: [torch.arange(3.0), 1, {"a": torch.ones(2)}], root=True),
    Leaf("root is a tuple", lambda: (torch.arange(3.0),), root=True),
    Leaf("root is a tensor", lambda: torch.arange(3.0), root=True),
    Leaf("root is a Parameter", parameter, root=True),
    Leaf("root is a strided view", lambda: torch.arange(9.0)[::2], root=True),
    Leaf("root is None", lambda: None, root=True),
    Leaf("root is a number", lambda: 5, root=True),
    Leaf("root is an empty dict", dict, root=True),
    Leaf("root is an empty list", list, root=True),
    Leaf("root is an object", cycle, root=True, trust=True),
    Leaf("root is a registered node", lambda: Box(torch.ones(2), 1, "label"), root=True, trust=True),
]

REFUSED = [
    Leaf("threading.Lock", threading.Lock, refused=True, torchft=NEITHER),
    Leaf("lambda", lambda: lambda x: x, refused=True, torchft=NEITHER),
    Leaf("FakeTensor", fake_tensor, refused=True, torchft=NEITHER),
    Leaf("mkldnn", lambda: torch.rand(3, 3).to_mkldnn(), refused=True, torchft=NEITHER),
    Leaf("generator", lambda: (i for i in range(3)), refused=True, torchft=NEITHER),
    Leaf("zeros of autograd's", lambda: torch._efficientzerotensor(3), refused=True, torchft=NEITHER),
    Leaf("module", lambda: math, refused=True, torchft=NEITHER),
    Leaf("memoryview", lambda: memoryview(b"abc"), refused=True, torchft=NEITHER),
    Leaf(
        "object holding a lock",
        lambda: Holder(weight=torch.ones(2), lock=threading.Lock()),
        refused=True,
        torchft=NEITHER,
    ),
    Leaf("object that fails to pickle", FailsToPickle, refused=True, torchft=NEITHER),
    Leaf(
        "tensor with a lambda as attr", lambda: with_attribute(torch.ones(2), lambda: 1), refused=True, torchft=NEITHER
    ),
]
