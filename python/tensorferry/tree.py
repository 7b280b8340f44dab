"""The tree of a state: containers in an encoding of our own, leaves numbered.

A pickled pytree spec of one torch version cannot be read by another, and a fleet is upgraded replica by replica. The
grammar is described in docs/format.md and checked by ``rust/wire``.
"""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Callable, Container
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from .tensors import is_plain, storage_key

#: Containers nested deeper than this are carried as one pickled object; it keeps cycles finite, too.
MAX_DEPTH = 80

_SAFE_INT = 2**53

Node = Any


class Flat:
    """A state taken apart.

    Attributes:
        tree: the containers as JSON, with numbers for leaves: ``n >= 0`` is ``plain[n]``, ``n < 0`` ``objects[-n - 1]``
        plain: tensors that need no pickle
        names: their key paths, unique
        objects: everything else, to be pickled together
        object_paths: where each object stands, for messages
        positions: what stands at each key path; of two equal paths, the later one got ``~2``
        storages: storage identity to number of the plain tensor that fills it
    """

    def __init__(self) -> None:
        """An empty state; ``flatten`` fills it."""
        self.tree = ""
        self.plain: list[Tensor] = []
        self.names: list[str] = []
        self.objects: list[Any] = []
        self.object_paths: list[str] = []
        self.positions: dict[str, Any] = {}
        self.storages: dict[int, int] = {}


def flatten(state: Any) -> Flat:
    """Takes ``state`` apart. Tensors are not copied."""
    flat = Flat()
    # The same object twice is one leaf; `state` keeps every object alive, so identities stay unique meanwhile.
    seen: dict[int, int] = {}
    plain, names, objects, object_paths = flat.plain, flat.names, flat.objects, flat.object_paths
    positions, storages = flat.positions, flat.storages

    def add_object(value: Any, path: str) -> int:
        objects.append(value)
        object_paths.append(path)
        return -len(objects)

    def leaf(value: Any, path: str) -> int:
        if path in positions:
            path = next_free(path, positions)
        positions[path] = value
        known = seen.get(id(value))
        if known is not None:
            return known
        kind = type(value)
        if (kind is Tensor or kind is Parameter) and is_plain(value):
            storage = storage_key(value.untyped_storage())
            if storage not in storages or value.nbytes == 0:
                storages.setdefault(storage, len(plain))
                number = len(plain)
                plain.append(value)
                names.append(path)
            else:
                number = add_object(value, path)
        else:
            number = add_object(value, path)
        seen[id(value)] = number
        return number

    # The text is written piece by piece rather than by one json.dumps at the end, which would hold the interpreter, and
    # with it the training loop of a healthy peer, for as long as it takes.
    def walk(value: Any, path: str, depth: int) -> str:
        kind = type(value)
        if kind is Tensor or kind is Parameter or depth > MAX_DEPTH:
            return str(leaf(value, path))
        below = path + "." if path else ""
        if kind is dict or kind is collections.OrderedDict:
            node = walk_dict(value, kind is collections.OrderedDict, below, depth + 1)
            extra = getattr(value, "__dict__", None)
            # `_metadata` of a module's state_dict is such an attribute.
            return f'["a",{reference(extra, f"{path}.__dict__")},{node}]' if extra else node
        if kind is list:
            return array('"l"', [walk(v, f"{below}{i}", depth + 1) for i, v in enumerate(value)])
        if kind is tuple:
            return array('"t"', [walk(v, f"{below}{i}", depth + 1) for i, v in enumerate(value)])
        if kind is collections.deque:
            head = f'"q",{"null" if value.maxlen is None else value.maxlen}'
            return array(head, [walk(v, f"{below}{i}", depth + 1) for i, v in enumerate(value)])
        if kind is collections.defaultdict:
            factory = reference(value.default_factory, f"{path}.default_factory")
            return f'["f",{factory},{walk_dict(value, False, below, depth + 1)}]'
        if is_namedtuple(kind):
            head = f'"n",{reference(kind, f"{path}.__class__")}'
            return array(head, [walk(v, below + k, depth + 1) for k, v in zip(kind._fields, value, strict=True)])
        return str(leaf(value, path))

    def walk_dict(value: dict[Any, Any], ordered: bool, below: str, depth: int) -> str:
        if all([type(k) is str for k in value]) and _is_text("".join(value)):
            text = ",".join([f"{_quoted(k)}:{walk(v, below + k, depth)}" for k, v in value.items()])
            return f'["o",{{{text}}}]' if ordered else f"{{{text}}}"
        rows = [f"[{key(k, below)},{walk(v, f'{below}{k}', depth)}]" for k, v in value.items()]
        return f'["d","{"o" if ordered else "d"}",[{",".join(rows)}]]'

    def array(head: str, nodes: list[str]) -> str:
        return f"[{','.join([head, *nodes])}]"

    def key(value: Any, below: str) -> str:
        kind = type(value)
        plain_int = kind is int and -_SAFE_INT < value < _SAFE_INT
        if value is None or kind is bool or plain_int or (kind is str and _is_text(value)):
            return json.dumps(value)
        return f'["r",{reference(value, f"{below}{value!r} (a key)")}]'

    def reference(value: Any, path: str) -> int:
        return -add_object(value, path) - 1

    flat.tree = walk(state, "", 0)
    flat.names = unique_names(flat.names)
    return flat


def next_free(path: str, taken: Container[str]) -> str:
    """The first of ``path~2``, ``path~3``, ... that is not taken."""
    return next(name for n in itertools.count(2) if (name := f"{path}~{n}") not in taken)


def is_namedtuple(kind: type) -> bool:
    """Whether ``kind`` was made by ``collections.namedtuple`` or ``typing.NamedTuple``, and is no subclass of one."""
    return (
        issubclass(kind, tuple)
        and kind.__bases__ == (tuple,)
        and isinstance(getattr(kind, "_fields", None), tuple)
        and hasattr(kind, "_make")
    )


def unique_names(paths: list[str]) -> list[str]:
    """Key paths as names in a container: text without NUL, none twice, none that the format keeps for itself."""
    joined = "".join(paths)
    if not _is_text(joined) or "\0" in joined:
        paths = [p.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00") for p in paths]
    taken = set(paths)
    if len(taken) == len(paths) and not any(map(_is_reserved, paths)):
        return paths
    used: set[str] = set()
    names: list[str] = []
    for path in paths:
        name = ("~" + path if path else "root") if _is_reserved(path) else path
        if name in used or (name != path and name in taken):
            name = next_free(name, taken | used)
        used.add(name)
        names.append(name)
    return names


def _is_reserved(path: str) -> bool:
    return not path or path == "__metadata__" or path.startswith("__tensorferry__/")


def _is_text(value: str) -> bool:
    """Whether ``value`` can be written as UTF-8: a lone surrogate cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def unflatten(tree: Node, leaf: Callable[[int, str], Any], objects: list[Any]) -> Any:
    """The state whose tree is ``tree``, read from JSON.

    ``rust/wire`` has checked it: numbers are in range and nesting is bounded.

    Args:
        tree: the tree
        leaf: gives the leaf of a number, which stands at a key path
        objects: the classes, keys and attributes the tree refers to
    """

    def build(node: Node, path: str) -> Any:
        if type(node) is int:
            return leaf(node, path)
        below = path + "." if path else ""
        if type(node) is dict:
            return {k: build(v, below + k) for k, v in node.items()}
        match node[0]:
            case "l":
                return children(node[1:], below)
            case "t":
                return tuple(children(node[1:], below))
            case "o":
                return collections.OrderedDict([(k, build(v, below + k)) for k, v in node[1].items()])
            case "d":
                rows = [(key(k), v) for k, v in node[2]]
                kind = collections.OrderedDict if node[1] == "o" else dict
                return kind([(k, build(v, f"{below}{k}")) for k, v in rows])
            case "n":
                kind = objects[node[1]]
                return kind._make([build(v, below + k) for k, v in zip(kind._fields, node[2:], strict=True)])
            case "q":
                return collections.deque(children(node[2:], below), node[1])
            case "f":
                return collections.defaultdict(objects[node[1]], build(node[2], path))
            case _:
                value = build(node[2], path)
                value.__dict__.update(objects[node[1]])
                return value

    def children(nodes: list[Node], below: str) -> list[Any]:
        return [build(v, f"{below}{i}") for i, v in enumerate(nodes)]

    def key(key: Any) -> Any:
        return objects[key[1]] if type(key) is list else key

    return build(tree, "")
