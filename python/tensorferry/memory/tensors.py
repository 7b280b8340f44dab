"""The one place that turns torch tensors into memory, and memory into torch tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._native import Arena, Rows, _check_machine_has

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
#: Dtypes that torch pickles by their untyped storage.
_UNTYPED = torch.storage._new_dtypes()

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

#: Memory of this size or more is mapped on its own: with many small objects, a process would run out of mappings.
_MAPPED = 1 << 20

_strided = torch.strided


def no_rows(native: bool = False) -> Rows:
    """A container without entries yet.

    With ``native`` it reads tensors that are plain itself where it knows how torch lays them out.
    """
    return Rows(Tensor, Parameter, DTYPE_NAMES, native=native)


def is_plain(value: Tensor) -> bool:
    """Whether dtype, shape and the bytes of its storage are all there is to say of ``value``.

    Such a tensor fills a storage of its own from first byte to last and needs no pickle. ``value`` is exactly a
    ``Tensor`` or a ``Parameter``.
    """
    return bool(
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
        and (value.data_ptr() != 0 or value.nbytes == 0)
        and _has_default_strides(value.shape, value)
    )


def _has_default_strides(shape: torch.Size, value: Tensor) -> bool:
    """Whether a contiguous tensor has the strides its shape implies: only dimensions of size 0 or 1 leave a choice."""
    if 1 not in shape and 0 not in shape:
        return True
    expected, step = [], 1
    for dim in reversed(shape):
        expected.append(step)
        step *= max(dim, 1)
    return bool(value.stride() == tuple(reversed(expected)))


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
    except Exception:  # Subclasses may have no strides, offset or storage, and say so in any way they like.
        return None


def without_memory(value: Tensor) -> str | None:
    """Why there is no memory behind ``value``, ``None`` if there is, or nobody can tell."""
    if value.device.type == "meta":
        return "it is on the meta device, which has no memory"
    local = getattr(value, "_local_tensor", value)
    # Subclasses may have their memory anywhere.
    span = byte_span(local) if type(local) in (Tensor, Parameter) else None
    if span is None or span[0] == span[1]:
        return None
    nbytes = local.untyped_storage().nbytes()
    if span[1] > nbytes and not local.is_quantized:
        return "its memory was freed"
    return None if local.data_ptr() else "it has bytes, but no memory"


def why_not_writable(value: Tensor) -> str | None:
    """Why nothing can be written to ``value``, ``None`` if something can."""
    if (why := without_memory(value)) is not None:
        return why
    local = getattr(value, "_local_tensor", value)
    if byte_span(local) is None:
        return None
    if any(step == 0 and dim > 1 for step, dim in zip(local.stride(), local.shape, strict=True)):
        return "several of its elements share one place in memory: clone it first"
    return None


def is_dtensor_over_view(value: Tensor) -> bool:
    """Whether ``value`` is a DTensor whose local part begins inside its storage: torch's own pickling gets it wrong."""
    local: Any = getattr(value, "_local_tensor", None)
    return type(value).__name__ == "DTensor" and type(local) is Tensor and bool(local.storage_offset() > 0)


def rebuilds_without_grad(value: Tensor) -> bool:
    """Whether torch can pickle ``value`` but not read it back: dtypes without a typed storage, requiring a gradient."""
    return type(value) is Tensor and value.dtype in _UNTYPED and bool(value.requires_grad)


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """A 1-D uint8 tensor over the whole storage, on its device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def over(buffer: Any, offset: int, dtype: torch.dtype, shape: tuple[int, ...], nbytes: int) -> Tensor:
    """A tensor over ``nbytes`` bytes of ``buffer``, with a storage of its own that holds just these bytes."""
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
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


def dense(value: Tensor) -> Tensor | None:
    """``value`` with its elements one after the other: itself where they are, else a copy on the same device.

    ``None`` where bytes, dtype and shape do not say all there is to say: sparse, nested, quantised and meta tensors,
    and subclasses that are no plain memory.
    """
    value = value.detach()
    if type(value) is not Tensor or value.layout is not _strided or value.is_nested or value.is_quantized:
        return None
    if value.device.type == "meta" or value.numel() * value.element_size() != value.nbytes:
        return None
    return value.resolve_conj().resolve_neg().contiguous()


def reach(value: Tensor) -> tuple[torch.UntypedStorage, int, int]:
    """The storage a dense tensor lies in, and its first and last byte (exclusive) there."""
    start = value.storage_offset() * value.element_size()
    return value.untyped_storage(), start, start + value.nbytes


def address(value: Tensor) -> int:
    """Where a tensor's memory begins; 0 if it has none."""
    return int(value.data_ptr()) if value.numel() else 0


def byte_strides(value: Tensor) -> list[int]:
    """Bytes from one element to the next in each dimension."""
    return [int(stride) * value.element_size() for stride in value.stride()]


def takes_bytes(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether elements of ``dtype`` can be written as bytes to where ``value`` is, each to a place of its own."""
    if type(value) is not Tensor or value.device.type != "cpu" or value.dtype != dtype or value.layout is not _strided:
        return False
    if value.is_conj() or value.is_neg() or value.is_quantized or value.is_nested:
        return False
    extent = 1
    for stride, dim in sorted(
        (stride, dim) for stride, dim in zip(value.stride(), value.shape, strict=True) if dim > 1
    ):
        if stride < extent:
            return False
        extent = stride * dim
    return True


def scratch(nbytes: int) -> Tensor:
    """Memory of ``nbytes`` bytes, 1-D.

    Raises:
        SystemRefused: this machine has not so much
    """
    _check_machine_has(nbytes, "what is to be read")
    # Not where torch.set_default_device says: bytes go there by address.
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def room(nbytes: int) -> tuple[Any, int]:
    """A buffer of ``nbytes`` bytes for what is read and is no tensor, and where it begins; 0 if it has none.

    Somebody else may have said how many. From ``_MAPPED`` on no page is there before a byte comes to it.

    Raises:
        SystemRefused: this machine has not so much
    """
    _check_machine_has(nbytes, "what is to be read")
    if nbytes >= _MAPPED and (part := Arena([nbytes]).part(0)) is not None:
        return part, part.address
    memory = bytearray(nbytes)
    return memory, address(torch.frombuffer(memory, dtype=torch.uint8)) if nbytes else 0


def view_as(flat: Tensor, dtype: torch.dtype, shape: list[int], strides: list[int]) -> Tensor:
    """Bytes seen as elements of ``dtype``; ``strides`` are in bytes."""
    size = dtype.itemsize
    whole = flat[: len(flat) // size * size].view(dtype)
    return whole.as_strided(shape, [stride // size for stride in strides])


def copy_into(target: Tensor, source: Tensor) -> None:
    """Writes the values of ``source`` into ``target``, which has the same dtype and shape, on its own device."""
    with torch.no_grad():
        if type(target) is not Tensor and type(target) is type(source) and hasattr(target, "_local_tensor"):
            # A DTensor that came over the network has its local part on the host, whatever its mesh says.
            target._local_tensor.copy_(source._local_tensor)
        else:
            target.copy_(source)
