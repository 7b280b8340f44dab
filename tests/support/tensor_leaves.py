"""Tensors, parameters, aliases and special kinds of tensor, each as a named constructor."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.masked import masked_tensor

from leaf import BOTH_IF_EMPTY, NEITHER, ONLY_WHOLE, Leaf
from pickled_classes import FlattenWrapper, Holder, PlainSubclass, ReducedWrapper


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


def same_object_twice() -> list[Any]:
    config = Holder(lr=0.1)
    return [config, {"again": config}]


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
_MASKED = ("ignore:The PyTorch API of MaskedTensors:UserWarning",)

TENSORS = [
    *(Leaf(f"dtype {name}", functools.partial(of_dtype, name), warns=warns) for name, warns in DTYPES.items()),
    *(Leaf(f"dtype {name}", functools.partial(of_dtype, name), torchft=NEITHER) for name in SUB_BYTE_DTYPES),
    Leaf("NaN payload bits", nan_payloads),
    Leaf("0-dim", lambda: torch.tensor(3.5)),
    Leaf("empty (0,)", lambda: torch.empty(0), torchft=BOTH_IF_EMPTY),
    Leaf("empty (0,5)", lambda: torch.empty(0, 5, dtype=torch.bfloat16), torchft=BOTH_IF_EMPTY),
    Leaf("empty view of 96B storage", lambda: torch.arange(24.0)[3:3]),
    Leaf("empty view behind an empty storage", lambda: torch.zeros(0, 6)[:, 2:4], torchft=BOTH_IF_EMPTY),
    Leaf("empty view behind a 96B storage", lambda: torch.zeros(4, 6)[4:][:, 2:]),
    Leaf("empty, expanded", lambda: torch.zeros(0, 1).expand(0, 5), torchft=BOTH_IF_EMPTY),
    Leaf(
        "empty views behind a storage that others have",
        lambda: [(t := torch.arange(24.0).reshape(4, 6)), *t[4:].chunk(3, 1), t[1]],
        torchft=ONLY_WHOLE,
    ),
    *(
        Leaf(
            f"empty view behind its storage, {name}",
            lambda name=name: torch.zeros(0, 6, dtype=getattr(torch, name))[:, 2:4],
            torchft=BOTH_IF_EMPTY,
        )
        for name in ("float8_e4m3fn", "complex128", "uint16")
    ),
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
    *(
        Leaf(f"neg view, {name}", lambda name=name: torch._neg_view(torch.arange(4).to(getattr(torch, name))))
        for name in ("int32", "uint8", "bool", "float8_e4m3fn", "uint16")
    ),
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
    Leaf(
        "Parameter, bfloat16, empty",
        lambda: nn.Parameter(torch.empty(0, 4, dtype=torch.bfloat16)),
        torchft=BOTH_IF_EMPTY,
    ),
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
    # torch cannot unpickle a float8 tensor that requires grad unless it is a Parameter.
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
    Leaf("same object twice", lambda: [(t := torch.arange(4.0)), t], torchft=ONLY_WHOLE),
    Leaf("same Parameter twice", lambda: {"a": (p := parameter()), "b": {"c": p}}, torchft=ONLY_WHOLE),
    Leaf("same tensor in many places", same_tensor_many_places, torchft=ONLY_WHOLE),
    Leaf("2 views of 1 storage", two_views, torchft=ONLY_WHOLE),
    Leaf("Parameter and its data", parameter_and_data, torchft=ONLY_WHOLE),
    Leaf("3 views overlapping + dtype view", overlapping_views, torchft=NEITHER),
    Leaf("tensor and its UntypedStorage", tensor_and_its_storage, torchft=NEITHER),
    Leaf("overlapping storages", numpy_overlap),
    Leaf("two empty tensors", lambda: [torch.empty(0), torch.empty(0)], torchft=BOTH_IF_EMPTY),
    Leaf("equal but separate", lambda: [torch.zeros(64), torch.zeros(64)]),
    Leaf("tensor also inside an object", shared_with_object, trust=True, torchft=ONLY_WHOLE),
    Leaf("Parameter inside two objects", same_parameter_in_two_objects, trust=True, torchft=ONLY_WHOLE),
    Leaf("same python object twice", same_object_twice, trust=True, torchft=ONLY_WHOLE),
    Leaf("strided views of one storage", lambda: list(torch.arange(24.0).reshape(4, 6).unbind(1)), torchft=ONLY_WHOLE),
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
    # torch's own pickling treats a DTensor whose local tensor starts inside its storage as a plain tensor.
    Leaf(
        "DTensor over a view",
        torchft=NEITHER,
        make=lambda: DTensor.from_local(torch.arange(8.0)[2:6], mesh(), [ShardPlacement(0)], run_check=False),
        group=True,
    ),
    Leaf(
        "DTensor over an empty view behind its storage",
        torchft=BOTH_IF_EMPTY,
        make=lambda: DTensor.from_local(torch.zeros(0, 6)[:, 2:4], mesh(), [ShardPlacement(0)], run_check=False),
        group=True,
    ),
    Leaf(
        "ShardedTensor",
        sharded_tensor,
        group=True,
        warns=("ignore:Please use DTensor instead and we are:FutureWarning",),
    ),
    Leaf("sparse COO", coo),
    Leaf(
        "sparse COO, empty values behind their storage",
        lambda: torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 6)[:, 2:4], (3, 2), check_invariants=True
        ),
        torchft=BOTH_IF_EMPTY,
    ),
    Leaf("sparse COO, coalesced", lambda: coo().coalesce()),
    Leaf("sparse CSR", lambda: torch.eye(3).to_sparse_csr(), warns=_CSR),
    Leaf("sparse CSC", lambda: torch.eye(3).to_sparse_csc(), warns=_CSR),
    Leaf("sparse BSR", lambda: torch.eye(4).to_sparse_bsr((2, 2)), warns=_CSR),
    Leaf(
        "nested, strided",
        lambda: torch.nested.nested_tensor([torch.arange(3.0), torch.arange(5.0)]),
        warns=_NESTED,
    ),
    Leaf(
        "nested, a part behind its buffer",
        lambda: torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(0, 4)]).chunk(2, -1)[1],
        warns=_NESTED,
    ),
    Leaf(
        "nested, jagged, offsets with a neg bit",
        lambda: torch.nested.nested_tensor_from_jagged(
            torch.arange(5.0), offsets=torch._neg_view(torch.tensor([0, -2, -5]))
        ),
        expect=lambda _: torch.nested.nested_tensor_from_jagged(torch.arange(5.0), offsets=torch.tensor([0, 2, 5])),
        warns=_NESTED,
        torchft=NEITHER,
    ),
    Leaf("nested, jagged", jagged, warns=_NESTED, torchft=BOTH_IF_EMPTY),
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
    Leaf(
        "quantized, empty behind its storage",
        lambda: torch.quantize_per_tensor(torch.zeros(0, 6), 0.1, 3, torch.quint8)[:, 2:4],
        warns=_QUANTISED,
        torchft=BOTH_IF_EMPTY,
    ),
    Leaf("quantized per channel", per_channel, warns=_QUANTISED),
    Leaf("quantized per channel, 4 bit", float_channel, warns=_QUANTISED),
    Leaf("UntypedStorage", lambda: random_bytes(40).untyped_storage(), torchft=NEITHER, warns=_TYPED),
    Leaf("TypedStorage", lambda: torch.arange(5.0).storage(), warns=_TYPED),
    Leaf("torch.return_types", lambda: torch.arange(6.0).reshape(2, 3).max(dim=1)),
]
