"""Tensors of torch, rebuilt from storages: none reaches beyond its memory, whatever a pickle says."""

from __future__ import annotations

import collections
import importlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.storage import TypedStorage

from ...memory.tensors import QUANTISED
from .kinds import Globals, Kind, Refused, all_are, as_value, build_attributes, checked_sizes, require, set_attributes

if TYPE_CHECKING:
    from ..unpickler import Unpickler


def _no_hooks(hooks: Any) -> None:
    require(hooks is None or (type(hooks) is collections.OrderedDict and not hooks), "hooks on a tensor")


def _check_bits(values: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Refuses metadata of a tensor other than the conj and neg bits, and a conj bit on numbers that cannot have one."""
    for flags in values:
        bits = type(flags) is dict and flags.keys() <= {"conj", "neg"} and all_are(bool, *flags.values())
        require(len(values) == 1 and (flags is None or bits), "tensor metadata other than the conj and neg bits")
        require(not (flags or {}).get("conj") or dtype.is_complex, "a conj bit on numbers that are not complex")


def _not_quantised(dtype: torch.dtype) -> None:
    """Refuses a quantised dtype where no scales are given: torch would read scales that are not there."""
    require(dtype not in QUANTISED, "a quantised tensor without its scales")


def _within(storage: Any, offset: Any, size: Any, stride: Any, bits: int) -> None:
    """Refuses a tensor that reaches beyond its storage: torch would enlarge the storage, or read beyond its end."""
    require(type(storage) is TypedStorage, "a tensor without a storage")
    shape, steps = checked_sizes(size, "a shape"), checked_sizes(stride, "strides")
    require(len(shape) == len(steps), "strides that do not belong to the shape")
    require(type(offset) is int and 0 <= offset < 1 << 62, "an invalid offset")
    require(math.prod([n or 1 for n in shape]) < 1 << 62, "a shape that is too large")
    nbytes = storage._untyped_storage.nbytes()
    require(_end(offset, shape, steps) * bits <= nbytes * 8, "a tensor that reaches beyond its storage")


def _end(offset: int, shape: Sequence[int], steps: Sequence[int]) -> int:
    """Returns how many elements of its storage a tensor needs: none if it has none, wherever it begins."""
    return 0 if 0 in shape else offset + 1 + sum([(n - 1) * step for n, step in zip(shape, steps, strict=True)])


def _bits(dtype: torch.dtype) -> int:
    return _PACKED.get(dtype) or int(dtype.itemsize) * 8


#: Bits of an element of the quantised dtypes with several elements in a byte.
_PACKED = {torch.quint4x2: 4, torch.quint2x4: 2}


def _rebuild_tensor(unpickler: Unpickler, storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
    return _rebuild_tensor_v2(unpickler, storage, offset, size, stride, False, None)


def _rebuild_tensor_v2(
    _: Unpickler, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, *metadata: Any
) -> Tensor:
    """Does what ``torch._utils._rebuild_tensor_v2`` does, for a tensor that lies within its storage."""
    require(type(storage) is TypedStorage, "a tensor without a storage")
    _not_quantised(storage.dtype)
    _within(storage, offset, size, stride, storage.dtype.itemsize * 8)
    require(type(grad) is bool, "a requires_grad that is not a bool")
    _no_hooks(hooks)
    _check_bits(metadata, storage.dtype)
    return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, grad, hooks, *metadata)


def _rebuild_tensor_v3(
    _: Unpickler, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *metadata: Any
) -> Tensor:
    """Does what ``torch._utils._rebuild_tensor_v3`` does, for a tensor that lies within its storage of bytes."""
    require(type(dtype) is torch.dtype, "a tensor without a dtype")
    _not_quantised(dtype)
    _within(storage, offset, size, stride, dtype.itemsize * 8)
    require(type(grad) is bool, "a requires_grad that is not a bool")
    _no_hooks(hooks)
    _check_bits(metadata, dtype)
    return torch._utils._rebuild_tensor_v3(storage, offset, size, stride, grad, hooks, dtype, *metadata)


def _rebuild_qtensor(
    unpickler: Unpickler, storage: Any, offset: Any, size: Any, stride: Any, how: Any, grad: Any, hooks: Any
) -> Tensor:
    """Does what ``torch._utils._rebuild_qtensor`` does, for scales and zero points that fit the tensor."""
    require(type(storage) is TypedStorage, "a tensor without a storage")
    _within(storage, offset, size, stride, _bits(storage.dtype))
    # torch first creates a tensor with as many elements.
    require(
        math.prod(size) * _bits(storage.dtype) <= 8 * storage._untyped_storage.nbytes(),
        "a quantised tensor whose elements share memory",
    )
    require(type(grad) is bool and type(how) is tuple and how, "a quantised tensor without its scales")
    _no_hooks(hooks)
    match how:
        case (torch.per_tensor_affine, float(), int()):
            pass
        case (torch.per_channel_affine | torch.per_channel_affine_float_qparams, scales, zeros, int(axis)):
            require(
                is_plain(scales) and is_plain(zeros) and 0 <= axis < len(size),
                "scales or zero points that are not tensors",
            )
            require(scales.dim() == zeros.dim() == 1, "scales or zero points that are not one-dimensional")
            require(scales.numel() == zeros.numel() == size[axis], "scales for another number of channels")
            require(scales.is_floating_point() and not zeros.is_complex(), "scales that are not floating-point numbers")
            # torch converts the elements of both to eight bytes each.
            unpickler.count_tensor(scales, 8)
            unpickler.count_tensor(zeros, 8)
        case _:
            raise Refused("a quantised tensor with an unknown scheme")
    unpickler.count_checks(math.prod(size) >> 6)
    return torch._utils._rebuild_qtensor(storage, offset, size, stride, how, grad, hooks)


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
    return (
        type(value) in (Tensor, Parameter)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_nested
        and not value.is_quantized
    )


def _are_indices(values: Any) -> bool:
    return is_plain(values) and values.dtype in (torch.int64, torch.int32)


def is_dense(values: Any) -> bool:
    """Whether ``values`` is a tensor with strides, on any device."""
    return type(values) in (Tensor, Parameter) and values.layout is torch.strided and not values.is_nested


def _rebuild_sparse_tensor(unpickler: Unpickler, layout: Any, data: Any) -> Tensor:
    """Does what ``torch._utils._rebuild_sparse_tensor`` does, with indices that are checked."""
    require(
        type(layout) is torch.layout and type(data) is tuple and len(data) in (3, 4),
        "a sparse tensor with invalid parts",
    )
    if layout is torch.sparse_coo:
        indices, values, size, *coalesced = data
        require(
            _are_indices(indices) and is_dense(values), "a sparse tensor whose indices or values are not dense tensors"
        )
        require(
            values.device.type == "cpu" and not values.is_quantized,
            "a sparse tensor whose values are not numbers in host memory",
        )
        require(
            all([c is None or type(c) is bool for c in coalesced]), "a sparse tensor whose is_coalesced is not a bool"
        )
        unpickler.count_checks(indices.numel() >> 6)
        # Private indices: those of the pickle can share memory with another tensor, to which the user may write.
        return torch.sparse_coo_tensor(
            unpickler.private_copy(indices),
            values,
            checked_sizes(size, "a shape"),
            check_invariants=True,
            is_coalesced=coalesced[0] if coalesced else None,
        )
    require(len(data) == 4, "a sparse tensor that does not have four parts")
    compressed, plain, values, size = data
    require(
        _are_indices(compressed) and _are_indices(plain) and is_dense(values),
        "a sparse tensor whose indices or values are not dense tensors",
    )
    require(
        values.device.type == "cpu" and not values.is_quantized,
        "a sparse tensor whose values are not numbers in host memory",
    )
    unpickler.count_checks((compressed.numel() + plain.numel()) >> 6)
    return torch.sparse_compressed_tensor(
        unpickler.private_copy(compressed),
        unpickler.private_copy(plain),
        values,
        checked_sizes(size, "a shape"),
        layout=layout,
        check_invariants=True,
    )


def _rebuild_nested_tensor(unpickler: Unpickler, buffer: Any, sizes: Any, strides: Any, offsets: Any) -> Tensor:
    """Does what ``torch._utils._rebuild_nested_tensor`` does, for parts that lie within ``buffer``."""
    require(
        is_plain(buffer) and buffer.dim() == 1 and buffer.is_contiguous(), "a nested tensor without a contiguous buffer"
    )
    shapes = all([is_plain(part) and part.dtype is torch.int64 for part in (sizes, strides, offsets)])
    require(shapes and sizes.dim() == 2 and sizes.shape == strides.shape, "a nested tensor without valid shapes")
    require(offsets.shape == sizes.shape[:1], "a nested tensor without an offset for each shape")
    unpickler.count_checks(len(sizes) + sizes.numel())
    # Private shapes, for the same reason as private indices.
    sizes, strides, offsets = map(unpickler.private_copy, (sizes, strides, offsets))
    for shape, steps, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        require(min([offset, *shape, *steps]) >= 0, "a nested tensor with negative sizes, strides or offsets")
        require(_end(offset, shape, steps) <= buffer.numel(), "a nested tensor that reaches beyond its buffer")
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


JAGGED = ("_values", "_offsets", "_lengths", "_ragged_idx", "_metadata_cache")


def rebuild_jagged(unpickler: Unpickler, parts: Any) -> Tensor:
    """Stands for torch's ``_rebuild_njt``: nested tensors of rows of different lengths, in the layout ``jagged``."""
    require(type(parts) is dict and all_are(str, *parts), "a jagged tensor whose parts are not a dict")
    names = {"values", "offsets", "lengths", "_ragged_idx", "_metadata_cache", "requires_grad"}
    require(
        parts.keys() <= names and {"values", "offsets"} <= parts.keys(), "a jagged tensor with unknown or missing parts"
    )
    values, offsets, lengths = parts["values"], parts["offsets"], parts.get("lengths")
    ragged, cached = parts.get("_ragged_idx", 1), parts.get("_metadata_cache") or {}
    require(
        is_dense(values) and _are_indices(offsets) and offsets.dim() == 1 and len(offsets) > 0,
        "a jagged tensor without valid values and offsets",
    )
    require(type(ragged) is int and 0 < ragged <= values.dim(), "a jagged tensor with an invalid ragged dimension")
    require(type(parts.get("requires_grad", False)) is bool, "a requires_grad that is not a bool")
    require(type(cached) is dict and all_are(str, *cached), "a jagged tensor whose cache has keys that are not strings")
    require(
        all([type(size) is int or is_plain(size) for size in cached.values()]),
        "a jagged tensor whose cache has values that are not sizes",
    )
    unpickler.count_checks(len(offsets) >> 6)
    # private_copy() returns the same copy for the same offsets: jagged tensors that share them belong together.
    offsets = unpickler.private_copy(offsets)
    rows, end = offsets.diff(), values.shape[ragged - 1]
    require(
        bool((rows >= 0).all()) and offsets[0] >= 0 and offsets[-1] <= end,
        "a jagged tensor with rows beyond its values",
    )
    if lengths is not None:
        require(_are_indices(lengths) and lengths.shape == rows.shape, "a jagged tensor with invalid lengths")
        lengths = unpickler.private_copy(lengths)
        require(
            bool((lengths >= 0).all()) and bool((offsets[:-1] + lengths <= end).all()),
            "a jagged tensor with rows beyond its values",
        )
    module = importlib.import_module("torch.nested._internal.nested_tensor")
    return module._rebuild_njt({**parts, "offsets": offsets, "lengths": lengths})


def _rebuild_meta_tensor(_: Unpickler, dtype: Any, size: Any, stride: Any, grad: Any) -> Tensor:
    require(type(dtype) is torch.dtype and type(grad) is bool, "a tensor without a dtype")
    _not_quantised(dtype)
    shape, steps = checked_sizes(size, "a shape"), checked_sizes(stride, "strides")
    return torch._utils._rebuild_meta_tensor_no_storage(dtype, shape, steps, grad)


def _rebuild_on_device(unpickler: Unpickler, data: Any, dtype: Any, device: Any, grad: Any) -> Tensor:
    require(is_plain(data) and type(dtype) is torch.dtype and type(grad) is bool, "a tensor without data or a dtype")
    require(type(device) in (str, torch.device), "an invalid device")
    _not_quantised(dtype)
    unpickler.count_tensor(data, dtype.itemsize)
    return torch._utils._rebuild_device_tensor_from_cpu_tensor(data, dtype, device, grad)


def _uninitialized(cls: Any) -> Kind:
    def call(_: Unpickler, grad: Any) -> Any:
        require(type(grad) is bool, "a requires_grad that is not a bool")
        return cls(grad)

    return Kind(cls, call=call)


def _tensor(cls: Any) -> Kind:
    return Kind(cls, build=build_attributes)


#: The classes: module, name, and the function that creates the ``Kind`` of the class.
CLASSES: Globals = {
    "torch": {"Tensor": _tensor},
    "torch.storage": {"TypedStorage": as_value, "UntypedStorage": as_value},
    "torch.nn.parameter": {
        "Parameter": _tensor,
        "UninitializedBuffer": _uninitialized,
        "UninitializedParameter": _uninitialized,
    },
    "torch.nested._internal.nested_tensor": {"NestedTensor": as_value},
}

#: The functions: module, name, and the checked function that runs in place of the named one.
FUNCTIONS: Globals = {
    "torch._utils": {
        "_rebuild_device_tensor_from_cpu_tensor": _rebuild_on_device,
        "_rebuild_meta_tensor_no_storage": _rebuild_meta_tensor,
        "_rebuild_nested_tensor": _rebuild_nested_tensor,
        "_rebuild_parameter": _rebuild_parameter,
        "_rebuild_parameter_with_state": rebuild_parameter_with_state,
        "_rebuild_qtensor": _rebuild_qtensor,
        "_rebuild_sparse_tensor": _rebuild_sparse_tensor,
        "_rebuild_tensor": _rebuild_tensor,
        "_rebuild_tensor_v2": _rebuild_tensor_v2,
        "_rebuild_tensor_v3": _rebuild_tensor_v3,
    },
    "torch.nested._internal.nested_tensor": {"_rebuild_njt": rebuild_jagged},
}
