"""The values of leaves in memory: their digests, and whether two are the same."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from .._native import _check_machine_has, _checksum
from ..errors import SystemRefused
from ..state.local_parts import is_partial, is_spread, local_tensors

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
        SystemRefused: its elements do not lie in order, and this machine has no memory for a copy
    """
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        _check_machine_has(tensor.numel() * tensor.element_size(), "a copy of a view")
    return tensor.resolve_conj().resolve_neg().contiguous()


def whole_of(value: Any) -> Any:
    """Returns ``value``; of a tensor that is spread over ranks, and of which one has all of it, what that rank has."""
    if isinstance(value, torch.Tensor) and is_spread(value) and not is_partial(value):
        parts = local_tensors(value)
        if len(parts) == 1 and parts[0].size() == value.size():
            return parts[0]
    return value


def digest_of(tensor: torch.Tensor) -> str | None:
    """Returns CRC-64/NVME of the elements of a tensor in host memory, in hexadecimal digits.

    ``None`` without elements of its own (:func:`has_elements`), and for subclasses other than ``Parameter``.

    Raises:
        SystemRefused: the elements have to be copied, and this machine has no memory for that
    """
    if type(tensor) not in _PLAIN or not has_elements(tensor):
        return None
    copy = whole(tensor)
    return f"{_checksum(copy.data_ptr(), copy.numel() * copy.element_size()):016x}"


@contextlib.contextmanager
def without_groups() -> Iterator[None]:
    """Keeps torch from warning that the meshes of DTensors are read without their process groups."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def are_same(a: Any, b: Any) -> bool:
    """Whether two leaves have the same value: tensors bit by bit, other objects by their pickles or by ``==``.

    Two whose comparison raises count as different.

    Raises:
        SystemRefused, MemoryError: there is no memory for the comparison, which says nothing of the leaves
    """
    try:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return _are_same_tensors(a, b)
        # To Python, 0.0 is -0.0, and NaN is not itself.
        return type(a) is type(b) and (
            pickle.dumps(a) == pickle.dumps(b) or (not isinstance(a, float | complex) and bool(a == b))
        )
    except (SystemRefused, MemoryError):
        raise
    except Exception:  # Objects of others can raise anything.
        return False


def _are_same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares what two tensors are, how they are spread over ranks, and their bits."""
    if is_spread(a) and is_spread(b):
        where = [[getattr(one, name, None) for name in ("placements", "device_mesh")] for one in (a, b)]
        one, other = local_tensors(a), local_tensors(b)
        return (
            (type(a), a.dtype, a.size()) == (type(b), b.dtype, b.size())
            and where[0] == where[1]
            and len(one) == len(other)
            and all(map(_are_same_tensors, one, other))
        )
    a, b = whole_of(a), whole_of(b)
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    digests = digest_of(a), digest_of(b)
    if None not in digests:
        return digests[0] == digests[1]
    return type(a) is type(b) and (a.is_meta or torch.equal(a, b))
