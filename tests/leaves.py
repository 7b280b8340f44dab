"""Every kind of leaf a training state was seen to hold, and a catalogue of odd trees, each as a named constructor.

What each entry says about torchft 0.2.0 was measured on its HTTPTransport; `pytest --transport torchft` measures it
again.
"""

from __future__ import annotations

import collections
import datetime
import enum
import fractions
import functools
import io
import math
import struct
import threading
import types
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.masked import masked_tensor
from torch.utils import _pytree as pytree

import equality

if TYPE_CHECKING:
    from collections.abc import Callable

WHOLE, CHUNKED = 0, 3
BOTH = frozenset({WHOLE, CHUNKED})
NEITHER: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Leaf:
    """A value at `state["user"]["leaf"]`, or the whole state if `root`, and what is to be expected of it."""

    name: str
    make: Callable[[], Any]
    expect: Callable[[Any], Any] = lambda value: value
    """What the receiver gets, made from the value that was sent."""
    torchft: frozenset[int] = BOTH
    """The chunk counts with which torchft's transport hands it over equal."""
    lax: frozenset[str] = frozenset()
    """What torchft loses even with the whole state in one body (see equality)."""
    trust: bool = False
    """Holds classes or functions of the test modules, which the default allow-list refuses."""
    refused: bool = False
    """Cannot be carried: send_checkpoint names its path."""
    group: bool = False
    """Needs a process group."""
    warns: tuple[str, ...] = ()
    """Warnings torch itself gives while such a leaf is pickled or built, as filterwarnings entries."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Classes and functions whose pickles name this module


class Point(NamedTuple):
    x: Any
    y: Any


class EmptyTuple(NamedTuple):
    pass


@dataclass
class Settings:
    lr: float
    weight: torch.Tensor
    names: list[str] = field(default_factory=list)


@dataclass
class Registered:
    weight: torch.Tensor
    bias: torch.Tensor
    step: int


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any) -> None:
        self.left = left
        self.right = right


class DictSubclass(dict):
    pass


class ListSubclass(list):
    pass


class StrSubclass(str):
    __slots__ = ("__dict__",)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Key(enum.StrEnum):
    WEIGHT = "weight"
    BIAS = "bias"


class PlainSubclass(torch.Tensor):
    pass


class ReducedWrapper(torch.Tensor):
    """A wrapper subclass that pickles itself."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> ReducedWrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ReducedWrapper, (self.inner,)

    def __repr__(self) -> str:
        return f"ReducedWrapper({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"{func}")


class FlattenWrapper(torch.Tensor):
    """A wrapper subclass as torch.compile wants it: __tensor_flatten__ and its inverse."""

    @staticmethod
    def __new__(cls, low: torch.Tensor, scale: torch.Tensor, note: str) -> FlattenWrapper:
        return torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=scale.dtype, device=low.device)

    def __init__(self, low: torch.Tensor, scale: torch.Tensor, note: str) -> None:
        self.low = low
        self.scale = scale
        self.note = note

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["low", "scale"], self.note

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> FlattenWrapper:
        return cls(inner["low"], inner["scale"], context)

    def __repr__(self) -> str:
        return f"FlattenWrapper({self.low!r}, {self.scale!r}, {self.note!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].low, args[0].scale, args[0].note)
        raise NotImplementedError(f"{func}")


class Box:
    """A custom pytree node: two children and a context."""

    def __init__(self, first: Any, second: Any, label: Any) -> None:
        self.first = first
        self.second = second
        self.label = label


class FailsToPickle:
    def __reduce__(self) -> Any:
        raise ValueError("no pickle of this one")


pytree.register_pytree_node(
    Box,
    lambda box: ([box.first, box.second], box.label),
    lambda children, label: Box(*children, label),
    serialized_type_name="tests.leaves.Box",
)
pytree.register_dataclass(Registered)


def a_function(x: Any) -> Any:
    return x


def lr_lambda(epoch: int) -> float:
    return 0.95**epoch


# ---------------------------------------------------------------------------------------------------------------------
# Constructors


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


def numpy_overlap() -> list[torch.Tensor]:
    array = np.arange(8, dtype=np.int64)
    return [torch.from_numpy(array[:5]), torch.from_numpy(array[3:])]


def tensor_and_its_storage() -> list[Any]:
    tensor = torch.arange(8.0)
    return [tensor, tensor.untyped_storage()]


def shared_with_object() -> dict[str, Any]:
    weight = parameter()
    view = torch.arange(8.0)
    return {"weight": weight, "holder": Holder(weight=weight, tail=view[4:]), "view": view}


def same_parameter_in_two_objects() -> list[Any]:
    weight = parameter()
    return [Holder(weight=weight), Holder(weight=weight)]


def same_tensor_many_places() -> dict[str, Any]:
    weight = torch.arange(5.0)
    return {"a": weight, "b": [weight, {"c": weight}], "d": (weight, weight.detach()), "e": weight.view(5, 1)}


def parameter_and_data() -> dict[str, Any]:
    weight = parameter()
    return {"weight": weight, "data": weight.data, "row": weight.detach()[1]}


def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0])


def sharded_tensor() -> Any:
    local = Shard.from_tensor_and_offsets(torch.arange(8.0).reshape(2, 4), [0, 0], 0)
    return init_from_local_shards([local], 2, 4)


def coo() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3), check_invariants=True)


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(3.0), torch.arange(5.0)], layout=torch.jagged)


def per_channel(dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    scales = torch.tensor([0.1, 0.2, 0.5], dtype=torch.float64)
    return torch.quantize_per_channel(torch.rand(3, 4), scales, torch.tensor([0, 3, 5]), 0, dtype)


def float_channel() -> torch.Tensor:
    scales, zeros = torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0.0, 3.0, 5.0])
    return torch.quantize_per_channel(torch.rand(3, 4), scales, zeros, 0, torch.quint4x2)


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


def same_object_twice() -> list[Any]:
    config = Holder(lr=0.1)
    return [config, {"again": config}]


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


def many_small(count: int = 1000) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((1 + i % 5,), float(i)) for i in range(count)}


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


DTYPES = {
    **dict.fromkeys(["float32", "float64", "float16", "bfloat16", "complex64", "complex128", "bool"], ()),
    **dict.fromkeys(["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"], ()),
    **dict.fromkeys(["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"], ()),
    **dict.fromkeys(["float4_e2m1fn_x2", "bits8", "bits16"], ()),
    "complex32": ("ignore:ComplexHalf support is experimental:UserWarning",),
}
SUB_BYTE_DTYPES = ("int1", "int4", "uint1", "uint4", "uint7")

_METADATA = frozenset({equality.METADATA})
_SIZE = frozenset({equality.SIZE})
_WHOLE = frozenset({WHOLE})
_TYPED = ("ignore:TypedStorage is deprecated:UserWarning",)
_CSR = ("ignore:Sparse CSR tensor support:UserWarning",)
_HOOKS = ("ignore:backward hook:UserWarning",)
_QUANTISED = ("ignore:torch.quantize_per_tensor:UserWarning", *_TYPED)
_NESTED = ("ignore:The PyTorch API of nested tensors:UserWarning",)
_MASKED = ("ignore:The PyTorch API of MaskedTensors:UserWarning",)

TENSORS = [
    *(Leaf(f"dtype {name}", functools.partial(of_dtype, name), warns=warns) for name, warns in DTYPES.items()),
    *(Leaf(f"dtype {name}", functools.partial(of_dtype, name), torchft=NEITHER) for name in SUB_BYTE_DTYPES),
    Leaf("NaN payload bits", nan_payloads),
    Leaf("0-dim", lambda: torch.tensor(3.5)),
    Leaf("empty (0,)", lambda: torch.empty(0)),
    Leaf("empty (0,5)", lambda: torch.empty(0, 5, dtype=torch.bfloat16)),
    Leaf("empty view of 96B storage", lambda: torch.arange(24.0)[3:3]),
    Leaf("offset [10:14]", lambda: torch.arange(32.0)[10:14]),
    Leaf("small view of big storage", lambda: torch.arange(1e6)[1000:1003]),
    Leaf("one element at the end of a big storage", lambda: torch.arange(1e6)[-1]),
    Leaf("strided [::2]", lambda: torch.arange(20.0)[::2]),
    Leaf("strided rows", lambda: torch.arange(60.0).reshape(6, 10)[1:5:2, 3:7]),
    Leaf("transposed", lambda: torch.arange(12.0).reshape(3, 4).t()),
    Leaf("channels_last", lambda: torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    Leaf("expanded stride 0", lambda: torch.arange(3.0).expand(4, 3)),
    Leaf("expanded stride 0, 1e6 of 1", lambda: torch.tensor([2.5]).expand(1_000_000)),
    Leaf("size 1 dims of odd strides", lambda: torch.arange(6.0).as_strided((1, 6, 1), (77, 1, 13))),
    Leaf("overlapping as_strided", lambda: torch.arange(8.0).as_strided((3, 4), (2, 1))),
    Leaf("conj view", lambda: torch.tensor([1 + 2j, 3 - 4j]).conj()),
    Leaf("neg view (imag of conj)", lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag),
    Leaf("unaligned storage", lambda: torch.from_numpy(np.arange(9, dtype=np.uint8)[1:]).view(torch.int32)),
    Leaf(
        "from numpy, read-only", lambda: torch.frombuffer(np.arange(8, dtype=np.float32).tobytes(), dtype=torch.float32)
    ),
    Leaf("shared memory", lambda: torch.arange(8.0).share_memory_()),
    Leaf("meta tensor", lambda: torch.empty(3, 4, device="meta")),
    Leaf("1 MiB and some", lambda: random_bytes((1 << 20) + 12345)),
    Leaf("1000 small tensors", many_small),
]

PARAMETERS = [
    Leaf("Parameter", parameter),
    Leaf("Parameter requires_grad=False", lambda: parameter(requires_grad=False)),
    Leaf("Parameter, transposed", lambda: nn.Parameter(torch.arange(12.0).reshape(3, 4).t())),
    Leaf("Parameter, bfloat16, empty", lambda: nn.Parameter(torch.empty(0, 4, dtype=torch.bfloat16))),
    Leaf("Parameter with python attr", lambda: with_attribute(parameter())),
    Leaf("Parameter with .grad", parameter_with_grad, expect=lambda p: nn.Parameter(p.detach())),
    Leaf("Buffer", lambda: nn.Buffer(torch.arange(4.0), persistent=False)),
    Leaf("requires_grad leaf", lambda: torch.arange(4.0).requires_grad_()),
    Leaf(
        "non-leaf (grad_fn)",
        lambda: torch.arange(4.0).requires_grad_() * 2,
        expect=lambda t: t.detach().requires_grad_(),
    ),
    Leaf("Parameter, float8", float8_parameter),
    Leaf("Parameter, float8, with python attr", lambda: with_attribute(float8_parameter())),
    # torch's own unpickling fails on a float8 tensor that requires grad and is no Parameter.
    Leaf("requires_grad leaf, float8", float8_with_grad, torchft=NEITHER),
    Leaf(
        "requires_grad leaf, float8, in an object",
        lambda: Holder(weight=float8_with_grad()),
        torchft=NEITHER,
        trust=True,
    ),
    Leaf("tensor with python attr", lambda: with_attribute(torch.arange(4.0))),
    Leaf("tensor with a tensor as attr", lambda: with_attribute(torch.arange(4.0), torch.ones(3))),
    Leaf("tensor with backward hook", with_hook, expect=lambda t: t.detach().requires_grad_(), warns=_HOOKS),
    Leaf("UninitializedParameter", nn.parameter.UninitializedParameter),
]

ALIASES = [
    Leaf("same object twice", lambda: [(t := torch.arange(4.0)), t], torchft=_WHOLE),
    Leaf("same Parameter twice", lambda: {"a": (p := parameter()), "b": {"c": p}}, torchft=_WHOLE),
    Leaf("same tensor in many places", same_tensor_many_places, torchft=_WHOLE),
    Leaf("2 views of 1 storage", two_views, torchft=_WHOLE),
    Leaf("Parameter and its data", parameter_and_data, torchft=_WHOLE),
    Leaf("3 views overlapping + dtype view", overlapping_views, torchft=NEITHER),
    Leaf("tensor and its UntypedStorage", tensor_and_its_storage, torchft=NEITHER),
    Leaf("overlapping storages", numpy_overlap),
    Leaf("two empty tensors", lambda: [torch.empty(0), torch.empty(0)]),
    Leaf("equal but separate", lambda: [torch.zeros(64), torch.zeros(64)]),
    Leaf("tensor also inside an object", shared_with_object, trust=True, torchft=_WHOLE),
    Leaf("Parameter inside two objects", same_parameter_in_two_objects, trust=True, torchft=_WHOLE),
    Leaf("same python object twice", same_object_twice, trust=True, torchft=_WHOLE),
    Leaf("strided views of one storage", lambda: list(torch.arange(24.0).reshape(4, 6).unbind(1)), torchft=_WHOLE),
]

SPECIAL = [
    Leaf("tensor subclass", lambda: torch.arange(4.0).as_subclass(PlainSubclass), trust=True),
    Leaf("tensor subclass with attr", lambda: with_attribute(torch.arange(4.0).as_subclass(PlainSubclass)), trust=True),
    Leaf("wrapper subclass, __reduce_ex__", lambda: ReducedWrapper(torch.arange(4.0)), trust=True),
    Leaf(
        "wrapper subclass, __tensor_flatten__",
        lambda: FlattenWrapper(torch.arange(4, dtype=torch.int8), torch.tensor([0.5]), "per tensor"),
        trust=True,
    ),
    Leaf("DTensor replicate", lambda: distribute_tensor(torch.arange(8.0), mesh(), [Replicate()]), group=True),
    Leaf("DTensor shard(0)", lambda: distribute_tensor(torch.arange(8.0), mesh(), [ShardPlacement(0)]), group=True),
    Leaf(
        "DTensor Parameter",
        lambda: nn.Parameter(distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh(), [ShardPlacement(1)])),
        group=True,
    ),
    # torch's own pickling takes a DTensor whose local tensor starts inside its storage for a plain tensor.
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
    Leaf("sparse COO, coalesced", lambda: coo().coalesce()),
    Leaf("sparse CSR", lambda: torch.eye(3).to_sparse_csr(), warns=_CSR),
    Leaf("sparse CSC", lambda: torch.eye(3).to_sparse_csc(), warns=_CSR),
    Leaf("sparse BSR", lambda: torch.eye(4).to_sparse_bsr((2, 2)), warns=_CSR),
    Leaf(
        "nested, strided",
        lambda: torch.nested.nested_tensor([torch.arange(3.0), torch.arange(5.0)]),
        warns=_NESTED,
    ),
    Leaf("nested, jagged", jagged, warns=_NESTED),
    Leaf("masked tensor", lambda: masked_tensor(torch.arange(3.0), torch.tensor([True, False, True])), warns=_MASKED),
    Leaf(
        "quantized per tensor",
        lambda: torch.quantize_per_tensor(torch.linspace(0, 1, 6), 0.1, 3, torch.quint8),
        warns=_QUANTISED,
    ),
    Leaf(
        "quantized qint32 view",
        lambda: torch.quantize_per_tensor(torch.linspace(0, 1, 6), 0.1, 0, torch.qint32)[2:4],
        warns=_QUANTISED,
    ),
    Leaf("quantized per channel", per_channel, warns=_QUANTISED),
    Leaf("quantized per channel, 4 bit", float_channel, warns=_QUANTISED),
    Leaf("UntypedStorage", lambda: random_bytes(40).untyped_storage(), torchft=NEITHER, warns=_TYPED),
    Leaf("TypedStorage", lambda: torch.arange(5.0).storage(), warns=_TYPED),
    Leaf("torch.return_types", lambda: torch.arange(6.0).reshape(2, 3).max(dim=1)),
]

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
    Leaf("200 levels of dicts", lambda: nested_dicts(200), torchft=_WHOLE),
    Leaf("200 levels, mixed", lambda: nested_mixed(200), torchft=_WHOLE),
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

CARRIED = [*TENSORS, *PARAMETERS, *ALIASES, *SPECIAL, *OBJECTS, *TRAINING, *TREES]
CATALOGUE = {leaf.name: leaf for leaf in [*CARRIED, *REFUSED]}
assert len(CATALOGUE) == len(CARRIED) + len(REFUSED), "a name is used twice"
