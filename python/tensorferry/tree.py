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

_CONTAINERS = (dict, list, tuple, collections.deque)

Node = Any


class Flat:
    """A state taken apart.

    Attributes:
        tree: the containers as JSON, with numbers for leaves: ``n >= 0`` is ``plain[n]``, ``n < 0`` ``objects[-n - 1]``
        plain: tensors that need no pickle
        names: their key paths, unique
        objects: everything else, to be pickled together
        object_paths: where each object stands, for messages
        keys: for each object that is a key of a dict, a text that tells it from other keys
        storages: storage identity to number of the plain tensor that fills it
    """

    def __init__(self) -> None:
        """An empty state; ``flatten`` fills it."""
        self.tree = ""
        self.plain: list[Tensor] = []
        self.names: list[str] = []
        self.objects: list[Any] = []
        self.object_paths: list[str] = []
        self.keys: dict[str, str] = {}
        self.storages: dict[int, int] = {}

    def leaf(self, number: int) -> Any:
        """The leaf that the tree calls ``number``."""
        return self.plain[number] if number >= 0 else self.objects[-number - 1]


def flatten(state: Any) -> Flat:
    """Takes ``state`` apart. Tensors are not copied."""
    flat = Flat()
    # The same object twice is one leaf; `state` keeps every object alive, so identities stay unique meanwhile.
    seen: dict[int, int] = {}
    plain, names, objects, object_paths = flat.plain, flat.names, flat.objects, flat.object_paths
    storages = flat.storages
    # Containers we are inside of: one that holds itself is carried as an object, which may have cycles.
    inside: set[int] = set()

    def add_object(value: Any, path: str) -> int:
        objects.append(value)
        object_paths.append(path)
        return -len(objects)

    def leaf(value: Any, path: str) -> int:
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
        if kind is Tensor or kind is Parameter or depth > MAX_DEPTH or id(value) in inside:
            return str(leaf(value, path))
        if not isinstance(value, _CONTAINERS):
            return str(leaf(value, path))
        inside.add(id(value))
        node = walk_container(value, kind, path, depth)
        inside.discard(id(value))
        return node

    def walk_container(value: Any, kind: Any, path: str, depth: int) -> str:
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
        number = reference(value, f"{below}{value!r} (a key)")
        flat.keys[str(number)] = f"{kind.__module__}.{kind.__qualname__} {value!r}"
        return f'["r",{number}]'

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


def unflatten(tree: Node, leaf: Callable[[int], Any], objects: list[Any]) -> Any:
    """The state whose tree is ``tree``, read from JSON.

    ``rust/wire`` has checked it: numbers are in range and nesting is bounded.

    Args:
        tree: the tree
        leaf: gives the leaf of a number; called once for each position, in the order of :func:`positions`
        objects: the classes, keys and attributes the tree refers to
    """

    def build(node: Node) -> Any:
        if type(node) is int:
            return leaf(node)
        if type(node) is dict:
            return {k: build(v) for k, v in node.items()}
        match node[0]:
            case "l":
                return [build(v) for v in node[1:]]
            case "t":
                return tuple([build(v) for v in node[1:]])
            case "o":
                return collections.OrderedDict([(k, build(v)) for k, v in node[1].items()])
            case "d":
                kind = collections.OrderedDict if node[1] == "o" else dict
                return kind([(objects[k[1]] if type(k) is list else k, build(v)) for k, v in node[2]])
            case "n":
                return objects[node[1]]._make([build(v) for v in node[2:]])
            case "q":
                return collections.deque([build(v) for v in node[2:]], node[1])
            case "f":
                return collections.defaultdict(objects[node[1]], build(node[2]))
            case _:
                value = build(node[2])
                value.__dict__.update(objects[node[1]])
                return value

    return build(tree)


def positions(tree: Node, keys: dict[str, str]) -> list[tuple[int, tuple[str, ...]]]:
    """Every place in the tree where a leaf stands: its number, and a key path that no other place has.

    Args:
        tree: the tree, read from JSON
        keys: texts for keys that are objects, see :class:`Flat`
    """
    found: list[tuple[int, tuple[str, ...]]] = []

    def visit(node: Node, path: tuple[str, ...]) -> None:
        if type(node) is int:
            found.append((node, path))
        elif type(node) is dict:
            for k, v in node.items():
                visit(v, (*path, "s" + k))
        elif node[0] in "fa":
            visit(node[2], path)
        elif node[0] == "o":
            visit(node[1], path)
        elif node[0] == "d":
            for k, v in node[2]:
                visit(v, (*path, key(k)))
        else:
            for i, v in enumerate(node[2 if node[0] in "nq" else 1 :]):
                visit(v, (*path, f"#{i}"))

    def key(k: Any) -> str:
        if type(k) is list:
            return "r" + keys.get(str(k[1]), "")
        return "s" + k if type(k) is str else f"{type(k).__name__} {k}"

    visit(tree, ())
    return found
