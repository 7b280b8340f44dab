"""The values of leaves in memory: their digests, and whether two are the same."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from ..._native import _check_machine_has, _checksum
from ...errors import SystemRefused, UnsupportedLeaf
from ...state.local_parts import is_partial, is_spread, local_tensors, spread_tensor

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
    """Whether two leaves have the same value: tensors bit by bit, those that are spread over ranks also in placements.

    What a process has left in an object beside its value, such as the hash that a mesh keeps, does not count.
    Two whose comparison raises count as different.

    Raises:
        SystemRefused, MemoryError: there is no memory for the comparison, which says nothing of the leaves
    """
    try:
        return _Comparison().of(a, b)
    except (SystemRefused, MemoryError):
        raise
    except Exception:  # Objects of others can raise anything.
        return False


class _Comparison:
    """Compares two values, each pair of objects in them once: they may contain themselves."""

    def __init__(self) -> None:
        self._begun: set[tuple[int, int]] = set()
        #: What was made for the comparison lives as long: a new object could get its address.
        self._made: list[Any] = []

    def of(self, a: Any, b: Any) -> bool:
        """Whether ``a`` and ``b`` have the same value. A pair whose comparison has begun counts as equal."""
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return self._same_tensors(a, b)
        if type(a) is not type(b):
            return False
        if a is b or isinstance(a, str | bytes | int | type):
            return bool(a == b)
        if isinstance(a, float | complex):
            # To Python, 0.0 is -0.0.
            return pickle.dumps(a) == pickle.dumps(b)
        if type(a) in (set, frozenset):
            return sorted(map(pickle.dumps, a)) == sorted(map(pickle.dumps, b))
        pair = id(a), id(b)
        if pair in self._begun:
            return True
        self._begun.add(pair)
        if type(a) in (list, tuple):
            return len(a) == len(b) and all(map(self.of, a, b))
        if type(a) is dict:
            return a.keys() == b.keys() and all(self.of(value, b[key]) for key, value in a.items())
        return self._same_objects(a, b)

    def _same_objects(self, a: Any, b: Any) -> bool:
        """Compares two objects of one class by their pickles, and then by what they are pickled as."""
        if pickle.dumps(a) == pickle.dumps(b):
            return True
        one, other = _reduced(a), _reduced(b)
        self._made += [one, other]
        return not isinstance(one, str) and self.of(one, other)

    def _same_tensors(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Compares dtype, shape, layout, and then digests of the elements, the parts of wrappers, or the objects."""
        if is_spread(a) and is_spread(b):
            return self._same_spread(a, b)
        a, b = whole_of(a), whole_of(b)
        if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return False
        one, other = digest_of(a), digest_of(b)
        if one is not None and other is not None:
            return one == other
        parts = _parts(a), _parts(b)
        self._made += parts
        if parts[0] and parts[1]:
            return len(parts[0]) == len(parts[1]) and all(map(self.of, *parts))
        return type(a) is type(b) and self._same_objects(a, b)

    def _same_spread(self, a: Any, b: Any) -> bool:
        """Compares what two tensors are parts of, how that is spread, and the parts."""
        if type(a) is not type(b) or (a.dtype, a.size()) != (b.dtype, b.size()):
            return False
        for name in ("placements", "device_mesh"):
            one, other = getattr(a, name, None), getattr(b, name, None)
            # A placement may equal one of another class.
            if one != other or (name == "placements" and [*map(type, one or ())] != [*map(type, other or ())]):
                return False
        parts, others = _local_parts(a), _local_parts(b)
        if [box for box, _ in parts] != [box for box, _ in others]:
            return False
        return all(self.of(one, other) for (_, one), (_, other) in zip(parts, others, strict=True))


def _local_parts(value: Any) -> list[tuple[Any, torch.Tensor]]:
    """Returns this rank's parts of a tensor, each with its box; the box is ``None`` if it has none in the whole."""
    try:
        spread = spread_tensor(value)
    except UnsupportedLeaf:
        return [(None, local) for local in local_tensors(value)]
    return [] if spread is None else [*spread.parts]


def _reduced(value: Any) -> Any:
    """Returns what an object is pickled as, without iterators and without hashes that it keeps."""
    reduced: Any = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    if isinstance(reduced, str):
        return reduced
    parts: list[Any] = [*reduced, None, None, None]
    function, arguments, state, items, pairs = parts[:5]
    if isinstance(state, dict):
        state = {name: one for name, one in state.items() if name != "_hash"}
    return [function, arguments, state, None if items is None else [*items], None if pairs is None else [*pairs]]
