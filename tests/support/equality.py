"""Strict comparison of two states: a receiver must have what the sender had, down to the bits.

`assert_same_state` walks both trees side by side and raises an AssertionError that names the path of the first
difference. Beyond values it compares types, key order, the description of every tensor (dtype, shape, stride, storage
offset, storage size, requires_grad, conj and neg bits, Python attributes) and, over the whole tree, which leaves are
one object and which share a storage.

Only bytes that some tensor covers are compared: a transport need not send the rest of a storage.
"""

from __future__ import annotations

import ctypes
import enum
import io
import struct
import types
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

try:
    import numpy as np
except ImportError:  # torch and the wheel do not need numpy
    _SCALARS: tuple[type, ...] = ()
    _ARRAYS: tuple[type, ...] = ()
else:
    _SCALARS, _ARRAYS = (np.generic,), (np.ndarray,)

if TYPE_CHECKING:
    from collections.abc import Collection

METADATA = "metadata"  # attributes of dicts, as the `_metadata` of a module's state_dict
STORAGES = "storages"  # which tensors share a storage
OBJECTS = "objects"  # which leaves are the same object

_ATOMS = (type(None), bool, int, str, bytes, type(Ellipsis), type(NotImplemented), range, slice)
_SINGLETONS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    enum.Enum,
    torch.dtype,
    torch.layout,
    torch.memory_format,
)


def raw_bytes(tensor: torch.Tensor) -> bytes | None:
    """Returns the bytes of a strided CPU tensor's elements, in element order; None if it has no memory."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
            return None
        storage = tensor.untyped_storage()
        try:
            pointer = storage.data_ptr()
        except RuntimeError:  # wrapper subclasses have a storage without memory
            return None
        if tensor.numel() == 0:
            return b""
        if pointer == 0:
            return None
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        size = tensor.element_size()
        elements = whole.as_strided(
            (*tensor.shape, size), (*(s * size for s in tensor.stride()), 1), tensor.storage_offset() * size
        )
        dense = elements.contiguous()
        return ctypes.string_at(dense.data_ptr(), dense.nbytes)


def assert_same_state(actual: Any, expected: Any, *, lax: Collection[str] = ()) -> None:
    """Raise AssertionError naming the first path at which `actual` differs from `expected`.

    `lax` leaves comparisons out: any of METADATA, STORAGES, OBJECTS.
    """
    walk = _Walk(frozenset(lax))
    walk.compare(actual, expected, "state", leaf=True)
    if STORAGES not in walk.lax:
        walk.compare_storages()


def storages(state: Any) -> dict[int, torch.UntypedStorage]:
    """Returns every storage with memory that a tensor leaf of the state views, by the identity of the storage."""
    found = {}
    for leaf in torch.utils._pytree.tree_leaves(state):
        if isinstance(leaf, torch.Tensor) and raw_bytes(leaf):
            storage = leaf.untyped_storage()
            found[storage._cdata] = storage
    return found


class _Walk:
    def __init__(self, lax: frozenset[str]) -> None:
        self.lax = lax
        self.keep: list[Any] = []  # keeps ids from being reused while we compare by them
        self.done: set[tuple[int, int]] = set()
        self.forward: dict[int, int] = {}
        self.backward: dict[int, int] = {}
        self.tensors: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def compare(self, a: Any, b: Any, path: str, *, leaf: bool = False) -> None:
        """Compare two nodes. `leaf` says that this position of the pytree may be a container torch takes apart."""
        _require(type(a) is type(b), path, f"type {type(a).__qualname__}, expected {type(b).__qualname__}")
        if isinstance(b, _ATOMS) and type(b) in _ATOMS:
            _require(a == b, path, f"{a!r}, expected {b!r}")
            return
        if isinstance(b, _SINGLETONS):
            _require(a is b, path, f"{a!r} is not {b!r}")
            return
        if isinstance(b, (float, complex, *_SCALARS)):
            _require(_bits(a) == _bits(b), path, f"{a!r}, expected {b!r}")
            self._attributes(a, b, path)
            return
        if (id(a), id(b)) in self.done:
            return
        # Containers that pytree takes apart are built anew for every position, as in torchft. Everything else is one
        # object wherever it was one object.
        if not (leaf and _is_node(b)):
            self._same_object(a, b, path)
            self.done.add((id(a), id(b)))
        self.keep += [a, b]
        if isinstance(b, torch.Tensor):
            self._tensor(a, b, path)
        elif isinstance(b, dict):
            self._dict(a, b, path, leaf=leaf and _is_node(b))
        elif isinstance(b, (list, tuple, deque)):
            _require(len(a) == len(b), path, f"{len(a)} items, expected {len(b)}")
            if isinstance(b, deque):
                _require(a.maxlen == b.maxlen, path, f"maxlen {a.maxlen}, expected {b.maxlen}")
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                self.compare(x, y, f"{path}[{i}]", leaf=leaf and _is_node(b))
            self._attributes(a, b, path)
        elif isinstance(b, _ARRAYS):
            self._ndarray(a, b, path)
        elif isinstance(b, torch.UntypedStorage):
            _require(a.nbytes() == b.nbytes(), path, f"{a.nbytes()} bytes, expected {b.nbytes()}")
            as_tensor = [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in (a, b)]
            self._tensor(*as_tensor, path)
        elif isinstance(b, torch.storage.TypedStorage):
            _require(a.dtype == b.dtype, path, f"dtype {a.dtype}, expected {b.dtype}")
            self.compare(a._untyped_storage, b._untyped_storage, path)
        elif isinstance(b, torch.Generator):
            _require(torch.equal(a.get_state(), b.get_state()), path, "generator state differs")
        elif isinstance(b, io.BytesIO):
            _require((a.getvalue(), a.tell()) == (b.getvalue(), b.tell()), path, "BytesIO differs")
        elif isinstance(b, (str, int, bytes, bytearray, set, frozenset)):
            _require(a == b, path, f"{a!r}, expected {b!r}")
            self._attributes(a, b, path)
        else:
            self._object(a, b, path)

    def compare_storages(self) -> None:
        pairs: dict[int, tuple[int, str]] = {}
        owners: dict[int, tuple[int, str]] = {}
        spans = {}
        for path, a, b in self.tensors:
            sa, sb = a.untyped_storage(), b.untyped_storage()
            if sb.nbytes() == 0 or sb.data_ptr() == 0:
                continue
            mine, theirs = sa._cdata, sb._cdata
            got, first = pairs.setdefault(theirs, (mine, path))
            _require(got == mine, path, f"does not share the storage of {first} any more")
            got, first = owners.setdefault(mine, (theirs, path))
            _require(got == theirs, path, f"shares a storage with {first}, which it did not")
            spans[mine] = (sa.data_ptr(), sa.data_ptr() + sa.nbytes(), path)
        ends, before = 0, ""
        for start, end, path in sorted(spans.values()):
            _require(start >= ends, path, f"its memory overlaps that of {before}")
            ends, before = end, path

    def _same_object(self, a: Any, b: Any, path: str) -> None:
        if OBJECTS in self.lax or not _has_identity(b):
            return
        _require(self.forward.setdefault(id(b), id(a)) == id(a), path, "was the same object as an earlier leaf")
        _require(self.backward.setdefault(id(a), id(b)) == id(b), path, "is one object with an earlier leaf")

    def _dict(self, a: dict, b: dict, path: str, *, leaf: bool) -> None:
        _require(len(a) == len(b), path, f"keys {list(a)!r}, expected {list(b)!r}")
        for (k, x), (key, y) in zip(a.items(), b.items(), strict=True):
            self.compare(k, key, f"{path}.keys()")
            self.compare(x, y, f"{path}[{key!r}]", leaf=leaf)
        if isinstance(b, defaultdict):
            self.compare(a.default_factory, b.default_factory, f"{path}.default_factory")
        if METADATA not in self.lax:
            self._attributes(a, b, path)

    def _attributes(self, a: Any, b: Any, path: str, *, skip: tuple[str, ...] = ()) -> None:
        mine, theirs = _state_of(a), _state_of(b)
        for name in skip:
            mine.pop(name, None)
            theirs.pop(name, None)
        _require(mine.keys() == theirs.keys(), path, f"attributes {sorted(mine)}, expected {sorted(theirs)}")
        for name, value in theirs.items():
            self.compare(mine[name], value, f"{path}.{name}")

    def _object(self, a: Any, b: Any, path: str) -> None:
        if _state_of(b):
            self._attributes(a, b, path)
        else:
            _require(bool(a == b) or type(b).__eq__ is object.__eq__, path, f"{a!r}, expected {b!r}")

    def _ndarray(self, a: np.ndarray, b: np.ndarray, path: str) -> None:
        _require(a.dtype == b.dtype, path, f"dtype {a.dtype}, expected {b.dtype}")
        _require(a.shape == b.shape, path, f"shape {a.shape}, expected {b.shape}")
        if b.dtype.hasobject:
            for i, (x, y) in enumerate(zip(a.flat, b.flat, strict=True)):
                self.compare(x, y, f"{path}.flat[{i}]")
        else:
            _require(a.tobytes() == b.tobytes(), path, "array bytes differ")
        self._attributes(a, b, path)

    def _tensor(self, a: torch.Tensor, b: torch.Tensor, path: str) -> None:
        if isinstance(b, ShardedTensor):
            self.compare(a.metadata(), b.metadata(), f"{path}.metadata()")
            self._parts([s.tensor for s in a.local_shards()], [s.tensor for s in b.local_shards()], path)
            self.compare([s.metadata for s in a.local_shards()], [s.metadata for s in b.local_shards()], path)
            return
        for what in ("dtype", "layout", "device", "is_nested", "is_quantized", "is_sparse"):
            self._equal(a, b, what, path)
        if not b.is_nested:
            _require(a.shape == b.shape, path, f"shape {tuple(a.shape)}, expected {tuple(b.shape)}")
        for what in ("requires_grad", "is_leaf"):
            self._equal(a, b, what, path)
        for what in ("is_conj", "is_neg"):
            _require(getattr(a, what)() == getattr(b, what)(), path, f"{what}() differs")
        _require(a.grad is None, path, "came with a grad")
        if isinstance(b, DTensor):
            self._parts([a._local_tensor], [b._local_tensor], f"{path}._local_tensor")
            _require(a._spec == b._spec, path, f"spec {a._spec}, expected {b._spec}")
            _require(a.device_mesh == b.device_mesh, path, "device mesh differs")
            _require(a.placements == b.placements, path, f"placements {a.placements}, expected {b.placements}")
        elif b.is_nested:
            self._parts(list(a.unbind()), list(b.unbind()), path)
        elif is_traceable_wrapper_subclass(b):
            names, context = b.__tensor_flatten__()
            mine, mine_context = a.__tensor_flatten__()
            self.compare(mine, names, f"{path}.__tensor_flatten__()")
            self.compare(mine_context, context, f"{path}.__tensor_flatten__()")
            self._parts([getattr(a, n) for n in names], [getattr(b, n) for n in names], path)
        elif b.layout == torch.sparse_coo:
            _require(a.is_coalesced() == b.is_coalesced(), path, "is_coalesced() differs")
            self._parts([a._indices(), a._values()], [b._indices(), b._values()], path)
        elif b.layout == torch.sparse_csr:
            self._parts(*([t.crow_indices(), t.col_indices(), t.values()] for t in (a, b)), path)
        elif b.is_quantized:
            for what in ("qscheme", "q_scale", "q_zero_point"):
                _require(getattr(a, what)() == getattr(b, what)(), path, f"{what}() differs")
        if b.layout == torch.strided and not b.is_nested:
            self._strided(a, b, path)
        skip = ("_local_tensor", "_spec") if isinstance(b, DTensor) else ()
        self._attributes(a, b, path, skip=skip)

    def _strided(self, a: torch.Tensor, b: torch.Tensor, path: str) -> None:
        _require(a.stride() == b.stride(), path, f"stride {a.stride()}, expected {b.stride()}")
        _require(a.storage_offset() == b.storage_offset(), path, f"storage offset {a.storage_offset()}")
        if b.device.type != "cpu":
            return
        mine, theirs = raw_bytes(a), raw_bytes(b)
        _require((mine is None) == (theirs is None), path, "has memory on one side only")
        if theirs is None or mine is None:
            return
        have, want = a.untyped_storage().nbytes(), b.untyped_storage().nbytes()
        _require(have == want, path, f"storage of {have} bytes, expected {want}")
        _require(mine == theirs, path, "bytes differ")
        self.keep += [a.untyped_storage(), b.untyped_storage()]
        self.tensors.append((path, a, b))

    def _parts(self, a: list[torch.Tensor], b: list[torch.Tensor], path: str) -> None:
        """Compares inner tensors by description, bytes and storage, since their objects may be made on access."""
        _require(len(a) == len(b), path, f"{len(a)} inner tensors, expected {len(b)}")
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            self.keep += [x, y]
            _require(type(x) is type(y), f"{path}<{i}>", f"type {type(x)}, expected {type(y)}")
            self._tensor(x, y, f"{path}<{i}>")

    def _equal(self, a: Any, b: Any, what: str, path: str) -> None:
        mine, theirs = getattr(a, what), getattr(b, what)
        _require(mine == theirs, path, f"{what} {mine}, expected {theirs}")


def _require(condition: bool, path: str, text: str) -> None:
    if not condition:
        raise AssertionError(f"{path}: {text}")


def _is_node(value: Any) -> bool:
    if type(value) in (dict, list, tuple, OrderedDict, defaultdict, deque):
        return True
    return type(value) in torch.utils._pytree.SUPPORTED_NODES or torch.utils._pytree.is_namedtuple(value)


def _has_identity(value: Any) -> bool:
    # Immutable values: whether two equal ones are one object says nothing, and pickle itself may fold them.
    return not isinstance(value, (str, bytes, int, frozenset, tuple, torch.device, torch.layout))


def _bits(value: Any) -> Any:
    if isinstance(value, _SCALARS):
        return value.dtype, value.tobytes()
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return struct.pack("<d", value)


def _state_of(value: Any) -> dict[str, Any]:
    """Returns the instance attributes of an object: its `__dict__` and the slots of its classes."""
    state = dict(getattr(value, "__dict__", None) or {})
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{cls.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                state[name] = getattr(value, name)
    return state
