"""The values of leaves in memory: their digests, and whether two are the same."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from ..._native import _check_machine_has, _checksum
from ...memory.tensors import spread_parts

#: Tensors that are described by dtype, shape and elements.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def has_elements(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are in memory as its dtype and shape describe them.

    Those of sparse and quantized tensors are described by more, and tensors on the device ``meta`` have none.
    """
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the elements of ``tensor``, for which :func:`has_elements` holds, in one piece.

    Raises:
        SystemRefused: it is a view that repeats its elements, and this machine has no memory for all of them
    """
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        _check_machine_has(tensor.numel() * tensor.element_size(), "a copy of a view")
    return tensor.resolve_conj().resolve_neg().contiguous()


def whole_of(value: Any) -> Any:
    """Returns ``value``; of a tensor that is spread over ranks, and of which one has all of it, what that rank has."""
    parts = spread_parts(value) if isinstance(value, torch.Tensor) else None
    if parts is not None and len(parts) == 1 and parts[0][0].size() == value.size():
        return parts[0][0]
    return value


def digest_of(tensor: torch.Tensor) -> str | None:
    """Returns CRC-64/NVME of a tensor's elements, in hexadecimal digits; ``None`` if it has no elements of its own.

    Raises:
        SystemRefused: the elements have to be copied, and this machine has no memory for that
    """
    if type(tensor) not in _PLAIN or not has_elements(tensor):
        return None
    copy = whole(tensor)
    return f"{_checksum(copy.data_ptr(), copy.numel() * copy.element_size()):016x}"


def _parts(tensor: torch.Tensor) -> list[Any]:
    """Returns what a sparse or quantized tensor consists of; nothing for other tensors."""
    if type(tensor) not in _PLAIN or tensor.is_meta:
        return []
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor.is_coalesced(), tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if not tensor.is_quantized:
        return []
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [str(tensor.qscheme()), tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point()]
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return [str(tensor.qscheme()), tensor.int_repr(), scales, zeros, tensor.q_per_channel_axis()]


def are_same(a: Any, b: Any) -> bool:
    """Whether two leaves have the same value, tensors bit by bit."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return False
        if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return False
        one, other = digest_of(a), digest_of(b)
        if one is not None and other is not None:
            return one == other
        parts = _parts(a), _parts(b)
        if parts[0] and parts[1]:
            return len(parts[0]) == len(parts[1]) and all(map(are_same, *parts))
    if type(a) is not type(b):
        return False
    try:
        if pickle.dumps(a) == pickle.dumps(b):
            return True
        return bool(a == b)
    except Exception:  # Objects of others can raise anything.
        return False
