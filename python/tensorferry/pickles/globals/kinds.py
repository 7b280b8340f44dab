"""What a pickle may do with a global: the parts of which the rows of the table are made, and the checks they share."""

from __future__ import annotations

import gc
import inspect
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from ..unpickler import Unpickler


class Refused(Exception):
    """A pickle asks for something that an honest sender never writes."""


class Function:
    """Stands for a function of the table while a pickle is read."""

    __slots__ = ("name", "run")

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        """``run(unpickler, *arguments)`` checks the arguments and does what the function does."""
        self.name = name
        self.run = run

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.name} cannot be pickled or copied here")


class Unlisted:
    """Stands for a global that is not allowed, and for whatever a pickle makes with it: nothing is run for it.

    Attributes:
        module: of the global
        name: of the global
        leaf: the path of a leaf that needs it, if known
    """

    __slots__ = ("__weakref__", "leaf", "module", "name")

    def __init__(self, module: str, name: str, leaf: object) -> None:
        self.module, self.name, self.leaf = module, name, leaf
        _unlisted.add(self)

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.module}.{self.name} is not allowed, and cannot be pickled or copied")


def unlisted_in(values: Iterable[Any]) -> list[Unlisted]:
    """Returns each :class:`Unlisted` that ``values`` hold, at any depth."""
    found: dict[int, Unlisted] = {}
    seen: set[int] = set()
    # Mostly there is none anywhere.
    todo = list(values) if _unlisted else []
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, CODE):
            continue
        seen.add(id(value))
        if type(value) is Unlisted:
            found[id(value)] = value
        # numpy does not tell the garbage collector of what its arrays hold.
        todo += value.ravel().tolist() if is_object_array(value) else gc.get_referents(value)
    return list(found.values())


class Kind:
    """What a pickle may do with a class of the table; an attribute that is ``None`` is not allowed.

    Attributes:
        cls: the class
        call: ``call(unpickler, *arguments)`` creates an instance like a call of the class
        new: ``new(unpickler, *arguments)`` creates one like ``cls.__new__``
        build: ``build(unpickler, instance, state)`` sets an instance's state and returns the object to use from now on
    """

    __slots__ = ("build", "call", "cls", "new")

    def __init__(
        self,
        cls: Any,
        call: Callable[..., Any] | None = None,
        new: Callable[..., Any] | None = None,
        build: Callable[..., Any] | None = None,
    ) -> None:
        self.cls = cls
        self.call = call
        self.new = new
        self.build = build


class Pending:
    """Stands for an object that is created only once its state is known, so that no object exists without its state.

    Attributes:
        memo_number: the number under which the pickle has memoized it; -1 if it has not
    """

    __slots__ = ("__weakref__", "_make", "memo_number")

    def __init__(self, make: Callable[[Unpickler, Any], Any]) -> None:
        """``make(unpickler, state)`` creates the object."""
        self._make: Callable[[Unpickler, Any], Any] | None = make
        self.memo_number = -1

    def finish(self, unpickler: Unpickler, state: Any) -> Any:
        """Creates the object with this state.

        Raises:
            Refused: it was created already
        """
        make, self._make = self._make, None
        if make is None:
            raise Refused("two states for one object")
        return make(unpickler, state)

    def __reduce__(self) -> Any:
        raise TypeError("an object without its state cannot be pickled or copied")


#: A part of the table of globals: module, name, and what stands behind the name.
Globals: TypeAlias = dict[str, dict[str, Callable[..., Any]]]

_kinds: dict[int, Kind] = {}
_unlisted: weakref.WeakSet[Unlisted] = weakref.WeakSet()
#: What belongs to the process, and not to a state.
CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def register(cls: Any, kind: Callable[[Any], Kind]) -> None:
    """Makes ``kind(cls)`` what a pickle may do with a class, unless that is known already."""
    # Two names can stand for one class; their rows are the same.
    if id(cls) not in _kinds:
        _kinds[id(cls)] = kind(cls)


def kind_of(cls: Any) -> Kind | None:
    """Returns what a pickle may do with a class; ``None`` if the class is not in the table, or was not yet named."""
    return _kinds.get(id(cls))


def require(condition: object, refused: str) -> None:
    """Raises ``Refused(refused)`` unless ``condition`` is true; ``refused`` says what the pickle has instead."""
    if not condition:
        raise Refused(refused)


def all_are(kind: type, *values: Any) -> bool:
    """Whether each value is of exactly this type, and of no subclass."""
    return all([type(value) is kind for value in values])


def checked_sizes(values: Any, what: str) -> tuple[int, ...]:
    """Checks a shape or strides; ``what`` names it in the message. Returns a tuple of integers."""
    require(type(values) in (tuple, list, torch.Size) and len(values) <= 64, f"{what} that is not a short tuple")
    require(all_are(int, *values) and all([0 <= n < 1 << 62 for n in values]), f"{what} with items that are not sizes")
    return tuple(values)


@lru_cache(maxsize=4096)
def _kind_of_storage(cls: Any, name: str) -> str:
    """Returns where an attribute is stored: ``"slot"`` or ``"dict"``; ``""`` if it would hide a method."""
    attribute = inspect.getattr_static(cls, name, None)
    if inspect.ismemberdescriptor(attribute):
        return "slot"
    # If a newer torch has replaced a field by a property, the value from an older source has no effect.
    return "" if callable(attribute) or isinstance(attribute, classmethod | staticmethod) else "dict"


def attributes_of(state: Any) -> dict[str, Any]:
    """Returns a state, in the forms of Python's own ``__getstate__``, as one dict of attributes."""
    require(type(state) in (dict, tuple, types.NoneType), "a state that is not a dict")
    parts = state if type(state) is tuple else (state,)
    require(len(parts) in (1, 2), "a state of more than two parts")
    named: dict[str, Any] = {}
    for part in parts:
        require(part is None or type(part) is dict, "a state that is not a dict")
        named |= part or {}
    require(all_are(str, *named), "attributes whose names are not strings")
    return named


def set_attributes(instance: Any, state: Any) -> None:
    """Sets attributes from a state; refuses those that would hide a method or whose name begins with ``__``."""
    cls: Any = type(instance)
    for name, value in attributes_of(state).items():
        require(
            len(name) <= 1000 and not name.startswith("__"), "an attribute whose name is too long or reserved by Python"
        )
        where = _kind_of_storage(cls, name)
        require(where, f"an attribute {name!r} that hides a method")
        if where == "slot":
            object.__setattr__(instance, name, value)
        else:
            instance.__dict__[name] = value


def build_attributes(_: Unpickler, instance: Any, state: Any) -> Any:
    """The ``build`` of a class whose state is its attributes."""
    set_attributes(instance, state)
    return instance


def record(cls: Any) -> Kind:
    """For a Python class whose instances consist of their attributes only."""
    return Kind(cls, new=lambda _: cls.__new__(cls), build=build_attributes)


def named_tuple(cls: Any) -> Kind:
    """For a ``NamedTuple`` class."""

    def new(_: Unpickler, *fields: Any) -> Any:
        return cls._make(fields)

    return Kind(cls, new=new)


def as_value(cls: Any) -> Kind:
    """For a class that a pickle may only use as a value, such as the factory of a defaultdict."""
    return Kind(cls)


def is_freed_recursively(value: Any) -> bool:
    """Whether freeing a value frees what it holds by recursion, which nothing limits."""
    return type(value) in (deque, defaultdict) or is_object_array(value)


def is_object_array(value: Any) -> bool:
    """Whether a value is an array of numpy's whose elements are objects; does not import numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.dtype.hasobject
