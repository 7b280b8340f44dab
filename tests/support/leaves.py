"""The catalogue: every kind of leaf that training states hold, and odd trees, each as a named constructor.

What each entry states about torchft 0.2.0 was measured on its HTTPTransport; `pytest --transport torchft` checks it
again.
"""

from __future__ import annotations

import collections
import datetime
import functools
import io
import math
import struct
import threading
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _serialization
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DeviceMesh, DTensor, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement

import equality
from pickled_classes import (
    Box,
    Colour,
    DictSubclass,
    FailsToPickle,
    FlattenWrapper,
    Holder,
    Key,
    Level,
    PlainSubclass,
    Point,
    ReducedWrapper,
    Settings,
    Slotted,
    a_function,
)  # fmt: skip

WHOLE, CHUNKED = 0, 3
BOTH = frozenset({WHOLE, CHUNKED})
ONLY_WHOLE = frozenset({WHOLE})
NEITHER: frozenset[int] = frozenset()


def _torch_reads_empty_storages() -> bool:
    body = io.BytesIO()
    _serialization._streaming_save(torch.empty(0), body)
    body.seek(0)
    try:
        _serialization._streaming_load(body)
    except ValueError:
        return False
    return True


# torchft can receive what torch can read: torch 2.8 fails on a storage without bytes (pytorch#180481).
STOCK_READS_EMPTY = _torch_reads_empty_storages()
BOTH_IF_EMPTY = BOTH if STOCK_READS_EMPTY else NEITHER


@dataclass(frozen=True)
class Leaf:
    """A value at `state["user"]["leaf"]`, or the whole state if `root`, and what a receiver must get."""

    name: str
    make: Callable[[], Any]
    expect: Callable[[Any], Any] = lambda value: value
    """Makes what the receiver must get from the value that was sent."""
    torchft: frozenset[int] = BOTH
    """The values of `num_chunks` with which torchft's transport delivers it unchanged."""
    lax: frozenset[str] = frozenset()
    """The comparisons of equality.py that fail with torchft even with the whole state in one body."""
    trust: bool = False
    """Whether it holds classes or functions of the test modules, which the default allow-list refuses."""
    refused: bool = False
    """Whether `send_checkpoint` refuses it, with its path in the message."""
    group: bool = False
    """Whether it needs a process group."""
    warns: tuple[str, ...] = ()
    """Warnings that torch itself gives while such a leaf is built or pickled, as filterwarnings entries."""
    root: bool = False

    def value(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # prototype and deprecation notes of the constructors used
            return self.make()

    def state(self, value: Any) -> Any:
        if self.root:
            return value
        return {
            "user": {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "leaf": value, "last": torch.ones(3)},
            "torchft": {"step": 7, "batches_committed": 14},
        }


def random_bytes(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def of_dtype(name: str) -> torch.Tensor:
    """Random bits read as the dtype, NaN payloads and all."""
    if name == "bool":
        return random_bytes(24) > 127
    return random_bytes(96).view(getattr(torch, name))


def nan_payloads() -> torch.Tensor:
    words = [0x7FC00000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0xFFBFFFFF, 0x80000000, 0x7F800000]
    return torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32).view(torch.float32)


def with_attribute(tensor: torch.Tensor, value: Any = "tp-row") -> torch.Tensor:
    tensor.sharding = value
    return tensor


def parameter(*, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4), requires_grad=requires_grad)


def float8_parameter() -> nn.Parameter:
    return nn.Parameter(random_bytes(12).view(torch.float8_e4m3fn))


def float8_with_grad() -> torch.Tensor:
    return random_bytes(12).view(torch.float8_e4m3fn).requires_grad_()


def parameter_with_grad() -> nn.Parameter:
    weight = parameter()
    weight.square().sum().backward()
    return weight


def with_hook() -> torch.Tensor:
    tensor = torch.arange(4.0).requires_grad_()
    tensor.register_hook(lambda grad: grad * 2)
    return tensor


def overlapping_views() -> list[torch.Tensor]:
    base = torch.arange(16.0)
    return [base[:10], base[4:12], base.view(torch.int32)]


def two_views() -> list[torch.Tensor]:
    base = torch.arange(24.0)
    return [base[:12].view(3, 4), base[6:18]]


def tensor_and_its_storage() -> list[Any]:
    tensor = torch.arange(8.0)
    return [tensor, tensor.untyped_storage()]


def shared_with_object() -> dict[str, Any]:
    weight = parameter()
    view = torch.arange(8.0)
    return {"weight": weight, "holder": Holder(weight=weight, tail=view[4:]), "view": view}


def same_object_twice() -> list[Any]:
    config = Holder(lr=0.1)
    return [config, {"again": config}]


def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0])


def sharded_tensor() -> Any:
    local = Shard.from_tensor_and_offsets(torch.arange(8.0).reshape(2, 4), [0, 0], 0)
    return init_from_local_shards([local], 2, 4)


def coo() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3), check_invariants=True)


def many_small(count: int = 1000) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((1 + i % 5,), float(i)) for i in range(count)}


DTYPES = {
    **dict.fromkeys(["float32", "float64", "float16", "bfloat16", "complex64", "complex128", "bool"], ()),
    **dict.fromkeys(["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"], ()),
    **dict.fromkeys(["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"], ()),
    **dict.fromkeys(["float4_e2m1fn_x2", "bits8", "bits16"], ()),
    "complex32": ("ignore:ComplexHalf support is experimental:UserWarning",),
}
SUB_BYTE_DTYPES = ("int1", "int4", "uint1", "uint4", "uint7")

_TYPED = ("ignore:TypedStorage is deprecated:UserWarning",)
_CSR = ("ignore:Sparse CSR tensor support:UserWarning",)
_HOOKS = ("ignore:backward hook:UserWarning",)
_QUANTISED = ("ignore:torch.quantize_per_tensor:UserWarning", *_TYPED)
_NESTED = ("ignore:The PyTorch API of nested tensors:UserWarning",)

TENSORS = [
    *(Leaf(f"dtype {name}", functools.partial(of_dtype, name), warns=warns) for name, warns in DTYPES.items()),
    *(Leaf(f"dtype {name}", functools.partial(of_dtype, name), torchft=NEITHER) for name in SUB_BYTE_DTYPES),
    Leaf("NaN payload bits", nan_payloads),
    Leaf("0-dim", lambda: torch.tensor(3.5)),
    Leaf("empty (0,)", lambda: torch.empty(0), torchft=BOTH_IF_EMPTY),
    Leaf("empty view behind an empty storage", lambda: torch.zeros(0, 6)[:, 2:4], torchft=BOTH_IF_EMPTY),
    Leaf(
        "empty views behind a storage that others have",
        lambda: [(t := torch.arange(24.0).reshape(4, 6)), *t[4:].chunk(3, 1), t[1]],
        torchft=ONLY_WHOLE,
    ),
    Leaf("offset [10:14]", lambda: torch.arange(32.0)[10:14]),
    Leaf("strided [::2]", lambda: torch.arange(20.0)[::2]),
    Leaf("transposed", lambda: torch.arange(12.0).reshape(3, 4).t()),
    Leaf("expanded stride 0", lambda: torch.arange(3.0).expand(4, 3)),
    Leaf("overlapping as_strided", lambda: torch.arange(8.0).as_strided((3, 4), (2, 1))),
    Leaf("conj view", lambda: torch.tensor([1 + 2j, 3 - 4j]).conj()),
    Leaf("neg view (imag of conj)", lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag),
    *(
        Leaf(f"neg view, {name}", lambda name=name: torch._neg_view(torch.arange(4).to(getattr(torch, name))))
        for name in ("int32", "bool", "uint16")
    ),
    Leaf("unaligned storage", lambda: torch.from_numpy(np.arange(9, dtype=np.uint8)[1:]).view(torch.int32)),
    Leaf("meta tensor", lambda: torch.empty(3, 4, device="meta")),
    Leaf("1000 small tensors", many_small),
]

PARAMETERS = [
    Leaf("Parameter", parameter),
    Leaf("Parameter requires_grad=False", lambda: parameter(requires_grad=False)),
    Leaf("Parameter with python attr", lambda: with_attribute(parameter())),
    Leaf("Parameter with .grad", parameter_with_grad, expect=lambda p: nn.Parameter(p.detach())),
    Leaf("requires_grad leaf", lambda: torch.arange(4.0).requires_grad_()),
    Leaf(
        "non-leaf (grad_fn)",
        lambda: torch.arange(4.0).requires_grad_() * 2,
        expect=lambda t: t.detach().requires_grad_(),
    ),
    Leaf("Parameter, float8", float8_parameter),
    # torch cannot unpickle a float8 tensor that requires grad unless it is a Parameter.
    Leaf("requires_grad leaf, float8", float8_with_grad, torchft=NEITHER),
    Leaf("tensor with python attr", lambda: with_attribute(torch.arange(4.0))),
    Leaf("tensor with backward hook", with_hook, expect=lambda t: t.detach().requires_grad_(), warns=_HOOKS),
]

ALIASES = [
    Leaf("same object twice", lambda: [(t := torch.arange(4.0)), t], torchft=ONLY_WHOLE),
    Leaf("2 views of 1 storage", two_views, torchft=ONLY_WHOLE),
    Leaf("3 views overlapping + dtype view", overlapping_views, torchft=NEITHER),
    Leaf("tensor and its UntypedStorage", tensor_and_its_storage, torchft=NEITHER),
    Leaf("tensor also inside an object", shared_with_object, trust=True, torchft=ONLY_WHOLE),
    Leaf("same python object twice", same_object_twice, trust=True, torchft=ONLY_WHOLE),
]

SPECIAL = [
    Leaf("tensor subclass", lambda: torch.arange(4.0).as_subclass(PlainSubclass), trust=True),
    Leaf("wrapper subclass, __reduce_ex__", lambda: ReducedWrapper(torch.arange(4.0)), trust=True),
    Leaf(
        "wrapper subclass, __tensor_flatten__",
        lambda: FlattenWrapper(torch.arange(4, dtype=torch.int8), torch.tensor([0.5]), "per tensor"),
        trust=True,
    ),
    Leaf("DTensor shard(0)", lambda: distribute_tensor(torch.arange(8.0), mesh(), [ShardPlacement(0)]), group=True),
    Leaf(
        "DTensor Parameter",
        lambda: nn.Parameter(distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh(), [ShardPlacement(1)])),
        group=True,
    ),
    # torch's own pickling treats a DTensor whose local tensor starts inside its storage as a plain tensor.
    Leaf(
        "DTensor over a view",
        torchft=NEITHER,
        make=lambda: DTensor.from_local(torch.arange(8.0)[2:6], mesh(), [ShardPlacement(0)], run_check=False),
        group=True,
    ),
    Leaf(
        "ShardedTensor",
        sharded_tensor,
        group=True,
        warns=("ignore:Please use DTensor instead and we are:FutureWarning",),
    ),
    Leaf("sparse COO", coo),
    Leaf("sparse CSR", lambda: torch.eye(3).to_sparse_csr(), warns=_CSR),
    Leaf(
        "quantized per tensor",
        lambda: torch.quantize_per_tensor(torch.linspace(0, 1, 6), 0.1, 3, torch.quint8),
        warns=_QUANTISED,
        trust=True,
    ),
    Leaf("nested", lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(5)]), warns=_NESTED, trust=True),
    Leaf("UntypedStorage", lambda: random_bytes(40).untyped_storage(), torchft=NEITHER, warns=_TYPED),
    Leaf("TypedStorage", lambda: torch.arange(5.0).storage(), warns=_TYPED),
]


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


def all_scalars() -> list[Any]:
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000ABCDEF))[0]
    return [
        True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 2**200, 0.0, -0.0, 1.0, math.pi, math.inf, -math.inf, nan,
        5e-324, complex(1, -0.0), "", "text", "\x00", "\ud800", b"", b"\x00\xff", None, Ellipsis,
    ]  # fmt: skip


def ordered_with_attribute() -> Any:
    state = collections.OrderedDict(b=torch.ones(2), a=torch.zeros(2))
    state.note = {"written": "by hand"}
    return state


_METADATA = frozenset({equality.METADATA})

OBJECTS = [
    Leaf("python scalars, str, bytes, None", all_scalars),
    Leaf("tuple, list, set, frozenset", lambda: [(1, "a"), [2], {3}, frozenset({4}), ()]),
    Leaf("bytearray, range", lambda: [bytearray(b"abc"), range(2, 9, 3)]),
    Leaf("torch dtype, device, layout", lambda: [torch.bfloat16, torch.device("cuda:1"), torch.strided]),
    Leaf("Generator", generator),
    Leaf("numpy array", lambda: np.arange(6, dtype=np.int16).reshape(2, 3)),
    Leaf("numpy record array", lambda: np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", ">f8")])),
    Leaf("numpy random state", lambda: np.random.RandomState(3).get_state()),
    Leaf("datetime, timedelta", lambda: [datetime.datetime(2026, 1, 2, 3, 4, 5), datetime.timedelta(days=1)]),
    Leaf("enum", lambda: [Colour.BLUE, Level.HIGH, Key.BIAS], trust=True),
    Leaf("SimpleNamespace", lambda: types.SimpleNamespace(a=1, w=torch.ones(2))),
    Leaf("function, module-level", lambda: a_function, trust=True),
    Leaf("dataclass", settings, trust=True),
    Leaf(
        "object holding tensors", lambda: Holder(w=torch.ones(2), p=parameter(), n={"a": [torch.zeros(1)]}), trust=True
    ),
    Leaf("object with slots", lambda: Slotted(torch.ones(2), "right"), trust=True),
    Leaf("dict subclass", lambda: DictSubclass(a=torch.ones(2), b=1), trust=True),
    Leaf("Counter", lambda: collections.Counter("abca")),
    Leaf("BytesIO", buffer_at_three),
]

TRAINING = [
    Leaf("module.state_dict()", lambda: model().state_dict(), torchft=NEITHER, lax=_METADATA),
    Leaf(
        "tied weights, keep_vars", lambda: model(tied=True).state_dict(keep_vars=True), torchft=NEITHER, lax=_METADATA
    ),
    Leaf("Adam.state_dict()", adam),
    Leaf("LambdaLR.state_dict()", lambda: schedule(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 0.9**e))),
    Leaf("StepLR.state_dict()", lambda: schedule(lambda o: torch.optim.lr_scheduler.StepLR(o, 3))),
    Leaf("GradScaler state", lambda: torch.amp.GradScaler("cpu").state_dict()),
]

TREES = [
    Leaf("200 levels, mixed", lambda: nested_mixed(200), torchft=ONLY_WHOLE),
    Leaf("namedtuple", lambda: Point(torch.ones(2), {"a": torch.zeros(3)}), trust=True),
    Leaf("OrderedDict", lambda: collections.OrderedDict([("b", torch.ones(2)), ("a", 1)])),
    Leaf("OrderedDict with attribute", ordered_with_attribute, torchft=NEITHER, lax=_METADATA),
    Leaf("defaultdict", lambda: collections.defaultdict(list, a=[torch.ones(2)], b=[])),
    Leaf("defaultdict, own factory", lambda: collections.defaultdict(a_function, a=torch.ones(2)), trust=True),
    Leaf("deque", lambda: collections.deque([torch.ones(2), 1])),
    Leaf("key order", lambda: {"z": torch.ones(1), "a": torch.zeros(2), "m": 3, "b": torch.ones(3)}),
    Leaf("odd keys", odd_keys),
    Leaf("dtype and timedelta keys", dtype_keys),
    Leaf("enum keys", enum_keys, trust=True),
    Leaf("colliding keys", colliding_keys),
    Leaf("reserved keys", reserved_keys),
    Leaf("lone surrogates", surrogate_keys),
    Leaf("empty containers", lambda: [{}, [], (), collections.OrderedDict(), collections.deque(), None, {"a": {}}]),
    Leaf("empty dict", dict),
    Leaf("registered node", lambda: Box(torch.ones(2), [torch.zeros(1)], ("context", 3)), trust=True),
    Leaf("root is a list", lambda: [torch.arange(3.0), 1, {"a": torch.ones(2)}], root=True),
    Leaf("root is a tensor", lambda: torch.arange(3.0), root=True),
    Leaf("root is None", lambda: None, root=True),
    Leaf("root is an empty dict", dict, root=True),
    Leaf("root is an object", cycle, root=True, trust=True),
]

REFUSED = [
    Leaf("threading.Lock", threading.Lock, refused=True, torchft=NEITHER),
    Leaf("lambda", lambda: lambda x: x, refused=True, torchft=NEITHER),
    Leaf("FakeTensor", fake_tensor, refused=True, torchft=NEITHER),
    Leaf("mkldnn", lambda: torch.rand(3, 3).to_mkldnn(), refused=True, torchft=NEITHER),
    Leaf("object that fails to pickle", FailsToPickle, refused=True, torchft=NEITHER),
]

CARRIED = [*TENSORS, *PARAMETERS, *ALIASES, *SPECIAL, *OBJECTS, *TRAINING, *TREES]
CATALOGUE = {leaf.name: leaf for leaf in [*CARRIED, *REFUSED]}
#: The leaves that need no process group.
ALONE = [leaf for leaf in CARRIED if not leaf.group]
assert len(CATALOGUE) == len(CARRIED) + len(REFUSED), "a name is used twice"


def warnings_of(leaf: Leaf) -> list[pytest.MarkDecorator]:
    """Returns marks that ignore the warnings of a leaf in the test that uses it."""
    return [pytest.mark.filterwarnings(entry) for entry in leaf.warns]


def cases(leaves: Iterable[Leaf]) -> list[Any]:
    """Returns the leaves as parameters of a test, with their names as ids."""
    return [pytest.param(leaf, id=leaf.name, marks=warnings_of(leaf)) for leaf in leaves]
