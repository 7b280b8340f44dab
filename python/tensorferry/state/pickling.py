"""The pickle of everything in a state that is not a plain tensor. Storages are not in it: they travel in the payload.

A sender pickles a list of objects with ``dump``. A storage is written as a reference, so that tensors in the pickle
still share storages with each other and with plain tensors. A receiver unpickles with ``load`` and an allow-list.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.storage import TypedStorage

from .._native import _number_of_storage, _pickle_objects, _pickle_plain, _reach, _restart
from .._rebuild import rebuild_dtensor, with_grad
from ..errors import ProtocolError, TensorferryError, UnsafePickle, UnsupportedLeaf
from ..memory.tensors import byte_span, rebuilds_from_local, rebuilds_without_grad, storage_key
from ..pickles.allowlist import Allowed
from ..pickles.globals.kinds import Refused
from ..pickles.unpickler import Unpickler, unpickler_class
from .tree import Flat

#: 4 rather than 5: with 5, numpy arrays refer to a private function of numpy, whose module moved between versions.
PROTOCOL = 4


_GLOBALS = (type, types.FunctionType, types.BuiltinFunctionType)

#: torch's classes that keep the hash of their fields once it was asked for. It differs from process to process.
_KEEPS_HASH = frozenset({"DTensorSpec", "DeviceMesh"})

#: What rebuilds a tensor, a Parameter and a DTensor, and the class of their hooks.
_FUNCTIONS = (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_parameter, rebuild_dtensor, OrderedDict)


@functools.cache
def _of_numpy(numpy: Any) -> tuple[Any, ...]:
    """Returns numpy's classes of arrays and scalars, and the functions that rebuild both."""
    return numpy.ndarray, numpy.generic, numpy.empty(0).__reduce__()[0], numpy.float32().__reduce__()[0]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, flat: Flat) -> None:
        super().__init__(file, PROTOCOL)
        self._file = file
        self._flat = flat
        self._one = False
        self._now: Any = None
        self._tensor_storage: tuple[int, tuple[int, int]] | None = None
        self._is_packed = False
        numpy: Any = sys.modules.get("numpy")
        self._natively = (torch.Tensor, numpy.ndarray) if numpy else (torch.Tensor,)
        self.globals: dict[tuple[str, str], str] = {}
        self._specs: dict[tuple[Any, ...], Any] = {}
        self._paths: dict[int, str] = {}
        self._path = ""

    def all(self) -> bytes:
        """Returns the pickle of all objects."""
        flat = self._flat
        _restart(flat.rows)
        self._paths = {id(value): path for value, path in zip(flat.objects, flat.object_paths, strict=True)}
        self.dump(flat.objects)
        return self._file.getvalue()

    def one(self, value: Any, number: int) -> bytes | None:
        """Returns the pickle of ``value``, which belongs to the object with this number.

        ``None`` if it has to be in one pickle with the other objects: it refers to one that is pickled natively, or it
        cannot be pickled, which :meth:`all` then reports.
        """
        self._one, self._now, self._path = True, value, self._flat.object_paths[number]
        self._file.seek(0)
        self._file.truncate()
        try:
            self.dump(value)
        except Exception:  # A class may raise anything while it is pickled.
            return None
        return self._file.getvalue()

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        """Returns what the pickle has in place of a plain tensor or a storage; ``None`` for all other values."""
        if self._one:
            if isinstance(value, self._natively) and value is not self._now and self._is_native(value):
                raise _Entangled
        else:
            self._path = self._paths.get(id(value), self._path)
        if isinstance(value, torch.Tensor):
            leaf = self._flat.number_of(value)
            if leaf is not None:
                return ("leaf", leaf)
            # The pickler comes to this tensor's storage next: note the span that the tensor can reach.
            span = byte_span(value)
            self._tensor_storage = None if span is None else (_key_of(value), span)
            self._is_packed = span is not None and value.is_quantized
            return None
        if isinstance(value, TypedStorage):
            return ("typed", self._number(value._untyped_storage), str(value.dtype).removeprefix("torch."))
        if isinstance(value, torch.UntypedStorage):
            # Tensors of dtypes without a typed storage are pickled with an untyped one; torch rebuilds them from a
            # typed storage of bytes.
            of_tensor = self._tensor_storage is not None and self._tensor_storage[0] == storage_key(value)
            return ("typed", self._number(value), "uint8") if of_tensor else ("untyped", self._number(value))
        return None

    def reducer_override(self, value: Any) -> Any:
        """Notes the globals that the pickle names, and pickles some tensors by functions of our own."""
        if isinstance(value, _GLOBALS):
            self.globals.setdefault((value.__module__ or "", value.__qualname__), self._path)
            return NotImplemented
        if type(value).__name__ in _KEEPS_HASH and getattr(value, "_hash", None) is not None:
            return _without_hash(value)
        if isinstance(value, torch.Tensor) and rebuilds_without_grad(value):
            return with_grad, (value.detach(),), value.__dict__ or None
        if isinstance(value, torch.Tensor) and rebuilds_from_local(value):
            return rebuild_dtensor, (value._local_tensor, self._spec(value._spec), value.requires_grad)
        return NotImplemented

    def _is_native(self, value: Any) -> bool:
        """Whether an object that may be changed is one that is pickled natively."""
        if isinstance(value, torch.Tensor):
            return self._flat.rows.is_view(value)
        return self._flat.rows.number_of(value) is not None

    def _spec(self, spec: Any) -> Any:
        """Returns the first spec of a DTensor that says the same as ``spec``: the pickle then has it only once.

        A spec is longer than everything else that describes a DTensor, and each DTensor has one of its own.
        """
        fields = {name: value for name, value in vars(spec).items() if name not in ("_hash", "mesh")}
        # A placement may equal one of another class.
        key = (id(spec.mesh), *map(type, spec.placements), *fields.items())
        try:
            return self._specs.setdefault(key, spec)
        except TypeError:  # It cannot be hashed.
            return spec

    def _number(self, storage: torch.UntypedStorage) -> int:
        """Returns the number by which the pickle names a storage; notes which of its bytes the tensors reach."""
        key = storage_key(storage)
        address = storage.data_ptr()
        if storage.nbytes() and not address:
            raise ValueError(f"its storage has {storage.nbytes()} bytes, but no memory")
        whole = (0, storage.nbytes())
        span = whole if self._tensor_storage is None or self._tensor_storage[0] != key else self._tensor_storage[1]
        if span[1] > whole[1]:
            # Packed quantised dtypes have more elements than bytes. For others the memory was freed, as FSDP does with
            # storages between steps.
            if not self._is_packed:
                raise ValueError(f"its storage has {whole[1]} bytes and it needs {span[1]}: the memory was freed")
            span = whole
        return _reach(self._flat.rows, storage, key, (address, whole[1]), span)


def _without_hash(value: Any) -> Any:
    """Returns how ``value`` is pickled, without the hash that it keeps: whoever reads it makes one of its own."""
    function, arguments, state, *more = value.__reduce_ex__(PROTOCOL)
    return function, arguments, {**state, "_hash": None} if isinstance(state, dict) else state, *more


def _is_any_overridden() -> bool:
    """Whether a program has told ``copyreg`` how to pickle a class whose objects are otherwise pickled natively."""
    numpy: Any = sys.modules.get("numpy")
    bases = (torch.Tensor, numpy.ndarray, numpy.generic) if numpy else (torch.Tensor,)
    return any([isinstance(kind, type) and issubclass(kind, bases) for kind in copyreg.dispatch_table])


def _key_of(value: torch.Tensor) -> int:
    try:
        return storage_key(value.untyped_storage())
    except Exception:  # As in byte_span.
        return 0


class _Entangled(Exception):
    """An object refers to another one, and both have to be in one pickle of Python's."""


def plain(flat: Flat) -> tuple[bytes, dict[tuple[str, str], str]] | None:
    """Pickles ``flat.objects`` if they are numbers, text, ``None``, or dicts, lists and tuples of these.

    Returns:
        As :func:`dump`; ``None`` if there is anything else among them.
    """
    ordered = None if OrderedDict in copyreg.dispatch_table else OrderedDict
    pickled = _pickle_plain(flat.rows, ordered)
    if pickled is None:
        return None
    data, first = pickled
    return data, {} if first is None else {("collections", "OrderedDict"): flat.object_paths[first]}


def dump(flat: Flat) -> tuple[bytes, dict[tuple[str, str], str]]:
    """Pickles ``flat.objects``.

    Returns:
        The pickle; and for each global that it names, as ``(module, name)``, the path of the first leaf that needs it.

    Raises:
        UnsupportedLeaf: an object cannot be pickled; the message names its path
    """
    pickler = _Pickler(io.BytesIO(), flat)
    data = None
    if flat.native and not _is_any_overridden():
        numpy: Any = sys.modules.get("numpy")
        data = _pickle_objects(flat.rows, pickler.one, _FUNCTIONS, _of_numpy(numpy) if numpy else None)
    if data is None:
        pickler = _Pickler(io.BytesIO(), flat)
        try:
            data = pickler.all()
        except Exception as e:
            raise _blame(flat, e) from e
    return data, pickler.globals


def numbers(flat: Flat) -> Callable[[torch.UntypedStorage], int | None]:
    """Returns a function that returns the number of a storage in the pickle of ``flat``; ``None`` for others."""
    return lambda storage: _number_of_storage(flat.rows, storage_key(storage))


def _blame(flat: Flat, error: Exception) -> UnsupportedLeaf:
    """Pickles the objects one by one to find the one that fails; returns the error that names it."""
    for value, path in zip(flat.objects, flat.object_paths, strict=True):
        try:
            _Pickler(io.BytesIO(), flat).dump(value)
        except Exception as e:
            return UnsupportedLeaf(
                f"the state cannot be sent: {path or 'the root'} is a {type(value).__module__}."
                f"{type(value).__qualname__} that cannot be pickled ({type(e).__name__}: {e}); leave it out of the "
                "state, or give its class a __reduce__"
            )
    return UnsupportedLeaf(f"the state cannot be sent: {type(error).__name__}: {error}")


def load(
    data: bytes,
    allowed: Allowed,
    leaves: Sequence[torch.Tensor],
    storage: Callable[[int], torch.UntypedStorage],
    needs: dict[str, str],
) -> list[Any]:
    """Unpickles what ``dump`` wrote.

    Args:
        data: the pickle; padding behind it is ignored
        allowed: the globals that the pickle may name
        leaves: the plain tensors
        storage: returns the storage with a number
        needs: for each global the path of a leaf that needs it, for messages

    Returns:
        The objects.

    Raises:
        UnsafePickle: the pickle asks for something that is not allowed
        ProtocolError: the pickle is damaged, or refers to a tensor or storage that does not exist
        FetchTimeout: the time that ``allowed`` gives for pickles is over
    """
    reader = unpickler_class(allowed, needs.get)(io.BytesIO(data))

    def persistent_load(pid: Any) -> Any:
        match pid:
            case ("leaf", int(n)) if 0 <= n < len(leaves):
                return leaves[n]
            case ("typed", int(n), str(name)) if isinstance(dtype := getattr(torch, name, None), torch.dtype):
                return TypedStorage(wrap_storage=storage(n), dtype=dtype, _internal=True)
            case ("untyped", int(n)):
                return storage(n)
        raise ProtocolError("the source's pickle refers to something that is not part of this checkpoint")

    reader.persistent_load = persistent_load
    try:
        objects = reader.load()
        if isinstance(objects, list) and isinstance(reader, Unpickler):
            # Some of the objects are keys of dicts in the tree, and will be hashed.
            for value in objects:
                reader.check_if_key(value)
    except TensorferryError:
        raise
    except Refused as e:
        raise UnsafePickle(f"the source's objects have {e}") from e
    except Exception as e:
        raise ProtocolError(f"the source's objects cannot be read here ({type(e).__name__}: {e})") from e
    if not isinstance(objects, list):
        raise ProtocolError("the source's pickle does not hold a list of objects")
    return objects
