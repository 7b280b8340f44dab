"""Tensors of torch, rebuilt from storages: none reaches beyond its memory, whatever a pickle says."""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.storage import TypedStorage

from ...memory.tensors import QUANTISED
from .kinds import Globals, Kind, all_are, as_value, build_attributes, checked_sizes, require, set_attributes

if TYPE_CHECKING:
    from ..unpickler import Unpickler


def _no_hooks(hooks: Any) -> None:
    require(hooks is None or (type(hooks) is collections.OrderedDict and not hooks), "hooks on a tensor")


def _not_quantised(dtype: Any) -> None:
    """Refuses what is no dtype, and a quantised one: torch would read scales that are not there."""
    require(type(dtype) is torch.dtype, "a tensor without a dtype")
    require(dtype not in QUANTISED, "a quantised tensor without its scales")


def _check_tensor(storage: Any, dtype: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any) -> None:
    """Refuses a tensor that reaches beyond its storage: torch would enlarge the storage, or read beyond its end."""
    _not_quantised(dtype)
    shape, steps = checked_sizes(size, "a shape"), checked_sizes(stride, "strides")
    require(len(shape) == len(steps), "strides that do not belong to the shape")
    require(type(offset) is int and 0 <= offset < 1 << 62, "an invalid offset")
    require(math.prod([n or 1 for n in shape]) < 1 << 62, "a shape that is too large")
    # A tensor without elements needs none of its storage, wherever it begins.
    end = 0 if 0 in shape else offset + 1 + sum([(n - 1) * step for n, step in zip(shape, steps, strict=True)])
    require(end * dtype.itemsize <= storage._untyped_storage.nbytes(), "a tensor that reaches beyond its storage")
    require(type(grad) is bool, "a requires_grad that is not a bool")
    _no_hooks(hooks)


def _check_bits(values: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Refuses metadata of a tensor other than the conj and neg bits, and a conj bit on numbers that cannot have one."""
    for flags in values:
        bits = type(flags) is dict and flags.keys() <= {"conj", "neg"} and all_are(bool, *flags.values())
        require(len(values) == 1 and (flags is None or bits), "tensor metadata other than the conj and neg bits")
        require(not (flags or {}).get("conj") or dtype.is_complex, "a conj bit on numbers that are not complex")


def _rebuild_tensor(unpickler: Unpickler, storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
    return _rebuild_tensor_v2(unpickler, storage, offset, size, stride, False, None)


def _rebuild_tensor_v2(
    _: Unpickler, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, *metadata: Any
) -> Tensor:
    """Does what ``torch._utils._rebuild_tensor_v2`` does, for a tensor that lies within its storage."""
    require(type(storage) is TypedStorage, "a tensor without a storage")
    _check_tensor(storage, storage.dtype, offset, size, stride, grad, hooks)
    _check_bits(metadata, storage.dtype)
    return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, grad, hooks, *metadata)


def _rebuild_tensor_v3(
    _: Unpickler, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *metadata: Any
) -> Tensor:
    """Does what ``torch._utils._rebuild_tensor_v3`` does, for a tensor that lies within its storage of bytes."""
    require(type(storage) is TypedStorage, "a tensor without a storage")
    _check_tensor(storage, dtype, offset, size, stride, grad, hooks)
    _check_bits(metadata, dtype)
    return torch._utils._rebuild_tensor_v3(storage, offset, size, stride, grad, hooks, dtype, *metadata)


def _rebuild_parameter(_: Unpickler, data: Any, grad: Any, hooks: Any) -> Tensor:
    require(isinstance(data, Tensor) and type(grad) is bool, "a Parameter without a tensor")
    _no_hooks(hooks)
    return Parameter(data, grad)


def rebuild_parameter_with_state(unpickler: Unpickler, data: Any, grad: Any, hooks: Any, state: Any) -> Tensor:
    """Stands for torch's function of this name, for parameters with attributes of their own."""
    made = _rebuild_parameter(unpickler, data, grad, hooks)
    set_attributes(made, state)
    return made


def is_plain(value: Any) -> bool:
    """Whether ``value`` is a dense tensor of numbers in host memory."""
    return is_dense(value) and value.device.type == "cpu" and not value.is_quantized


def is_dense(values: Any) -> bool:
    """Whether ``values`` is a tensor with strides, on any device."""
    return type(values) in (Tensor, Parameter) and values.layout is torch.strided and not values.is_nested


def _are_indices(values: Any) -> bool:
    return is_plain(values) and values.dtype in (torch.int64, torch.int32) and not values.is_neg()


def _rebuild_sparse_tensor(unpickler: Unpickler, layout: Any, data: Any) -> Tensor:
    """Does what ``torch._utils._rebuild_sparse_tensor`` does, with indices that are checked."""
    require(type(layout) is torch.layout and type(data) is tuple, "a sparse tensor with invalid parts")
    of = 1 if layout is torch.sparse_coo else 2
    require(len(data) in ((3, 4) if of == 1 else (4,)), "a sparse tensor with too few or too many parts")
    indices, values, size, coalesced = data[:of], data[of], data[of + 1], data[of + 2 :]
    require(
        all(map(_are_indices, indices)) and is_plain(values),
        "a sparse tensor whose indices or values are not dense tensors in host memory",
    )
    require(all([c is None or type(c) is bool for c in coalesced]), "a sparse tensor whose is_coalesced is not a bool")
    # Private indices: those of the pickle can share memory with another tensor, to which the user may write.
    parts = (*map(unpickler.private_copy, indices), values, checked_sizes(size, "a shape"))
    if of == 1:
        return torch.sparse_coo_tensor(*parts, check_invariants=True, is_coalesced=coalesced[0] if coalesced else None)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=True)


def _rebuild_meta_tensor(_: Unpickler, dtype: Any, size: Any, stride: Any, grad: Any) -> Tensor:
    require(type(grad) is bool, "a requires_grad that is not a bool")
    _not_quantised(dtype)
    shape, steps = checked_sizes(size, "a shape"), checked_sizes(stride, "strides")
    return torch._utils._rebuild_meta_tensor_no_storage(dtype, shape, steps, grad)


def _tensor(cls: Any) -> Kind:
    return Kind(cls, build=build_attributes)


#: The classes: module, name, and the function that creates the ``Kind`` of the class.
CLASSES: Globals = {
    "torch": {"Tensor": _tensor},
    "torch.storage": {"TypedStorage": as_value, "UntypedStorage": as_value},
    "torch.nn.parameter": {"Parameter": _tensor},
}

#: The functions: module, name, and the checked function that runs in place of the named one.
FUNCTIONS: Globals = {
    "torch._utils": {
        "_rebuild_meta_tensor_no_storage": _rebuild_meta_tensor,
        "_rebuild_parameter": _rebuild_parameter,
        "_rebuild_parameter_with_state": rebuild_parameter_with_state,
        "_rebuild_sparse_tensor": _rebuild_sparse_tensor,
        "_rebuild_tensor": _rebuild_tensor,
        "_rebuild_tensor_v2": _rebuild_tensor_v2,
        "_rebuild_tensor_v3": _rebuild_tensor_v3,
    },
}
