"""Matches a state with the one that it is loaded into, by the one rule of all doors.

The tensors of the state that is loaded into take the values of tensors in the same place. Everything else in it is a
value, which the other state's replaces: a list or tuple without tensors as a whole. A list or tuple with tensors must
have the other's length. A load of a part of a state takes only the keys of the state that is loaded into, at every
level of nested dicts; its ``None`` takes whatever there is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import ProtocolError
from ..pickles.globals.kinds import Unlisted
from .grammar import Node, children, objects_of
from .optimizers import warn_of_bare
from .tree import is_namedtuple, key_text, show_key

_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, deque)
#: The class of each kind of node for a sequence, and how many items of the node come before its elements.
_SEQUENCES: dict[str, tuple[type[list[Any] | tuple[Any, ...] | deque[Any]], int]] = {
    "l": (list, 1),
    "t": (tuple, 1),
    "n": (tuple, 2),
    "q": (deque, 2),
}


class Pair(NamedTuple):
    """A tensor of the live state, and the number of the other state's leaf whose values it takes."""

    number: int
    live: Tensor
    path: str


class Match:
    """The counterparts that the tensors of a live state have in another state.

    Args:
        node: the other state's tree
        live: the state that is loaded into
        tensors: the numbers of those objects of the other state that are tensors
        count: how many plain tensors it has
        there: where it is, for messages
        keys: the texts of its keys that are objects
        objects: its objects, if they are known
        is_part: whether only what ``live`` has is taken
        kept: the identities of values in ``live`` that are left as they are

    Attributes:
        tree: the tree of what is taken; in the place of each pair it has ``count`` and the place in ``pairs``
        pairs: the tensors of ``live`` that take values
        alone: the paths and values that only ``live`` has
        wrong: a line for each place where the two do not fit together
        leaves: the numbers of the plain tensors that a part has
        objects: the places of the objects that it has
    """

    def __init__(
        self,
        node: Node,
        live: Any,
        tensors: Container[int],
        count: int,
        there: str,
        keys: Mapping[str, str],
        objects: Sequence[Any] | None = None,
        is_part: bool = False,
        kept: Collection[int] = (),
    ) -> None:
        self.pairs: list[Pair] = []
        self.alone: list[tuple[str, Any]] = []
        self.wrong: list[str] = []
        self.leaves: set[int] = set()
        self.objects: list[int] = []
        self._tensors, self._count, self._there = tensors, count, there
        self._keys, self._all = keys, objects
        self._is_part, self._kept = is_part, kept
        self.tree = self._of(node, live, "")

    def _of(self, node: Node, live: Any, path: str) -> Node:
        """Returns the node of what is taken of ``node``, whose place in the live state has ``live``."""
        if self._kept and id(live) in self._kept:
            return {}
        if isinstance(live, Tensor):
            if type(node) is not int or not self._is_tensor(node):
                return self._refuse(node, live, path)
            self.pairs.append(Pair(node, live, path))
            self._note(node)
            return self._count + len(self.pairs) - 1
        if type(node) is int:
            # Of a subclass of a container, a tree has no node: it is a value.
            if is_container(live) and holds_tensors(live):
                return self._refuse(node, live, path)
        elif _is_dict(node):
            if isinstance(live, dict):
                return self._of_dict(node, live, path)
            if holds_tensors(live):
                return self._refuse(node, live, path)
        elif holds_tensors(live):
            kind, first = _SEQUENCES.get(node[0], (None, 0))
            if kind is None or not isinstance(live, kind):
                return self._refuse(node, live, path)
            return self._of_sequence(node, first, live, path)
        self._note(node)
        return node

    def _of_sequence(self, node: Node, first: int, live: Any, path: str) -> Node:
        below = node[first:]
        if len(live) != len(below):
            kind = "tuple" if isinstance(live, tuple) else type(live).__name__
            self.wrong.append(f"{_shown(path)}: a {kind} of {len(live)} here, of {len(below)} {self._there}")
            return node
        self.objects += objects_of(node)
        before, behind = (f"{path}[", "]") if self._is_part else (f"{path}." if path else "", "")
        both = enumerate(zip(below, live, strict=True))
        return [*node[:first], *[self._of(child, value, f"{before}{i}{behind}") for i, (child, value) in both]]

    def _of_dict(self, node: Node, live: dict[Any, Any], path: str) -> Node:
        if type(node) is list and node[0] in "fa":
            inner = self._of_dict(node[2], live, path)
            if self._is_part and node[0] == "a":
                # The attributes of a dict that is there already are its own.
                return inner
            self.objects += objects_of(node)
            return [node[0], node[1], inner]
        taken: list[tuple[Any, Node]] = []
        found = set()
        dotted = f"{path}." if path else ""
        for json_key, key, child in self._items(node, live):
            if key in live:
                found.add(key)
                taken.append((json_key, self._of(child, live[key], f"{dotted}{show_key(key)}")))
                if type(json_key) is list:
                    self.objects.append(json_key[1])
            elif not self._is_part:
                taken.append((json_key, child))
        if len(found) < len(live):
            alone = [(key, value) for key, value in live.items() if key not in found and not self._is_kept(value)]
            self.alone += [(f"{dotted}{show_key(key)}", value) for key, value in alone]
            if self._all is not None:
                # One of them may be a key whose class is not allowed.
                places = [key[1] for _, key, _ in children(node) if type(key) is list]
                self.objects += [place for place in places if type(self._all[place]) is Unlisted]
        if self._is_part:
            warn_of_bare(live, node, path)
        if type(node) is dict:
            return dict(taken)
        return ["o", dict(taken)] if node[0] == "o" else ["d", node[1], [list(pair) for pair in taken]]

    def _is_kept(self, live: Any) -> bool:
        """Whether ``live`` is left as it is, or holds nothing else."""
        if self._kept and is_container(live):
            return bool(live) and all(map(self._is_kept, live.values() if isinstance(live, dict) else live))
        return id(live) in self._kept

    def _items(self, node: Node, live: dict[Any, Any]) -> Iterator[tuple[Any, Any, Node]]:
        """Yields the key of each member of ``node``, the key of ``live`` that it is, and the node below it."""
        by_text: dict[str, Any] | None = None
        for _, key, child in children(node):
            if type(key) is not list:
                yield key, key, child
            elif self._all is not None:
                yield key, _hashable(self._all[key[1]]), child
            else:
                if by_text is None:
                    by_text = self._keys_by_text(node, live)
                yield key, by_text.get(self._keys.get(str(key[1]), ""), _Absent), child

    def _keys_by_text(self, node: Node, live: dict[Any, Any]) -> dict[str, Any]:
        """Returns the keys of ``live`` that are objects by their texts, without texts that say too little."""
        texts = Counter(self._keys.get(str(key[1])) for _, key, _ in children(node) if type(key) is list)
        several = {text for text, count in texts.items() if count > 1}
        found: dict[str, Any] = {}
        for key in live:
            if (text := key_text(key)) is not None:
                if text in found:
                    several.add(text)
                found[text] = key
        return {text: key for text, key in found.items() if text not in several}

    def _is_tensor(self, number: int) -> bool:
        return number >= 0 or number in self._tensors

    def _refuse(self, node: Node, live: Any, path: str) -> Node:
        self._note(node)
        if type(node) is not int:
            kind = "dict" if _is_dict(node) else _SEQUENCES.get(node[0], (dict, 1))[0].__name__
        elif self._is_tensor(node):
            kind = "tensor"
        else:
            kind = "a value" if self._all is None else type(self._all[-node - 1]).__name__
        self.wrong.append(f"{_shown(path)}: {type(live).__name__} here, {kind} {self._there}")
        return node

    def _note(self, node: Node) -> None:
        """Notes what ``node`` needs, of which a part of the state is read alone."""
        if not self._is_part:
            return
        if type(node) is int:
            below = [node]
        else:
            self.objects += objects_of(node)
            below = node[1:] if type(node) is list and node[0] in "lt" else [child for _, _, child in children(node)]
        # A list may have a million numbers.
        numbers = [child for child in below if type(child) is int]
        self.leaves.update([number for number in numbers if number >= 0])
        self.objects += [-number - 1 for number in numbers if number < 0]
        for child in below if len(numbers) < len(below) else ():
            if type(child) is not int:
                self._note(child)


class _Absent:
    """A key that no live state has."""


def _hashable(key: Any) -> Any:
    try:
        hash(key)
    except TypeError as e:
        raise ProtocolError(f"the tree has a dict with a key that cannot be one: {e}") from e
    return key


def _is_dict(node: Node) -> bool:
    """Whether a container is a dict; a hostile source may also give a list a factory or attributes."""
    return type(node) is dict or node[0] in "od" or (node[0] in "fa" and type(node[2]) is not int and _is_dict(node[2]))


def _shown(path: str) -> str:
    return path or "the state itself"


def is_container(value: Any) -> bool:
    """Whether a value is a node of a tree, and not a leaf: subclasses of containers are leaves."""
    kind = type(value)
    return kind in _CONTAINERS or is_namedtuple(kind)


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a container with one in it at any depth."""
    return next(tensors_in(value), None) is not None


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in a value that stands at ``path``, each with its own path."""
    left, seen = [(path, value)], set()
    while left:
        path, one = left.pop()
        if isinstance(one, Tensor):
            yield path, one
        elif isinstance(one, _CONTAINERS) and id(one) not in seen:
            seen.add(id(one))
            members = one.values() if isinstance(one, dict) else one
            # Lists may have a million numbers: only their types are looked at.
            if any(issubclass(kind, (Tensor, *_CONTAINERS)) for kind in set(map(type, members))):
                dotted = f"{path}." if path else ""
                items = one.items() if isinstance(one, dict) else enumerate(one)
                below = [(key, member) for key, member in items if isinstance(member, (Tensor, *_CONTAINERS))]
                left += [(f"{dotted}{show_key(key)}", member) for key, member in reversed(below)]
