"""The globals of Python's standard library.

A function that takes a class returns its :class:`~.kinds.Kind`: what pickles may do with the class.
"""

from __future__ import annotations

import collections
import datetime
import io
import types
from typing import TYPE_CHECKING, Any

from .kinds import (
    Globals,
    Kind,
    Refused,
    all_are,
    as_value,
    attributes_of,
    build_attributes,
    require,
    set_attributes,
)

if TYPE_CHECKING:
    from ..unpickler import Unpickler


def _empty(cls: Any) -> Kind:
    return Kind(cls, call=lambda _: cls(), new=lambda _: cls())


def _of_items(cls: Any) -> Kind:
    def make_of_items(unpickler: Unpickler, *items: Any) -> Any:
        for values in items:
            require(
                len(items) == 1 and type(values) in (list, tuple, set),
                f"a {cls.__name__} that is not made from one list, tuple or set",
            )
            unpickler.count_copy(len(values))
            found: set[Any] = set()
            unpickler.add_keys(found, values)
            return cls(found)
        return cls()

    return Kind(cls, call=make_of_items)


def _bytearray(cls: Any) -> Kind:
    def make_bytearray(unpickler: Unpickler, *args: Any) -> bytearray:
        match args:
            case ():
                return bytearray()
            case (bytes(data),) if type(data) is bytes:
                unpickler.count_copy(len(data))
                return bytearray(data)
            case (str(text), "latin-1" | "latin1") if type(text) is str:
                unpickler.count_copy(len(text))
                return bytearray(text, "latin-1")
        raise Refused("a bytearray that is not made from bytes")

    return Kind(cls, call=make_bytearray)


def _encode(unpickler: Unpickler, text: Any, codec: Any = "latin1") -> bytes:
    require(type(text) is str and type(codec) is str and codec in ("latin1", "latin-1"), "a codec other than Latin-1")
    unpickler.count_copy(len(text))
    return bytes(text.encode("latin-1"))


def _complex(cls: Any) -> Kind:
    def make_complex(_: Unpickler, real: Any, imag: Any) -> complex:
        require(all_are(float, real, imag), "a complex number whose parts are not floats")
        return complex(real, imag)

    return Kind(cls, call=make_complex)


def _range(cls: Any) -> Kind:
    def make_range(_: Unpickler, *args: Any) -> range:
        require(all_are(int, *args), "a range whose bounds are not integers")
        return range(*args)

    return Kind(cls, call=make_range)


def _counter(cls: Any) -> Kind:
    def make_counter(unpickler: Unpickler, *counts: Any) -> Any:
        for count in counts:
            require(len(counts) == 1 and type(count) is dict, "a Counter that is not made from one dict")
            unpickler.count_copy(len(count))
        return collections.Counter(*counts)

    return Kind(cls, call=make_counter)


_FACTORIES = (
    list, dict, set, frozenset, tuple, int, float, str, bool, bytes, complex, collections.OrderedDict,
    collections.Counter, collections.deque,
)  # fmt: skip


def _defaultdict(cls: Any) -> Kind:
    def make_defaultdict(unpickler: Unpickler, factory: Any = None) -> Any:
        allowed = factory is None or any([factory is kind for kind in _FACTORIES]) or unpickler.is_user_listed(factory)
        require(allowed, "a defaultdict whose factory is not a type of containers, numbers or strings")
        return collections.defaultdict(factory)

    return Kind(cls, call=make_defaultdict)


def _deque(cls: Any) -> Kind:
    def make_deque(unpickler: Unpickler, items: Any = (), maxlen: Any = None) -> Any:
        require(
            type(items) in (tuple, list) and (maxlen is None or type(maxlen) is int),
            "a deque that is not made from a list",
        )
        unpickler.count_copy(len(items))
        made = collections.deque(items, maxlen)
        unpickler.check_nesting(made, made)
        return made

    return Kind(cls, call=make_deque)


def _ordered_dict(cls: Any) -> Kind:
    return Kind(cls, call=lambda _: collections.OrderedDict(), build=build_attributes)


def _namespace(cls: Any) -> Kind:
    def restore_namespace(_: Unpickler, instance: Any, state: Any) -> Any:
        require("_make" not in attributes_of(state), "an attribute _make, as the class of a namedtuple has it")
        set_attributes(instance, state)
        return instance

    return Kind(cls, call=lambda _: types.SimpleNamespace(), build=restore_namespace)


def _date_part(cls: Any, length: int) -> Kind:
    def make_date_part(unpickler: Unpickler, packed: Any, *zone: Any) -> Any:
        # Pickles of protocol 2 hold the bytes as text.
        require(
            type(packed) in (bytes, str) and len(packed) == length, f"a {cls.__name__} that is not in its packed form"
        )
        require(
            len(zone) < 2
            and all([z is None or type(z) is datetime.timezone or unpickler.is_user_listed(type(z)) for z in zone]),
            "an unknown time zone",
        )
        # The constructor hardly checks the bytes. replace() builds the object again from its fields, which are checked.
        return cls(packed, *zone).replace()

    return Kind(cls, call=make_date_part)


def _timedelta(cls: Any) -> Kind:
    def make_timedelta(_: Unpickler, *args: Any) -> Any:
        require(len(args) <= 3 and all_are(int, *args), "a timedelta whose parts are not integers")
        return datetime.timedelta(*args)

    return Kind(cls, call=make_timedelta)


def _timezone(cls: Any) -> Kind:
    def make_timezone(_: Unpickler, offset: Any, *name: Any) -> Any:
        require(
            type(offset) is datetime.timedelta and len(name) < 2 and all_are(str, *name),
            "a time zone that is not an offset and a name",
        )
        return datetime.timezone(offset, *name)

    return Kind(cls, call=make_timezone)


def _path(cls: Any) -> Kind:
    def make_path(_: Unpickler, *parts: Any) -> Any:
        require(all_are(str, *parts), "a path whose parts are not strings")
        return cls(*parts)

    return Kind(cls, call=make_path)


def _bytes_io(cls: Any) -> Kind:
    def restore_bytes_io(unpickler: Unpickler, instance: Any, state: Any) -> Any:
        require(type(state) is tuple and len(state) == 3, "a BytesIO that is not bytes and a position")
        data, position, attributes = state
        require(
            type(data) is bytes and type(position) is int and not attributes, "a BytesIO whose content is not bytes"
        )
        require(0 <= position <= len(data), "a BytesIO whose position lies beyond its end")
        unpickler.count_copy(len(data))
        instance.__setstate__((data, position, None))
        return instance

    return Kind(cls, new=lambda _: io.BytesIO(), build=restore_bytes_io)


#: The classes: module, name, and the function that creates the ``Kind`` of the class.
CLASSES: Globals = {
    "builtins": {
        **dict.fromkeys(("bool", "float", "int", "str"), as_value),
        **dict.fromkeys(("bytes", "dict", "list", "object", "tuple"), _empty),
        **dict.fromkeys(("frozenset", "set"), _of_items),
        "bytearray": _bytearray,
        "complex": _complex,
        "range": _range,
    },
    "collections": {
        "Counter": _counter,
        "OrderedDict": _ordered_dict,
        "defaultdict": _defaultdict,
        "deque": _deque,
    },
    "datetime": {
        "date": lambda cls: _date_part(cls, 4),
        "datetime": lambda cls: _date_part(cls, 10),
        "time": lambda cls: _date_part(cls, 6),
        "timedelta": _timedelta,
        "timezone": _timezone,
    },
    "pathlib": dict.fromkeys(("Path", "PosixPath", "PurePath", "PurePosixPath"), _path),
    "types": {"SimpleNamespace": _namespace},
    "_io": {"BytesIO": _bytes_io},
}

#: The functions: module, name, and the checked function that runs in place of the named one.
FUNCTIONS: Globals = {
    "_codecs": {"encode": _encode},
}
