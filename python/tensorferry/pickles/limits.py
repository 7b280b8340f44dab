"""What one pickle may cost: limits on copies, checks, hashes and nesting, so that a short one keeps no reader busy."""

from __future__ import annotations

import inspect
import types
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ProtocolError
from ..memory.tensors import Unread
from .globals.kinds import is_object_array, require

if TYPE_CHECKING:
    from .allowlist import Allowed

#: How deep tuples, frozensets and records may be nested in a key: Python hashes them recursively.
_DEEPEST = 900
#: How many different keys with the same hash a pickle may have. Strings do not count: their hashes are random.
_SAME_HASH = 64
#: How many checks one pickle may cause, besides one for each of its bytes. A check looks at one part of a key, or at
#: 64 elements of an index tensor.
_MOST_CHECKS = 1_000_000
#: How often one pickle may have the bytes of a storage copied into new tensors.
_STORAGE_COPIES = 16
#: The storage of an index tensor is copied as a whole if it is at most this many times larger than the tensor.
_OWN_WHOLE = 4
_PLAIN_KEYS = frozenset({str, bytes, bool, float, types.NoneType})
#: All copies out of a pickle together may be this many times as long as the pickle. Protocol 2 writes bytes as text, so
#: those of an array are copied twice.
_COPIES = 4
#: An integer of a smaller absolute value is its own hash.
OWN_HASH = (1 << 61) - 1

#: Python frees nested objects of these types recursively, without a limit, and numpy its arrays of objects.
_RECURSIVE = (deque, defaultdict)
#: How often a pickle may lengthen a chain of nested ones: a thread's stack has room for many times more.
_CHAINED = 5_000
#: For an array of objects, numpy takes about as much of the stack as Python does for this many of the others.
_ARRAY = 20


class Limits:
    """Counts what reading a pickle costs; the functions of the table call it before they do their work.

    Subclasses set ``allowed``.

    Args:
        length: of the pickle, in bytes
    """

    allowed: Allowed

    def __init__(self, length: int) -> None:
        self._copies_left = _COPIES * length
        self._checks_left = _MOST_CHECKS + length
        self._hashes: dict[int, list[Any]] = {}
        # Those that are nested in each other and freed recursively, by id; kept alive so that no other gets their ids.
        self._outer: dict[int, Any] = {}
        self._inner: dict[int, Any] = {}
        self._chained = 0
        self._owned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._copied: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def is_user_listed(self, value: Any) -> bool:
        """Whether the user has allowed exactly this class or function."""
        return self.allowed.is_user_listed(value)

    def count_copy(self, length: int) -> None:
        """Counts a copy of ``length`` bytes or items; called before it is made.

        All copies together may be a few times as long as the pickle. Honest pickles keep this limit, since they
        describe each object once.

        Raises:
            Refused: the limit is exceeded
        """
        self._copies_left -= length
        require(self._copies_left >= 0, "copies that are together far longer than the pickle itself")

    def count_checks(self, count: int) -> None:
        """Counts ``count`` checks of keys or indices; called before they are made.

        Raises:
            Refused: the limit is exceeded
        """
        self._checks_left -= count + 1
        require(self._checks_left >= 0, "more keys and indices than can be checked in a reasonable time")

    def count_tensor(self, tensor: torch.Tensor, itemsize: int) -> None:
        """Counts a new tensor of elements of ``itemsize`` bytes, as many as ``tensor`` has; called before it is made.

        Raises:
            Refused: elements of ``tensor`` share memory, so that a few bytes could describe any number of them; or its
                storage was copied too often
        """
        memory = tensor.untyped_storage()
        require(tensor.numel() * tensor.itemsize <= memory.nbytes(), "a tensor with more elements than its storage")
        key = memory._cdata
        _, before = self._made.get(key, (memory, 0))
        made = before + tensor.numel() * max(itemsize, tensor.itemsize)
        # The storage is kept as well, so that no other one gets its address.
        self._made[key] = (memory, made)
        require(made <= _STORAGE_COPIES * memory.nbytes(), "too many copies of one storage")

    def private_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a private copy of a tensor of indices or shapes, so that no later write can invalidate their check.

        The copy has the layout of ``tensor`` in a copy of the whole storage, unless ``tensor`` is only a small part of
        it. Such copies may share memory with each other. The same tensor always gets the same copy.

        Raises:
            ProtocolError: the values of ``tensor`` have not been read
            Refused: as for :meth:`count_tensor`
        """
        if id(tensor) in self._owned:
            return self._owned[id(tensor)][1]
        self.count_tensor(tensor, tensor.itemsize)
        memory = tensor.untyped_storage()
        if isinstance(memory, Unread) and not memory.is_read and tensor.numel():
            # Nothing is wrong with the pickle: it is built again when its values are there.
            raise ProtocolError("the pickle builds an object of values that have not been read")
        if tensor.is_neg() or memory.nbytes() > _OWN_WHOLE * tensor.numel() * tensor.itemsize:
            copy = tensor.detach().clone()
        else:
            if memory._cdata not in self._copied:
                self._copied[memory._cdata] = memory.clone()
            whole = self._copied[memory._cdata]
            copy = torch.empty(0, dtype=tensor.dtype)
            copy.set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())
        self._owned[id(tensor)] = (tensor, copy)
        return copy

    def check_key(self, value: Any) -> None:
        """Checks a key of a dict or an element of a set.

        Raises:
            Refused: it cannot be hashed in reasonable time, or too many keys have the same hash
            TypeError: it cannot be hashed at all
        """
        kind = type(value)
        if kind in _PLAIN_KEYS or (kind is int and -OWN_HASH < value < OWN_HASH):
            return
        self._check_hashable(value)
        self._count_hash(value)

    def check_if_key(self, value: Any) -> None:
        """Like :meth:`check_key`, for an object that may be used as a key later; unhashable objects pass.

        Instances of classes that the user has allowed are not checked: most are not keys, and can have any size.

        Raises:
            Refused: as for :meth:`check_key`
        """
        kind = type(value)
        if kind in _PLAIN_KEYS or (kind is int and -OWN_HASH < value < OWN_HASH) or _is_its_own_key(value):
            return
        if not isinstance(value, tuple | frozenset) and self.is_user_listed(kind):
            return
        self._check_hashable(value)
        try:
            hash(value)
        except Exception:
            return
        self._count_hash(value)

    def _count_hash(self, value: Any) -> None:
        same = self._hashes.setdefault(hash(value), [])
        if not any([value is other or value == other for other in same]):
            require(len(same) < _SAME_HASH, "too many keys with the same hash")
            same.append(value)

    def _check_hashable(self, value: Any) -> None:
        """Refuses objects whose hash would take too long or too much stack: tuples in tuples, records in records.

        A class's ``__hash__`` may hash any of an instance's attributes, and convert lists to tuples first.
        """
        todo: list[tuple[Any, int, Any]] = [(value, 0, None)]
        while todo:
            item, depth, around = todo.pop()
            require(depth < _DEEPEST, "a key that is nested too deep")
            if type(item) is int:
                self.count_checks(item.bit_length() >> 6)
                continue
            parts: Any = item
            if not isinstance(item, tuple | frozenset | list):
                if _is_enclosing(item, around):
                    continue
                parts, around = _attributes(item), (item, around)
                todo += [(part, depth + 1, around) for part in parts if isinstance(part, list)]
            self.count_checks(len(parts))
            todo += [(part, depth + 1, around) for part in parts if not _is_its_own_key(part)]

    def check_nesting(self, value: Any, items: Iterable[Any]) -> None:
        """Checks the new ``items`` of ``value``: a deque, a defaultdict or an array of objects.

        Raises:
            Refused: the pickle has too long chains of these in each other
        """
        for item in items:
            if type(item) in _RECURSIVE or is_object_array(item):
                if id(value) in self._inner or id(item) in self._outer:
                    self._chained += _ARRAY if is_object_array(value) or is_object_array(item) else 1
                require(
                    self._chained <= _CHAINED, "deques, defaultdicts and arrays of objects that are nested too deep"
                )
                self._outer[id(value)] = value
                self._inner[id(item)] = item


def _is_its_own_key(value: Any) -> bool:
    """Whether a value needs no check as a key: it is plain, equal only to itself, or unhashable."""
    kind = type(value)
    if kind in _PLAIN_KEYS or (kind is int and -OWN_HASH < value < OWN_HASH):
        return True
    hashing: Any = kind.__hash__
    return hashing is None or hashing is object.__hash__ or isinstance(value, type | torch.Tensor)


def _is_enclosing(item: Any, around: Any) -> bool:
    while around is not None:
        known, around = around
        if known is item:
            return True
    return False


def _attributes(instance: Any) -> list[Any]:
    """Returns the values of an object's attributes, in its ``__dict__`` and its slots."""
    values = list(vars(instance).values()) if hasattr(instance, "__dict__") else []
    cls: Any = type(instance)
    for slot in _slots(cls):
        try:
            values.append(slot.__get__(instance))
        except AttributeError:  # The attribute is not set.
            continue
    return values


@lru_cache(maxsize=4096)
def _slots(cls: Any) -> list[Any]:
    return [slot for base in cls.__mro__ for slot in vars(base).values() if inspect.ismemberdescriptor(slot)]
