"""Converts torch tensors into memory (address, length, strides), and memory into torch tensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from .._native import Arena, Rows, _check_machine_has, _dtypes
from ..errors import SystemRefused

#: The dtypes that a container may have.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in _dtypes() if torch_name is not None
}
#: Those of them that only files of other programs have: older safetensors readers refuse a whole file for one dtype
#: that they do not know.
_ONLY_READ = {"F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
#: The dtypes that a container of this package names. Tensors of other dtypes (complex128, the rarer float8 kinds,
#: sub-byte and quantised dtypes) travel as bytes, with their dtype in the pickle.
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items() if name not in _ONLY_READ}
QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
#: Dtypes of which torch pickles the untyped storage, because they have no typed one.
_UNTYPED = torch.storage._new_dtypes()

#: From this many bytes on, memory has a mapping of its own. With one for smaller objects, too, a process would run out
#: of mappings.
_MAPPED = 1 << 20

_strided = torch.strided
_CPU = torch.device("cpu")


def no_rows(native: bool = False) -> Rows:
    """Returns an empty table of container entries.

    Args:
        native: let the native module read plain tensors itself if it knows this torch's memory layout of them
    """
    return Rows(Tensor, Parameter, DTYPE_NAMES, dtensor=dtensor_class(), native=native)


def dtensor_class() -> type | None:
    """Returns torch's class ``DTensor``; ``None`` if nothing in this process has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def sharded_tensor_class() -> type | None:
    """Returns torch's class ``ShardedTensor``; ``None`` if nothing in this process has imported it."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return getattr(module, "ShardedTensor", None)


def is_plain(value: Tensor) -> bool:
    """Whether ``value`` is fully described by its dtype, its shape and the bytes of its storage.

    Such a tensor fills its own storage from the first byte to the last and needs no pickle. The caller makes sure that
    the type of ``value`` is exactly ``Tensor`` or ``Parameter``, not a subclass.
    """
    return bool(
        value.layout is _strided
        and not value.is_nested
        and value.dtype in DTYPE_NAMES
        and value.is_contiguous()
        and value.storage_offset() == 0
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_meta
        and not value.__dict__
        and not value._backward_hooks
        and value.nbytes == value.untyped_storage().nbytes()
        and (value.data_ptr() != 0 or value.nbytes == 0)
        and _has_default_strides(value.shape, value)
    )


def _has_default_strides(shape: torch.Size, value: Tensor) -> bool:
    """Whether a contiguous tensor has the strides that its shape implies; with sizes of 0 or 1 it may have others."""
    if len(shape) == 1:
        return bool(value.stride(0) == 1)
    if 1 not in shape and 0 not in shape:
        return True
    expected, step = [], 1
    for dim in reversed(shape):
        expected.append(step)
        step *= max(dim, 1)
    return bool(value.stride() == tuple(reversed(expected)))


def storage_key(storage: torch.UntypedStorage) -> int:
    """Returns the identity of a storage: the same for all its tensors and wrappers, unique while the storage lives."""
    return int(storage._cdata)


def byte_span(value: Tensor) -> tuple[int, int] | None:
    """Returns the first and the last byte (exclusive) of its storage that ``value`` can reach; ``None`` if unknown.

    A tensor without elements reaches nothing, though its offset may lie behind the end of its storage.
    """
    try:
        if value.layout is not _strided or value.is_nested:
            return None
        if value.numel() == 0:
            return 0, 0
        size = value.element_size()
        start = value.storage_offset() * size
        if value.is_contiguous():
            return start, start + value.numel() * size
        reach = sum((dim - 1) * stride for dim, stride in zip(value.shape, value.stride(), strict=True))
        return start, start + (reach + 1) * size
    except Exception:  # Subclasses without strides, offset or storage may raise anything.
        return None


def without_memory(value: Tensor) -> str | None:
    """Returns why ``value`` has no memory behind it; ``None`` if it has, or if that is unknown."""
    if value.device.type == "meta":
        return "it is on the meta device, which has no memory"
    local = getattr(value, "_local_tensor", value)
    # Of subclasses it is unknown where their memory is.
    span = byte_span(local) if type(local) in (Tensor, Parameter) else None
    if span is None or span[0] == span[1]:
        return None
    nbytes = local.untyped_storage().nbytes()
    if span[1] > nbytes and not local.is_quantized:
        return "its memory was freed"
    return None if local.data_ptr() else "it has no memory behind its elements"


def why_not_writable(value: Tensor) -> str | None:
    """Returns why values cannot be written to ``value``; ``None`` if they can, or if that is unknown."""
    if (why := without_memory(value)) is not None:
        return why
    local = getattr(value, "_local_tensor", value)
    if byte_span(local) in (None, (0, 0)):
        return None
    if local.is_quantized and (why := why_not_copied(local.dtype, local)) is not None:
        return why
    if any(step == 0 and dim > 1 for step, dim in zip(local.stride(), local.shape, strict=True)):
        return "several of its elements share one place in memory: clone it first"
    return None


def why_not_copied(dtype: torch.dtype, target: Tensor, *, dense: bool = False) -> str | None:
    """Returns why torch cannot copy elements of ``dtype`` into ``target``; ``None`` if it can, or if that is unknown.

    ``dense`` says that they come from a tensor with a strided layout.
    """
    if dense and target.layout is not _strided:
        return f"torch copies no dense tensor into one with the layout {target.layout}"
    return None if _copies(dtype, target.dtype) else f"torch does not copy {dtype} to {target.dtype}"


@functools.lru_cache(maxsize=4096)
def _copies(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether torch copies elements of one dtype into a tensor of the other."""
    try:
        _element(target).copy_(_element(source))
    except RuntimeError:
        return False
    except Warning:
        # Of a cast that loses something, where warnings are errors.
        return True
    return True


def _element(dtype: torch.dtype) -> Tensor:
    if dtype in QUANTISED:
        return torch._empty_affine_quantized([1], scale=1.0, zero_point=0, dtype=dtype, device=_CPU)
    # Not torch.empty, which fills memory where algorithms are to be deterministic: it cannot for some dtypes.
    return torch.zeros(dtype.itemsize, dtype=torch.uint8, device=_CPU).view(dtype)


def rebuilds_from_local(value: Tensor) -> bool:
    """Whether ``value`` is a DTensor that its local tensor and its spec describe completely.

    Or one whose local tensor does not begin at its storage's start: torch's own pickling gets such a DTensor wrong.
    """
    local: Any = getattr(value, "_local_tensor", None)
    if type(value).__name__ != "DTensor" or type(local) is not Tensor:
        return False
    return not value.__dict__ or bool(local.storage_offset() > 0)


def rebuilds_without_grad(value: Tensor) -> bool:
    """Whether torch can pickle ``value`` but not read it back.

    That is so for tensors that require a gradient and have a dtype without a typed storage.
    """
    return type(value) is Tensor and value.dtype in _UNTYPED and bool(value.requires_grad)


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Returns a 1-D uint8 tensor over the whole storage, on the storage's device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def over(buffer: Any, offset: int, dtype: torch.dtype, shape: tuple[int, ...], nbytes: int) -> Tensor:
    """Returns a tensor over ``nbytes`` bytes of ``buffer``, from byte ``offset``; its storage is just these bytes."""
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device=_CPU)
    flat = torch.frombuffer(buffer, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)
    return flat if len(shape) == 1 else flat.view(shape)


def storage_over(buffer: Any, offset: int, nbytes: int) -> torch.UntypedStorage:
    """Returns a storage over ``nbytes`` bytes of ``buffer``, from byte ``offset``."""
    if nbytes == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()


def parameter(value: Tensor, requires_grad: bool) -> Parameter:
    """Returns a Parameter over the memory of ``value``."""
    return Parameter(value, requires_grad=requires_grad)


class Unread(torch.UntypedStorage):  # type: ignore[misc]  # mypy does not follow torch
    """Memory in place of bytes that are not read, which takes no pages until it is written to.

    What it holds is anything, so nothing may be built of its values: ``pickles/limits.py`` sees to that.
    """

    #: Whether the bytes have been read into it since.
    is_read = False

    def clone(self) -> torch.UntypedStorage:
        """Returns a copy, which is memory like any other."""
        return torch.UntypedStorage(self.nbytes()).copy_(self)


def dense(value: Tensor) -> Tensor | None:
    """Returns ``value`` with contiguous elements: detached if it has them, else a copy on the same device.

    ``None`` if bytes, dtype and shape do not describe ``value`` fully: for sparse, nested, quantised and meta tensors,
    and for subclasses of ``Tensor`` other than ``Parameter``.
    """
    value = value.detach()
    if type(value) is not Tensor or value.layout is not _strided or value.is_nested or value.is_quantized:
        return None
    if value.device.type == "meta" or value.numel() * value.element_size() != value.nbytes:
        return None
    return value.resolve_conj().resolve_neg().contiguous()


def reach(value: Tensor) -> tuple[torch.UntypedStorage, int, int]:
    """Returns the storage of a dense tensor, and its first and last byte (exclusive) there."""
    start = value.storage_offset() * value.element_size()
    return value.untyped_storage(), start, start + value.nbytes


def address(value: Tensor) -> int:
    """Returns the address of a tensor's first element; 0 if it has no elements."""
    return int(value.data_ptr()) if value.numel() else 0


def byte_strides(value: Tensor) -> list[int]:
    """Returns the strides of a tensor in bytes."""
    return [int(stride) * value.element_size() for stride in value.stride()]


def takes_bytes(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether elements of ``dtype`` can be written as bytes to the host memory of ``value``.

    They cannot if its dtype differs, its bits mean something else (conjugated, negated, quantised), or elements share
    memory.
    """
    if type(value) is not Tensor or value.device.type != "cpu" or value.dtype != dtype or value.layout is not _strided:
        return False
    if value.is_conj() or value.is_neg() or value.is_quantized or value.is_nested:
        return False
    if value.is_contiguous():
        return True
    extent = 1
    for stride, dim in sorted(
        (stride, dim) for stride, dim in zip(value.stride(), value.shape, strict=True) if dim > 1
    ):
        if stride < extent:
            return False
        extent = stride * dim
    return True


def scratch(nbytes: int) -> Tensor:
    """Returns ``nbytes`` bytes of uninitialised host memory as a 1-D uint8 tensor.

    Raises:
        SystemRefused: this machine does not have that much memory, or the system refuses it
    """
    _check_machine_has(nbytes, "what is to be read")
    return pageable(nbytes)


def pageable(nbytes: int) -> Tensor:
    """Returns ``nbytes`` bytes of uninitialised host memory as a 1-D uint8 tensor, whatever their number.

    Raises:
        SystemRefused: the system refuses it
    """
    try:
        # On the CPU, whatever torch.set_default_device says: bytes are written there by address.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as e:
        raise _no_host_memory(nbytes) from e


def _no_host_memory(nbytes: int) -> SystemRefused:
    return SystemRefused(
        f"cannot allocate {nbytes} bytes of host memory: the system refuses them. Free memory, or raise the limit of "
        "the process (ulimit -v) or of its container"
    )


def memory_for_bytes(nbytes: int) -> tuple[Any, int]:
    """Returns a buffer of ``nbytes`` bytes for data that is not a tensor, and its address (0 if it is empty).

    A peer or a file may have announced ``nbytes``: from ``_MAPPED`` on, a page takes memory only when the first byte is
    written to it.

    Raises:
        SystemRefused: this machine does not have that much memory, or the system refuses it
    """
    _check_machine_has(nbytes, "what is to be read")
    if nbytes >= _MAPPED and (part := Arena([nbytes]).part(0)) is not None:
        return part, part.address
    try:
        memory = bytearray(nbytes)
    except MemoryError as e:
        raise _no_host_memory(nbytes) from e
    return memory, address(torch.frombuffer(memory, dtype=torch.uint8)) if nbytes else 0


def view_as(flat: Tensor, dtype: torch.dtype, shape: list[int], strides: list[int]) -> Tensor:
    """Returns a view of the bytes ``flat`` as a tensor of this dtype and shape; ``strides`` are in bytes."""
    size = dtype.itemsize
    whole = flat[: len(flat) // size * size].view(dtype)
    return whole.as_strided(shape, [stride // size for stride in strides])


def count_as_written(values: Iterable[Any]) -> None:
    """Tells autograd that the values of existing tensors are about to change behind its back.

    A gradient that needs their old values is then an error, as after ``copy_``, and not a wrong number. Every door
    calls this before it writes the first byte.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    others = [value for value in tensors if type(value) is not Tensor]
    tensors += [local for value in others if isinstance(local := getattr(value, "_local_tensor", None), Tensor)]
    # Inference tensors have no counter. ShardedTensors refuse to say whether they are some.
    with torch._C.DisableTorchFunctionSubclass():
        increment_version([one for one in tensors if not one.is_inference()])


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copies the values of ``source`` into ``target``, which has the same dtype and shape and may be on a device."""
    with torch._C.DisableTorchFunctionSubclass():
        is_inference = target.is_inference()
    with torch.inference_mode() if is_inference else torch.no_grad():
        if type(target) is not Tensor and type(target) is type(source) and hasattr(target, "_local_tensor"):
            # A received DTensor has its local part on the host, whatever device its mesh has.
            target._local_tensor.copy_(source._local_tensor)
        else:
            target.copy_(source)
