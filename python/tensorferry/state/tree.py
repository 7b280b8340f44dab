"""The tree of a state: its containers as JSON, with numbers for the leaves.

The encoding does not depend on torch: a pickled pytree spec of one torch version cannot be read by another, and a fleet
is upgraded replica by replica. ``grammar.py`` reads it.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
from collections.abc import Callable, Container, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from .._native import _unflatten
from ..memory.tensors import DTYPE_NAMES, is_plain, no_rows
from ..storage.reserved import is_reserved

_SAFE_INT = 2**53

#: About how many characters of a key messages show. A key from a stock source may repeat a part a million times, and
#: Python does not convert longer integers to text.
_LONGEST_KEY = 4000


class Flat:
    """A flattened state: its tree and its leaves. Made by :func:`flatten`.

    Args:
        native: let the native module read tensors and pickle objects; otherwise Python does both

    Attributes:
        native: as given
        tree: the containers as JSON, with numbers for leaves: ``n >= 0`` is ``plain[n]``, ``n < 0`` ``objects[-n - 1]``
        rows: a row for each plain tensor (one that needs no pickle), with its key path, made unique, as its name
        plain: those tensors
        accelerated: the numbers of those of them that are not in host memory
        objects: all other leaves, which are pickled together
        object_paths: the key path of each object, for messages
        keys: for each object that is a key of a dict, its type and its ``repr``; those too long to be shown have none
    """

    def __init__(self, native: bool = True) -> None:
        self.native = native
        self.tree = ""
        self.rows = no_rows(native)
        self.plain: list[Tensor] = self.rows.memory
        self.accelerated: list[int] = []
        self.objects: list[Any] = self.rows.objects
        self.object_paths: list[str] = self.rows.object_paths
        self.keys: dict[str, str] = {}

    @functools.cached_property
    def unread(self) -> list[int]:
        """The numbers of the objects that are tensors and were not read natively, first object first."""
        return self.rows.unread

    def leaf(self, number: int) -> Any:
        """Returns the leaf with this number in the tree."""
        return self.plain[number] if number >= 0 else self.objects[-number - 1]

    def number_of(self, tensor: Tensor) -> int | None:
        """Returns the number of ``tensor`` if it is one of the plain tensors, else ``None``."""
        number = self.rows.number_of(tensor)
        return number if number is not None and number >= 0 else None


def flatten(state: Any, native: bool = True) -> Flat:
    """Flattens ``state``; tensors are not copied. For ``native`` see :class:`Flat`.

    Raises:
        UnsupportedLeaf: containers hold one another so often that nobody can walk the state
        RuntimeError: a dict changes while the state is read
    """
    flat = Flat(native)
    walk = _Walk(flat)
    flat.tree = flat.rows.node(state, "", 0, walk.container, walk.other)
    if not flat.rows.names_are_regular():
        flat.rows.rename(unique_names(flat.rows.names))
    return flat


class _Walk:
    """Writes those nodes of a state's tree that the native walk leaves to Python.

    The text is built piece by piece: one json.dumps at the end would hold the GIL, and so stop the training loop of a
    healthy peer, for its whole duration. This is a class because closures that refer to each other would keep
    everything they have seen alive until the next garbage collection.
    """

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._rows = flat.rows

    def _add_object(self, value: Any, path: str) -> int:
        self._flat.objects.append(value)
        self._flat.object_paths.append(path)
        return -len(self._flat.objects)

    def _reference(self, value: Any, path: str) -> int:
        return -self._add_object(value, path) - 1

    def other(self, value: Any, path: str) -> int:
        """Adds a leaf that is a tensor, and that `rows` cannot read; returns its number.

        `rows` calls this once for each object: an object that stands in several places is one leaf.
        """
        if not is_plain(value):
            return self._add_object(value, path)
        storage = value.untyped_storage()
        if value.nbytes and self._rows.filler(storage, storage.data_ptr()) is not None:
            return self._add_object(value, path)
        if not value.is_cpu:
            self._flat.accelerated.append(len(self._rows))
        flag = (type(value) is Parameter) + 2 * value.requires_grad
        name = DTYPE_NAMES[value.dtype]
        return self._rows.append(value, path, name, value.shape, storage.data_ptr(), value.nbytes, flag, storage)

    def container(self, value: Any, path: str, depth: int) -> str:
        """Returns the node of a container; `rows` calls this for those that are no plain dict, list or tuple."""
        kind: Any = type(value)
        below = path + "." if path else ""
        if kind is dict or kind is collections.OrderedDict:
            node = self._dict(value, kind is collections.OrderedDict, below, depth + 1)
            extra = getattr(value, "__dict__", None)
            # Attributes of the dict itself, such as `_metadata` of a module's state_dict.
            return f'["a",{self._reference(extra, f"{path}.__dict__")},{node}]' if extra else node
        if kind is collections.deque:
            return self._elements(f'"q",{"null" if value.maxlen is None else value.maxlen}', value, below, depth)
        if kind is collections.defaultdict:
            factory = self._reference(value.default_factory, f"{path}.default_factory")
            return f'["f",{factory},{self._dict(value, False, below, depth + 1)}]'
        if is_namedtuple(kind):
            head = f'"n",{self._reference(kind, f"{path}.__class__")}'
            return self._elements(head, value, below, depth, kind._fields)
        return str(self._rows.leaf(value, path, self.other))

    def _dict(self, value: dict[Any, Any], ordered: bool, below: str, depth: int) -> str:
        """Returns the node of a dict whose path, with a dot, is ``below``."""
        members = self._rows.members(list(value), list(value.values()), below, depth, self.container, self.other)
        if members is not None:
            return f'["o",{{{members}}}]' if ordered else f"{{{members}}}"
        nodes = [
            f"[{self._key(k, below)},{self._node(v, _as_text(below + _show(k, str)[0]), depth)}]"
            for k, v in value.items()
        ]
        return f'["d","{"o" if ordered else "d"}",[{",".join(nodes)}]]'

    def _node(self, value: Any, path: str, depth: int) -> str:
        return self._rows.node(value, path, depth, self.container, self.other)

    def _elements(
        self, head: str, value: Iterable[Any], below: str, depth: int, names: tuple[str, ...] | None = None
    ) -> str:
        return f"[{head}{self._rows.elements(list(value), names, below, depth + 1, self.container, self.other)}]"

    def _key(self, value: Any, below: str) -> str:
        """Returns the JSON of a dict's key: the key itself, or a reference to an object."""
        if _is_plain_key(value):
            return json.dumps(value)
        number = self._reference(value, f"{below}{_show(value, repr)[0]} (a key)")
        if (text := key_text(value)) is not None:
            self._flat.keys[str(number)] = text
        return f'["r",{number}]'


def _is_plain_key(value: Any) -> bool:
    """Whether a dict's key stands in the tree itself, and is no object."""
    kind = type(value)
    plain_int = kind is int and -_SAFE_INT < value < _SAFE_INT
    return value is None or kind is bool or plain_int or (kind is str and _is_text(value))


def key_text(value: Any) -> str | None:
    """Returns the text by which a dict's key that is an object is found; ``None`` for other keys, and too long ones."""
    if _is_plain_key(value):
        return None
    text, is_whole = _show(value, repr)
    return f"{type(value).__module__}.{type(value).__qualname__} {text}" if is_whole else None


def show_key(value: Any) -> str:
    """Returns a dict's key as it stands in a path."""
    return value if type(value) is str else _show(value, str)[0]


def _show(key: Any, show: Callable[[Any], str]) -> tuple[str, bool]:
    """Returns a key as text, by ``str`` or ``repr``, and true; if that is too long or fails, a text with its type."""
    kind = type(key)
    if kind is str and show is str:
        return str(key), True
    left, parts = _LONGEST_KEY, [key]
    while parts and left >= 0:
        part = parts.pop()
        if isinstance(part, tuple | frozenset):
            left -= len(part)
            parts += part if left >= 0 else ()
        elif isinstance(part, str | bytes):
            left -= len(part)
        elif isinstance(part, int):
            left -= part.bit_length() >> 2
    if left < 0:
        return f"a {kind.__name__} that is too long to be shown", False
    try:
        return show(key), True
    except Exception as e:  # The key's class may raise anything.
        return f"a {kind.__name__} that cannot be shown ({type(e).__name__})", False


def next_free(path: str, taken: Container[str]) -> str:
    """Returns the first of ``path~2``, ``path~3``, ... that is not in ``taken``."""
    return next(name for n in itertools.count(2) if (name := f"{path}~{n}") not in taken)


def is_namedtuple(kind: type) -> bool:
    """Whether ``kind`` is a class from ``collections.namedtuple`` or ``typing.NamedTuple``, not a subclass of one."""
    return (
        issubclass(kind, tuple)
        and kind.__bases__ == (tuple,)
        and isinstance(getattr(kind, "_fields", None), tuple)
        and hasattr(kind, "_make")
    )


def unique_names(paths: list[str]) -> list[str]:
    """Returns the key paths as entry names of a container, in order: valid text without NUL, unique, not reserved.

    What is no valid text is escaped with backslashes. A reserved name gets a ``~`` in front, an empty one becomes
    ``root``, and one that is taken gets ``~2``, ``~3`` and so on behind it.
    """
    joined = "".join(paths)
    if not _is_text(joined) or "\0" in joined:
        paths = [_as_text(p).replace("\0", "\\x00") for p in paths]
    taken = set(paths)
    if len(taken) == len(paths) and not any(map(is_reserved, paths)):
        return paths
    used: set[str] = set()
    names: list[str] = []
    for path in paths:
        name = ("~" + path if path else "root") if is_reserved(path) else path
        if name in used or (name != path and name in taken):
            name = next_free(name, taken | used)
        used.add(name)
        names.append(name)
    return names


def _is_text(value: str) -> bool:
    """Whether ``value`` can be encoded as UTF-8: a lone surrogate cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_text(value: str) -> str:
    """Returns ``value`` with backslash escapes in place of characters that UTF-8 cannot encode."""
    return value.encode("utf-8", "backslashreplace").decode()


def unflatten(
    tree: str,
    leaves: list[Any],
    objects: list[Any],
    defaultdict: Callable[[Any], Any] | None = None,
) -> Any:
    """Builds the state from its tree and its leaves.

    ``rust/wire`` has checked the tree: numbers are in range and nesting is bounded.

    Args:
        tree: the tree as JSON text, see :class:`Flat`
        leaves: the leaves with the numbers 0, 1, ...
        objects: the leaves with negative numbers, and the classes, keys and attributes to which the tree refers
        defaultdict: creates an empty ``defaultdict`` from its factory, or raises; ``None`` accepts every factory

    Raises:
        ProtocolError: the tree's containers cannot be built from these objects
    """
    return _unflatten(tree, leaves, objects, defaultdict)
