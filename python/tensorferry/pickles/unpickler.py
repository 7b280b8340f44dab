"""The only reader of pickles that come from a peer or a file.

It executes pickle instructions itself instead of using Python's unpickler, which calls whatever a pickle names, with
any arguments, and sets the state of any object. This reader consults the table of reviewed globals
(``globals/table.py``) for each call, each new object and each state, and can do nothing else. ``limits.py`` bounds the
time, the memory and the stack that a pickle can use. docs/reference/pickles.md gives the reasons.
"""

from __future__ import annotations

import enum
import pickle
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from struct import unpack_from
from typing import Any, BinaryIO

from torch.serialization import StorageType

from ..errors import ProtocolError, TensorferryError, UnsafePickle
from .allowlist import Allowed, refusal, refuse_unlisted
from .globals.kinds import Function, Pending, Refused, Unlisted, kind_of, require, unlisted_in
from .limits import KEYS, OWN_HASH, Limits

#: How many parts a reference to something outside of the pickle may have, and how many characters each of them: torch
#: prints references in its messages.
_REFERENCE_PARTS, _REFERENCE_TEXT = 8, 4096

_DICTS = (dict, OrderedDict, defaultdict, Counter)
_CUT_OFF = "an instruction that is cut off"
#: A pickle can have an instruction in each of these bytes, which then take a few hundredths of a second.
_TURN = 1 << 16


class Unpickler(Limits):
    """Reads pickles of protocol 2 to 5, as Python and torch write them.

    torch replaces ``find_class`` and ``persistent_load``, as on ``pickle.Unpickler``. Subclasses set ``allowed``
    (:func:`unpickler`).
    """

    #: Takes a global as ``"module.name"``; returns the path of a leaf that needs it, for messages.
    needs: Callable[[str], Any] = staticmethod(lambda _: None)

    def __init__(self, file: BinaryIO, **_: Any) -> None:
        """Reads ``file`` to its end. Other arguments that torch passes concern pickles of Python 2 and are ignored."""
        self._data = file.read()
        super().__init__(len(self._data))
        self._unlisted: dict[tuple[str, str], Unlisted] = {}
        self._pending: list[weakref.ref[Pending]] = []

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002
        """Returns the object outside of the pickle to which ``pid`` refers; raises here, and is replaced by torch."""
        raise ProtocolError("the pickle refers to something outside of itself")

    def find_class(self, module: str, name: str) -> Any:
        """Returns the object of a global: a class itself, and a ``Function`` in place of a function of the table.

        In place of what is not allowed it is an ``Unlisted``, so that one error names all of it.
        """
        found = self.allowed.find(module, name, self.needs(f"{module}.{name}"))
        return self._unlisted.setdefault((module, name), found) if type(found) is Unlisted else found

    def load(self) -> Any:
        """Returns the object that the pickle describes.

        Raises:
            UnsafePickle: the pickle asks for something that is not allowed
            ProtocolError: the pickle is damaged
            TensorferryError: what ``check_time`` and ``persistent_load`` raise, such as ``FetchTimeout``
        """
        try:
            value = self._loaded()
        except (UnsafePickle, ProtocolError) as e:
            # What follows may be wrong only because something was not made.
            if self._unlisted:
                raise UnsafePickle(refusal(*self._unlisted.values())) from e
            raise
        if self._unlisted and not self.allowed.spares:
            raise UnsafePickle(refusal(*self._unlisted.values()))
        return value

    def _loaded(self) -> Any:
        """As :meth:`load`, with each ``Unlisted`` where it is."""
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

    # Calls, new objects and states. ----------------------------------------------------------------------------------

    def instance(self, cls: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Returns ``cls.__new__(cls, *args, **named)``, if that is allowed.

        Raises:
            UnsafePickle: it is not allowed
            Exception: whatever a class raises that the user has listed
        """
        if type(cls) is Unlisted:
            return cls
        kind = kind_of(cls)
        if kind is not None and kind.new is not None and not named:
            return self._run_reviewed(kind.cls, kind.new, args)
        if kind is not None or not isinstance(cls, type) or not self.is_user_listed(cls):
            raise self._refusal("asks for an instance of", cls)
        self._refuse_unlisted(args, named)
        return cls.__new__(cls, *args, **named)

    def _call(self, function: Any, args: Any) -> Any:
        """Calls a global with ``args``, as the table reviews it or because the user has listed it."""
        if type(function) is Unlisted:
            return function
        require(type(args) is tuple, "arguments that are not a tuple")
        if type(function) is Function:
            return self._run_reviewed(function.name, function.run, args)
        kind = kind_of(function)
        if kind is not None and kind.call is not None:
            return self._run_reviewed(kind.cls, kind.call, args)
        if kind is not None or not self.is_user_listed(function):
            raise self._refusal("asks for a call of", function)
        # Called with more than one value, an enum class would create a new class.
        require(len(args) == 1 or not isinstance(function, enum.EnumMeta), "an enum called with more than a value")
        self._refuse_unlisted(args)
        return function(*args)

    def _build(self, value: Any, state: Any) -> Any:
        """Sets the state of an object, if its class allows that; returns the object to use from now on."""
        cls = type(value)
        if cls is Unlisted:
            return value
        if cls is Pending:
            return value.finish(self, state)
        kind = kind_of(cls)
        if kind is not None and kind.build is not None:
            return self._run_reviewed(cls, kind.build, (value, state), is_new=False)
        if kind is not None or not self.is_user_listed(cls) or isinstance(value, type):
            raise self._refusal(f"sets a state of {'' if isinstance(value, type) else 'an instance of '}", cls)
        if (setstate := getattr(value, "__setstate__", None)) is not None:
            self._refuse_unlisted(state)
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

    def _run_reviewed(self, what: Any, run: Callable[..., Any], args: tuple[Any, ...], *, is_new: bool = True) -> Any:
        """Runs what the table of reviewed globals (``globals/table.py``) has for ``what``; returns what it returns.

        Its ``Refused`` becomes ``UnsafePickle``, or if an ``Unlisted`` among ``args`` is the cause and the object is
        new, that one. An object that is still to be finished (``Pending``) is noted.
        """
        try:
            made = run(self, *args)
        except Refused as e:
            if is_new and self._unlisted and (found := unlisted_in(args)):
                return found[0]
            raise self._refusal("uses", what, f" with {e}") from e
        if type(made) is Pending:
            self._pending.append(weakref.ref(made))
        return made

    def _refuse_unlisted(self, *given: Any) -> None:
        """Refuses to give what is not allowed to code of the user's, which could make anything of it."""
        if self._unlisted:
            refuse_unlisted(given)

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
        """Executes the pickle's instructions up to STOP; returns the object on the stack."""
        made: Any
        before: Any
        data, at = self._data, 0
        size = len(data)
        check_time = self.check_time
        look = _TURN if check_time is not None else size
        stack: list[Any] = []
        below: list[list[Any]] = []
        memo: dict[int, Any] = {}
        while True:
            if at > look and check_time is not None:
                check_time()
                look = at + _TURN
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
                    elements: set[Any] = set()
                    self.add_keys(elements, items)
                    stack.append(frozenset(elements))
                else:
                    stack.append(tuple(items) if op == 0x74 else items)
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
                self._add_elements(stack[-1], items)
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
                stack[-1] = made = self._build(before, last)
                if type(before) is Pending and memo.get(number := before.memo_number) is before:
                    memo[number] = made
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
        if not (short and all([_is_reference_part(part) for part in pid])):
            raise ProtocolError("the pickle has a reference that is not a short tuple of names and numbers")
        return self.persistent_load(pid)

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

    def _extend(self, value: Any, items: list[Any]) -> None:
        """Appends items to a list, a deque or an object of a class that the user has listed."""
        kind = type(value)
        if kind is list or kind is deque:
            if kind is deque:
                self.check_nesting(value, items)
            value.extend(items)
            return
        if kind is Unlisted:
            return
        self._require_user_listed(value, "items", items)
        if hasattr(value, "extend"):
            value.extend(items)
            return
        for item in items:
            value.append(item)

    def _set_items(self, value: Any, items: list[Any]) -> None:
        """Sets items of a dict, whose keys and values take turns in ``items``, after checking the keys."""
        require(len(items) % 2 == 0, "a key without its value")
        keys, values = items[::2], items[1::2]
        if type(value) is not Unlisted and type(value) not in _DICTS:
            self._require_user_listed(value, "items", items)
        if type(value) is defaultdict:
            self.check_nesting(value, values)
        check_key, check_time = self.check_key, self.check_time
        for start in range(0, len(keys), KEYS):
            if check_time is not None:
                check_time()
            end = start + KEYS
            for key, item in zip(keys[start:end], values[start:end], strict=True):
                if type(key) is not str:
                    check_key(key)
                if type(value) is not Unlisted:
                    value[key] = item

    def _add_elements(self, value: Any, items: list[Any]) -> None:
        """Adds elements to a set, or by ``add`` to an instance of a class that the user has allowed."""
        if type(value) is Unlisted:
            return
        if type(value) is not set:
            self._require_user_listed(value, "elements", items)
        self.add_keys(value, items)

    def _require_user_listed(self, value: Any, what: str, items: list[Any]) -> None:
        if isinstance(value, type) or not self.is_user_listed(type(value)):
            raise self._refusal(f"adds {what} to an instance of", type(value))
        self._refuse_unlisted(items)


def unpickler_class(allowed: Allowed, needs: Callable[[str], Any] | None = None) -> type[Any]:
    """Returns the unpickler class for ``allowed``: a subclass of :class:`Unpickler`, or Python's with ``trust_pickle``.

    Args:
        allowed: the globals that a pickle may name, and its deadline, which Python's own unpickler ignores
        needs: takes a global as ``"module.name"``, and returns the path of a leaf that needs it, for messages
    """
    if allowed.trusts:
        return pickle.Unpickler
    found = {"allowed": allowed, "needs": staticmethod(needs or (lambda _: None))}
    if allowed.check_time is not None:
        found["check_time"] = staticmethod(allowed.check_time)
    return type("Unpickler", (Unpickler,), found)


def pickle_module(allowed: Allowed, needs: Callable[[str], Any] | None = None) -> Any:
    """Returns the class of :func:`unpickler_class` as the ``pickle_module`` that ``torch.load`` takes."""
    return types.SimpleNamespace(Unpickler=unpickler_class(allowed, needs), __name__=__name__)


def _is_reference_part(value: Any) -> bool:
    """Whether a value can be a part of a persistent id: short, and without parts of its own."""
    kind = type(value)
    if kind is str:
        return len(value) <= _REFERENCE_TEXT
    if kind is int:
        return bool(-OWN_HASH < value < OWN_HASH)
    return value is None or kind is bool or kind is StorageType or isinstance(value, type)


def _name(value: Any) -> str:
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


def _text(error: BaseException) -> str:
    """Returns an error's message if that is a plain string: converting anything else to text could be an attack."""
    args = error.args
    return str(args[0])[:300] if args and type(args[0]) is str else ""
