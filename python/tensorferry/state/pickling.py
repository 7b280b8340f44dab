"""The pickle of everything in a state that is not a plain tensor. Storages are not in it: they travel in the payload.

A sender pickles a list of objects with ``dump``. A storage is written as a reference, so that tensors in the pickle
still share storages with each other and with plain tensors. A receiver unpickles with ``load`` and an allow-list.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.storage import TypedStorage

from .._rebuild import rebuild_dtensor, with_grad
from ..errors import ProtocolError, TensorferryError, UnsafePickle, UnsupportedLeaf
from ..memory.tensors import byte_span, is_dtensor_over_view, rebuilds_without_grad, storage_key
from .allowlist import Allowed
from .reviewed import Refused
from .tree import Flat
from .unpickling import Unpickler, unpickler

#: 4 rather than 5: with 5, numpy arrays refer to a private function of numpy, whose module moved between versions.
PROTOCOL = 4


class Storage:
    """A storage to which objects refer.

    Attributes:
        storage: the storage
        entry: the number of the plain tensor that fills it, or ``None``
        spans: the bytes ``[start, end)`` that each of the objects' tensors can reach
    """

    def __init__(self, storage: torch.UntypedStorage, entry: int | None) -> None:
        self.storage = storage
        self.entry = entry
        self.spans: list[tuple[int, int]] = []

    def covered(self) -> list[tuple[int, int]]:
        """Returns the runs of bytes to send: the union of all spans, with runs joined over small gaps."""
        runs: list[tuple[int, int]] = []
        for start, end in sorted(self.spans):
            if runs and start <= runs[-1][1] + _JOIN_GAP:
                runs[-1] = (runs[-1][0], max(runs[-1][1], end))
            elif end > start:
                runs.append((start, end))
        return runs


#: A gap of at most this many unreachable bytes is sent along: a separate entry would cost as much.
_JOIN_GAP = 512


_GLOBALS = (type, types.FunctionType, types.BuiltinFunctionType)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, flat: Flat) -> None:
        super().__init__(file, PROTOCOL)
        self.storages: list[Storage] = []
        self._flat = flat
        self._numbers: dict[int, int] = {}
        self._tensor_storage: tuple[int, tuple[int, int]] | None = None
        self._is_packed = False
        self.globals: dict[tuple[str, str], str] = {}
        self._paths = {id(value): path for value, path in zip(flat.objects, flat.object_paths, strict=True)}
        self._path = ""

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
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
        if isinstance(value, _GLOBALS):
            self.globals.setdefault((value.__module__ or "", value.__qualname__), self._path)
            return NotImplemented
        if isinstance(value, torch.Tensor) and rebuilds_without_grad(value):
            return with_grad, (value.detach(),), value.__dict__ or None
        if isinstance(value, torch.Tensor) and is_dtensor_over_view(value):
            return rebuild_dtensor, (value._local_tensor, value._spec, value.requires_grad)
        return NotImplemented

    def _number(self, storage: torch.UntypedStorage) -> int:
        key = storage_key(storage)
        number = self._numbers.get(key)
        if number is None:
            if storage.nbytes() and not storage.data_ptr():
                raise ValueError(f"its storage has {storage.nbytes()} bytes, but no memory")
            number = self._numbers[key] = len(self.storages)
            self.storages.append(Storage(storage, self._flat.filler(key)))
        whole = (0, storage.nbytes())
        span = whole if self._tensor_storage is None or self._tensor_storage[0] != key else self._tensor_storage[1]
        if span[1] > whole[1]:
            # Packed quantised dtypes have more elements than bytes. For others the memory was freed, as FSDP does with
            # storages between steps.
            if not self._is_packed:
                raise ValueError(f"its storage has {whole[1]} bytes and it needs {span[1]}: the memory was freed")
            span = whole
        self.storages[number].spans.append(span)
        return number


def _key_of(value: torch.Tensor) -> int:
    try:
        return storage_key(value.untyped_storage())
    except Exception:  # As in byte_span.
        return 0


def dump(flat: Flat) -> tuple[bytes, list[Storage], dict[tuple[str, str], str]]:
    """Pickles ``flat.objects``.

    Returns:
        The pickle; the storages to which it refers; and for each global that it names, as ``(module, name)``, the path
        of the first leaf that needs it.

    Raises:
        UnsupportedLeaf: an object cannot be pickled; the message names its path
    """
    file = io.BytesIO()
    pickler = _Pickler(file, flat)
    try:
        pickler.dump(flat.objects)
    except Exception as e:
        raise _blame(flat, e) from e
    return file.getvalue(), pickler.storages, pickler.globals


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
    """
    reader = unpickler(allowed, needs.get)(io.BytesIO(data))

    def refer(pid: Any) -> Any:
        match pid:
            case ("leaf", int(n)) if 0 <= n < len(leaves):
                return leaves[n]
            case ("typed", int(n), str(name)) if isinstance(dtype := getattr(torch, name, None), torch.dtype):
                return TypedStorage(wrap_storage=storage(n), dtype=dtype, _internal=True)
            case ("untyped", int(n)):
                return storage(n)
        raise ProtocolError("the source's pickle refers to something that is not part of this checkpoint")

    reader.persistent_load = refer
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
