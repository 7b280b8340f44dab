"""The one place that turns torch tensors into memory, and memory into torch tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

#: What a container can say of a dtype. What is missing here (complex128, the rarer float8 kinds, sub-byte and quantised
#: dtypes) travels as bytes, its dtype in the pickle: older safetensors readers refuse a file for one dtype they do not
#: know.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_strided = torch.strided


def is_plain(value: Tensor) -> bool:
    """Whether dtype, shape and the bytes of its storage are all there is to say of ``value``.

    Such a tensor fills a storage of its own from first byte to last and needs no pickle. ``value`` is exactly a
    ``Tensor`` or a ``Parameter``.
    """
    return (
        value.layout is _strided
        and not value.is_nested
        and value.dtype in DTYPE_NAMES
        and value.is_contiguous()
        and value.storage_offset() == 0
        and not value.is_conj()
        and not value.is_neg()
        and value.device.type != "meta"
        and not value.__dict__
        and not value._backward_hooks
        and value.nbytes == value.untyped_storage().nbytes()
    )


def storage_key(storage: torch.UntypedStorage) -> int:
    """The identity of a storage: the same for every tensor and wrapper that looks into it, while it lives."""
    return int(storage._cdata)


def byte_span(value: Tensor) -> tuple[int, int] | None:
    """First and last byte (exclusive) of its storage that ``value`` can reach, ``None`` if that cannot be told."""
    try:
        if value.layout is not _strided or value.is_nested:
            return None
        size = value.element_size()
        start = value.storage_offset() * size
        if value.numel() == 0:
            return start, start
        reach = sum((dim - 1) * stride for dim, stride in zip(value.shape, value.stride(), strict=True))
        return start, start + (reach + 1) * size
    except (RuntimeError, NotImplementedError, TypeError):
        # Wrapper subclasses may have no strides, offset or storage to speak of.
        return None


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """A 1-D uint8 tensor over the whole storage, on its device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def over(buffer: Any, offset: int, dtype: torch.dtype, shape: tuple[int, ...], nbytes: int) -> Tensor:
    """A tensor over ``nbytes`` bytes of ``buffer``, with a storage of its own that holds just these bytes."""
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)
    return flat if len(shape) == 1 else flat.view(shape)


def storage_over(buffer: Any, offset: int, nbytes: int) -> torch.UntypedStorage:
    """A storage over ``nbytes`` bytes of ``buffer``."""
    if nbytes == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()


def parameter(value: Tensor, requires_grad: bool) -> Parameter:
    """``value`` as a Parameter over the same memory."""
    return Parameter(value, requires_grad=requires_grad)


def receives_in_place(value: Tensor) -> bool:
    """Whether bytes from the network may go straight to where ``value`` is."""
    return value.device.type == "cpu" and is_plain(value)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Writes the values of ``source`` into ``target``, which has the same dtype and shape, on its own device."""
    with torch.no_grad():
        if type(target) is not Tensor and type(target) is type(source) and hasattr(target, "_local_tensor"):
            # A DTensor that came over the network has its local part on the host, whatever its mesh says.
            target._local_tensor.copy_(source._local_tensor)
        else:
            target.copy_(source)
