"""The only reader of pickles that come from a peer or a file.

It executes pickle instructions itself instead of using Python's unpickler, which calls whatever a pickle names, with
any arguments, and sets the state of any object. This reader consults the table of reviewed globals
(``globals/table.py``) for each call, each new object and each state, and can do nothing else. It also bounds the time,
the memory and the stack that a pickle can use. docs/reference/pickles.md gives the reasons.
"""

from __future__ import annotations

import enum
import inspect
import pickle
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from struct import unpack_from
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch.serialization import StorageType

from .._rebuild import FORMER
from ..errors import ProtocolError, TensorferryError, UnsafePickle
from .globals import table
from .globals.table import Function, Pending, Refused, require

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
#: How many parts a reference to something outside of the pickle may have, and how many characters each of them: torch
#: prints references in its messages.
_REFERENCE_PARTS, _REFERENCE_TEXT = 8, 4096

_DICTS = (dict, OrderedDict, defaultdict, Counter)
_PLAIN_KEYS = frozenset({str, bytes, bool, float, types.NoneType})
#: All copies out of a pickle together may be this many times as long as the pickle. Protocol 2 writes bytes as text, so
#: those of an array are copied twice.
_COPIES = 4
#: An integer of a smaller absolute value is its own hash.
_OWN_HASH = (1 << 61) - 1

#: Python frees nested objects of these types recursively, without a limit.
_RECURSIVE = (deque, defaultdict)
#: How often a pickle may lengthen a chain of nested ones: a thread's stack has room for many times more.
_CHAINED = 5_000

_CUT_OFF = "an instruction that is cut off"


class Unpickler:
    """Reads pickles of protocol 2 to 5, as Python and torch write them.

    torch replaces ``find_class`` and ``persistent_load``, as on ``pickle.Unpickler``. Subclasses set ``allowed``
    (:func:`unpickler`).
    """

    allowed: Allowed
    #: Takes a global as ``"module.name"``; returns the path of a leaf that needs it, for messages.
    needs: Callable[[str], Any] = staticmethod(lambda _: None)

    def __init__(self, file: BinaryIO, **_: Any) -> None:
        """Reads ``file`` to its end. Other arguments that torch passes concern pickles of Python 2 and are ignored."""
        self._data = data = file.read()
        self._copies_left = _COPIES * len(data)
        self._checks_left = _MOST_CHECKS + len(data)
        self._hashes: dict[int, list[Any]] = {}
        # Deques and defaultdicts that are nested in each other, by id; kept alive so that no other gets their ids.
        self._outer: dict[int, Any] = {}
        self._inner: dict[int, Any] = {}
        self._chained = 0
        self._pending: list[weakref.ref[Pending]] = []
        self._owned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._copied: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002
        """Returns the object outside of the pickle to which ``pid`` refers; raises here, and is replaced by torch."""
        raise ProtocolError("the pickle refers to something outside of itself")

    def find_class(self, module: str, name: str) -> Any:
        """Returns the object of a global: a class itself, and a ``Function`` in place of a function of the table."""
        return self.allowed.find(module, name, self.needs(f"{module}.{name}"))

    def load(self) -> Any:
        """Returns the object that the pickle describes.

        Raises:
            UnsafePickle: the pickle asks for something that is not allowed
            ProtocolError: the pickle is damaged
        """
        try:
            value = self._run()
        except TensorferryError:
            raise
        except Refused as e:
            raise UnsafePickle(f"the checkpoint's pickle has {e}, which no honest sender writes") from e
        except IndexError as e:
            raise ProtocolError(
                "the pickle cannot be read: it is cut off, or takes a value that is not on its stack"
            ) from e
        except Exception as e:
            raise ProtocolError(f"the pickle cannot be read ({type(e).__name__}: {_text(e)})") from e
        # Stack and memo are gone: a Pending that is still alive is part of the result.
        if any([pending() is not None for pending in self._pending]):
            raise ProtocolError("the pickle ends before it has set the state of all of its objects")
        return value

    # What the functions of the table call. ---------------------------------------------------------------------------

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
        """
        if id(tensor) in self._owned:
            return self._owned[id(tensor)][1]
        self.count_tensor(tensor, tensor.itemsize)
        memory = tensor.untyped_storage()
        if memory.nbytes() > _OWN_WHOLE * tensor.numel() * tensor.itemsize:
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
        """
        kind = type(value)
        if kind in _PLAIN_KEYS or (kind is int and -_OWN_HASH < value < _OWN_HASH):
            return
        self._check_hashable(value)
        self._count_hash(value)

    def check_if_key(self, value: Any) -> None:
        """Like :meth:`check_key`, for an object that may be used as a key later; unhashable objects pass.

        Instances of classes that the user has allowed are not checked: most are not keys, and can have any size.
        """
        kind = type(value)
        if kind in _PLAIN_KEYS or (kind is int and -_OWN_HASH < value < _OWN_HASH) or _is_its_own_key(value):
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
        if not any([value is known or value == known for known in same]):
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

    # Calls, new objects and states. ----------------------------------------------------------------------------------

    def instance(self, cls: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Returns ``cls.__new__(cls, *args, **named)``, if that is allowed.

        Raises:
            UnsafePickle: it is not allowed
        """
        kind = table.kind_of(cls)
        if kind is not None and kind.new is not None and not named:
            return self._run_reviewed(kind.cls, kind.new, args)
        if kind is not None or not isinstance(cls, type) or not self.is_user_listed(cls):
            raise self._refusal("asks for an instance of", cls)
        return cls.__new__(cls, *args, **named)

    def _call(self, function: Any, args: Any) -> Any:
        require(type(args) is tuple, "arguments that are not a tuple")
        if type(function) is Function:
            return self._run_reviewed(function.name, function.run, args)
        kind = table.kind_of(function)
        if kind is not None and kind.call is not None:
            return self._run_reviewed(kind.cls, kind.call, args)
        if kind is not None or not self.is_user_listed(function):
            raise self._refusal("asks for a call of", function)
        # Called with more than one value, an enum class would create a new class.
        require(len(args) == 1 or not isinstance(function, enum.EnumMeta), "an enum called with more than a value")
        return function(*args)

    def _build(self, value: Any, state: Any) -> Any:
        cls = type(value)
        if cls is Pending:
            return value.finish(self, state)
        kind = table.kind_of(cls)
        if kind is not None and kind.build is not None:
            return self._run_reviewed(cls, kind.build, (value, state))
        if kind is not None or not self.is_user_listed(cls) or isinstance(value, type):
            raise self._refusal(f"sets a state of {'' if isinstance(value, type) else 'an instance of '}", cls)
        if (setstate := getattr(value, "__setstate__", None)) is not None:
            setstate(state)
            return value
        slots = None
        if type(state) is tuple and len(state) == 2:
            state, slots = state
        if state:
            value.__dict__.update(state)
        for name, part in (slots or {}).items():
            setattr(value, name, part)
        return value

    def _run_reviewed(self, what: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            made = run(self, *args)
        except Refused as e:
            raise self._refusal("uses", what, f" with {e}") from e
        if type(made) is Pending:
            self._pending.append(weakref.ref(made))
        return made

    def _refusal(self, asked: str, what: Any, given: str = "") -> UnsafePickle:
        """Returns the error for what a pickle does with ``what``, a class or function.

        Args:
            asked: what the pickle does, as the text before the name of ``what``
            what: the class or function, or its name
            given: the text after the name
        """
        name = what if type(what) is str else _name(what)
        leaf = self.needs(name)
        needed = f" for {leaf[:200]!r}" if isinstance(leaf, str) and leaf else ""
        return UnsafePickle(
            f"the checkpoint's pickle {asked} {name}{needed}{given}, which no honest sender writes; if it is your own "
            "class or function, list it in safe_globals, and if you trust the source, pass trust_pickle=True"
        )

    # The interpreter of pickle instructions. -------------------------------------------------------------------------

    def _run(self) -> Any:
        made: Any
        before: Any
        data, at = self._data, 0
        size = len(data)
        stack: list[Any] = []
        below: list[list[Any]] = []
        memo: dict[int, Any] = {}
        while True:
            op = data[at]
            at += 1
            # The most frequent instructions first; a table of methods would cost a call for each number of a state.
            if op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif op == 0x8C:  # SHORT_BINUNICODE
                end = at + 1 + data[at]
                require(end <= size, _CUT_OFF)
                stack.append(str(data[at + 1 : end], "utf-8", "surrogatepass"))
                at = end
            elif op == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[unpack_from("<I", data, at)[0]])
                at += 4
            elif op == 0x47:  # BINFLOAT
                stack.append(unpack_from(">d", data, at)[0])
                at += 8
            elif op == 0x4A:  # BININT
                stack.append(unpack_from("<i", data, at)[0])
                at += 4
            elif op == 0x4D:  # BININT2
                stack.append(data[at] | data[at + 1] << 8)
                at += 2
            elif op == 0x71:  # BINPUT
                memo[data[at]] = stack[-1]
                at += 1
            elif op == 0x72:  # LONG_BINPUT
                memo[unpack_from("<I", data, at)[0]] = stack[-1]
                at += 4
            elif op == 0x58 or op == 0x8D or op == 0x42 or op == 0x8E or op == 0x43 or op == 0x96:
                # BINUNICODE, BINUNICODE8, BINBYTES, BINBYTES8, SHORT_BINBYTES, BYTEARRAY8
                width = 1 if op == 0x43 else 4 if op in (0x58, 0x42) else 8
                start = at + width
                at = start + int.from_bytes(data[at:start], "little")
                require(at <= size, _CUT_OFF)
                part = data[start:at]
                text = op == 0x58 or op == 0x8D
                stack.append(str(part, "utf-8", "surrogatepass") if text else bytearray(part) if op == 0x96 else part)
            elif op == 0x28:  # MARK
                below.append(stack)
                stack = []
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif op == 0x87:  # TUPLE3
                last = stack.pop()
                middle = stack.pop()
                stack[-1] = (stack[-1], middle, last)
            elif op == 0x74 or op == 0x6C or op == 0x91:  # TUPLE, LIST, FROZENSET
                items = stack
                stack = below.pop()
                if op == 0x91:
                    for item in items:
                        self.check_key(item)
                stack.append(tuple(items) if op == 0x74 else items if op == 0x6C else frozenset(items))
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif op == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif op == 0x8F:  # EMPTY_SET
                stack.append(set())
            elif op == 0x4E:  # NONE
                stack.append(None)
            elif op == 0x88 or op == 0x89:  # NEWTRUE, NEWFALSE
                stack.append(op == 0x88)
            elif op == 0x65:  # APPENDS
                items = stack
                stack = below.pop()
                self._extend(stack[-1], items)
            elif op == 0x61:  # APPEND
                last = stack.pop()
                self._extend(stack[-1], [last])
            elif op == 0x75:  # SETITEMS
                items = stack
                stack = below.pop()
                self._set_items(stack[-1], items)
            elif op == 0x73:  # SETITEM
                last = stack.pop()
                middle = stack.pop()
                self._set_items(stack[-1], [middle, last])
            elif op == 0x90:  # ADDITEMS
                items = stack
                stack = below.pop()
                self._add(stack[-1], items)
            elif op == 0x51:  # BINPERSID
                stack[-1] = self._outside(stack[-1])
            elif op == 0x52:  # REDUCE
                last = stack.pop()
                stack[-1] = made = self._call(stack[-1], last)
                if type(made) is Pending:
                    made.memo_number = self._memo_number(at, memo)
            elif op == 0x81:  # NEWOBJ
                last = stack.pop()
                require(type(last) is tuple, "arguments that are not a tuple")
                stack[-1] = made = self.instance(stack[-1], last, {})
                if type(made) is Pending:
                    made.memo_number = self._memo_number(at, memo)
            elif op == 0x92:  # NEWOBJ_EX
                last = stack.pop()
                middle = stack.pop()
                require(type(last) is dict and type(middle) is tuple, "arguments that are not a tuple and a dict")
                stack[-1] = self.instance(stack[-1], middle, last)
            elif op == 0x62:  # BUILD
                last = stack.pop()
                before = stack[-1]
                stack[-1] = self._build(before, last)
                if type(before) is Pending:
                    self._replace(memo, before, stack[-1])
            elif op == 0x93:  # STACK_GLOBAL
                last = stack.pop()
                stack[-1] = self._global(stack[-1], last)
            elif op == 0x63:  # GLOBAL
                middle_at = data.index(b"\n", at)
                end = data.index(b"\n", middle_at + 1)
                stack.append(self._global(data[at:middle_at].decode(), data[middle_at + 1 : end].decode()))
                at = end + 1
            elif op == 0x8A or op == 0x8B:  # LONG1, LONG4
                start = at + (1 if op == 0x8A else 4)
                at = start + int.from_bytes(data[at:start], "little")
                require(at <= size, _CUT_OFF)
                stack.append(int.from_bytes(data[start:at], "little", signed=True))
            elif op == 0x2E:  # STOP
                return stack.pop()
            elif op == 0x80:  # PROTO
                require(2 <= data[at] <= pickle.HIGHEST_PROTOCOL, "a protocol other than 2 to 5")
                at += 1
            elif op == 0x95:  # FRAME: a hint for readers of files
                at += 8
            elif op == 0x30:  # POP
                if stack:
                    stack.pop()
                else:
                    stack = below.pop()
            elif op == 0x31:  # POP_MARK
                stack = below.pop()
            elif op == 0x32:  # DUP
                stack.append(stack[-1])
            else:
                raise Refused(f"the instruction {op:#04x}, which Python no longer writes")

    def _outside(self, pid: Any) -> Any:
        """Returns the object to which ``pid`` refers.

        ``persistent_load`` may print ``pid``, so it has to be short and without nested parts.
        """
        short = type(pid) is tuple and len(pid) <= _REFERENCE_PARTS
        if not (short and all([_is_name(part) for part in pid])):
            raise ProtocolError("the pickle has a reference that is not a short tuple of names and numbers")
        return self.persistent_load(pid)

    def _replace(self, memo: dict[int, Any], pending: Pending, made: Any) -> None:
        if memo.get(pending.memo_number) is pending:
            memo[pending.memo_number] = made

    def _memo_number(self, at: int, memo: dict[int, Any]) -> int:
        """Returns the number under which the instruction at ``at`` memoizes the object just made; -1 if it does not."""
        match self._data[at]:
            case 0x94:
                return len(memo)
            case 0x71:
                return self._data[at + 1]
            case 0x72:
                return int(unpack_from("<I", self._data, at + 1)[0])
        return -1

    def _global(self, module: Any, name: Any) -> Any:
        require(type(module) is str and type(name) is str, "a global whose name is not a string")
        return self.find_class(module, name)

    def check_nesting(self, value: Any, items: Iterable[Any]) -> None:
        """Checks the new ``items`` of the deque or defaultdict ``value``.

        Raises:
            Refused: the pickle has too long chains of deques and defaultdicts in each other
        """
        for item in items:
            if type(item) in _RECURSIVE:
                self._chained += id(value) in self._inner or id(item) in self._outer
                require(self._chained <= _CHAINED, "deques and defaultdicts that are nested too deep")
                self._outer[id(value)] = value
                self._inner[id(item)] = item

    def _extend(self, value: Any, items: list[Any]) -> None:
        kind = type(value)
        if kind is list or kind is deque:
            if kind is deque:
                self.check_nesting(value, items)
            value.extend(items)
            return
        self._require_user_listed(value, "items")
        if hasattr(value, "extend"):
            value.extend(items)
            return
        for item in items:
            value.append(item)

    def _set_items(self, value: Any, items: list[Any]) -> None:
        require(len(items) % 2 == 0, "a key without its value")
        keys = items[::2]
        check_key = self.check_key
        for one in keys:
            if type(one) is not str:
                check_key(one)
        if type(value) not in _DICTS:
            self._require_user_listed(value, "items")
        if type(value) is defaultdict:
            self.check_nesting(value, items[1::2])
        for one, item in zip(keys, items[1::2], strict=True):
            value[one] = item

    def _add(self, value: Any, items: list[Any]) -> None:
        for item in items:
            self.check_key(item)
        if type(value) is not set:
            self._require_user_listed(value, "elements")
        for item in items:
            value.add(item)

    def _require_user_listed(self, value: Any, what: str) -> None:
        if isinstance(value, type) or not self.is_user_listed(type(value)):
            raise self._refusal(f"adds {what} to an instance of", type(value))


class _Trusting(pickle.Unpickler):
    """Python's unpickler, for ``trust_pickle=True``."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the object of a global; maps names of earlier versions of this package to the current ones."""
        return super().find_class(*FORMER.get((module, name), (module, name)))


def unpickler(allowed: Allowed, needs: Callable[[str], Any] | None = None) -> type[Any]:
    """Returns the unpickler class for ``allowed``: a subclass of :class:`Unpickler`, or Python's with ``trust_pickle``.

    Args:
        allowed: the globals that a pickle may name
        needs: takes a global as ``"module.name"``, and returns the path of a leaf that needs it, for messages
    """
    if allowed.trusts:
        return _Trusting
    found = {"allowed": allowed, "needs": staticmethod(needs or (lambda _: None))}
    return type("Unpickler", (Unpickler,), found)


def pickle_module(allowed: Allowed, needs: Callable[[str], Any] | None = None) -> Any:
    """Returns that class as the ``pickle_module`` that ``torch.load`` takes."""
    return types.SimpleNamespace(Unpickler=unpickler(allowed, needs), __name__=__name__)


def _is_its_own_key(value: Any) -> bool:
    """Whether a value needs no check as a key: it is plain, equal only to itself, or unhashable."""
    kind = type(value)
    if kind in _PLAIN_KEYS or (kind is int and -_OWN_HASH < value < _OWN_HASH):
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
    found = list(vars(instance).values()) if hasattr(instance, "__dict__") else []
    cls: Any = type(instance)
    for slot in _slots(cls):
        try:
            found.append(slot.__get__(instance))
        except AttributeError:  # The attribute is not set.
            continue
    return found


@lru_cache(maxsize=4096)
def _slots(cls: Any) -> list[Any]:
    return [slot for base in cls.__mro__ for slot in vars(base).values() if inspect.ismemberdescriptor(slot)]


def _is_name(value: Any) -> bool:
    kind = type(value)
    if kind is str:
        return len(value) <= _REFERENCE_TEXT
    if kind is int:
        return bool(-_OWN_HASH < value < _OWN_HASH)
    return value is None or kind is bool or kind is StorageType or isinstance(value, type)


def _name(value: Any) -> str:
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


def _text(error: BaseException) -> str:
    """Returns an error's message if that is a plain string: converting anything else to text could be an attack."""
    args = error.args
    return str(args[0])[:300] if args and type(args[0]) is str else ""
