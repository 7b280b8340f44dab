"""What one pickle may cost: limits on copies, keys and nesting, so that a short one takes neither memory nor stack."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ProtocolError
from ..memory.tensors import Unread
from .globals.kinds import CODE, is_freed_recursively, require

if TYPE_CHECKING:
    from .allowlist import Allowed

#: How deep tuples, frozensets and records may be nested in a key: Python hashes them recursively.
_DEEPEST = 900
#: How many parts of keys and dtypes one pickle may have looked at, besides one for each of its bytes.
_MOST_PARTS = 1_000_000
_PLAIN_KEYS = frozenset({str, bytes, bool, float, types.NoneType})
#: All copies out of a pickle together may be this many times as long as the pickle. Protocol 2 writes bytes as text, so
#: those of an array are copied twice.
_COPIES = 4
#: An integer of a smaller absolute value is its own hash.
OWN_HASH = (1 << 61) - 1
#: After so many keys the time is looked at: keys can be chosen so that each one takes the longer, the more there are.
KEYS = 256

#: How often a pickle may lengthen a chain of nested ones: a thread's stack has room for many times more.
_CHAINED = 5_000


class Limits:
    """Bounds what reading a pickle costs; the functions of the table call it before they do their work.

    Subclasses set ``allowed``.

    Args:
        length: of the pickle, in bytes
    """

    allowed: Allowed
    #: Raises when the time for the pickle is over.
    check_time: Callable[[], None] | None = None

    def __init__(self, length: int) -> None:
        self._copies_left = _COPIES * length
        self._parts_left = _MOST_PARTS + length
        # Those that are nested in each other and freed recursively, by id; kept alive so that no other gets their ids.
        self._outer: dict[int, Any] = {}
        self._inner: dict[int, Any] = {}
        self._chained = 0
        # Storages by their identity, with the copy of each.
        self._copied: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

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

    def count_parts(self, count: int) -> None:
        """Counts parts of a key or a dtype; called before they are looked at.

        Raises:
            Refused: the pickle has more of them than can be looked at in a reasonable time
        """
        self._parts_left -= count + 1
        require(self._parts_left >= 0, "more parts of keys than can be checked in a reasonable time")

    def private_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor``, which has indices, in a copy of its storage: no later write can invalidate their check.

        Raises:
            ProtocolError: the values of ``tensor`` have not been read
            Refused: it has more elements than its storage
        """
        memory = tensor.untyped_storage()
        require(tensor.numel() * tensor.itemsize <= memory.nbytes(), "a tensor with more elements than its storage")
        if isinstance(memory, Unread) and not memory.is_read and tensor.numel():
            # Nothing is wrong with the pickle: it is built again when its values are there.
            raise ProtocolError("the pickle builds an object of values that have not been read")
        if memory._cdata not in self._copied:
            # The storage is kept as well, so that no other one gets its identity.
            self._copied[memory._cdata] = memory, memory.clone()
        copy = torch.empty(0, dtype=tensor.dtype)
        return copy.set_(self._copied[memory._cdata][1], tensor.storage_offset(), tensor.size(), tensor.stride())

    def add_keys(self, target: set[Any], items: Iterable[Any]) -> None:
        """Adds ``items``, which are checked, to a set.

        Raises:
            Refused: one cannot be hashed in reasonable time
            TypeError: one cannot be hashed at all
            TensorferryError: the time for the pickle is over
        """
        for number, item in enumerate(items):
            if self.check_time is not None and number % KEYS == 0:
                self.check_time()
            self.check_key(item)
            target.add(item)

    def check_key(self, value: Any) -> None:
        """Checks that the hash of a key takes little time and stack: tuples in tuples, records in records.

        A class's ``__hash__`` may hash any of an instance's attributes, and convert lists to tuples first.

        Raises:
            Refused: it takes too much
        """
        if _needs_no_check(value):
            return
        todo = [(value, 0)]
        while todo:
            item, depth = todo.pop()
            require(depth < _DEEPEST, "a key that is nested too deep")
            if type(item) is int:
                self.count_parts(item.bit_length() >> 6)
                continue
            parts = gc.get_referents(item)
            self.count_parts(len(parts))
            held = () if isinstance(item, tuple | frozenset) else (dict, list)
            todo += [(part, depth + 1) for part in parts if type(part) in held or not _needs_no_check(part)]

    def check_if_key(self, value: Any) -> None:
        """Like :meth:`check_key`, for an object that may be used as a key later.

        Instances of classes that the user has allowed are not checked: most are not keys, and can have any size.

        Raises:
            Refused: as for :meth:`check_key`
        """
        if isinstance(value, tuple | frozenset) or not (_needs_no_check(value) or self.is_user_listed(type(value))):
            self.check_key(value)

    def check_nesting(self, value: Any, items: Iterable[Any]) -> None:
        """Checks the new ``items`` of ``value``, a deque or a defaultdict.

        Raises:
            Refused: the pickle has too long chains of these in each other
        """
        for item in items:
            if is_freed_recursively(item):
                self._chained += id(value) in self._inner or id(item) in self._outer
                require(self._chained <= _CHAINED, "deques and defaultdicts that are nested too deep")
                self._outer[id(value)] = value
                self._inner[id(item)] = item


def _needs_no_check(value: Any) -> bool:
    """Whether a value needs no check as a key: it is plain, equal only to itself, or unhashable."""
    kind = type(value)
    if kind in _PLAIN_KEYS or (kind is int and -OWN_HASH < value < OWN_HASH):
        return True
    hashing: Any = kind.__hash__
    return hashing is None or hashing is object.__hash__ or isinstance(value, (torch.Tensor, *CODE))
