"""The union of the states that the ranks of a checkpoint have saved: for who takes all of it, such as ``convert``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .._native import Stored
from ..errors import ProtocolError, StateMismatch
from ..state import tree
from ..state.grammar import children
from ..state.match import holds_tensors

#: How many keys an error names.
_NAMED = 5


def unite(state: Any, rank: int, files: Mapping[int, Callable[[], Stored]], read: Callable[[int], Any]) -> Any:
    """Returns ``state`` with the keys that only other ranks have, at every level of its dicts.

    Each of these keys comes from the first rank that has it. Where several ranks have a value, that of ``state`` stays.
    Only the trees of the other ranks are read, unless one has a new key.

    Args:
        state: the state of a rank, which changes
        rank: that rank
        files: by rank, opens its file
        read: returns the state in the file of a rank

    Raises:
        StateMismatch: a rank has a dict, or a list with tensors, where another one has something else, or a longer list
            with tensors than another one
        TensorferryError: the file of a rank cannot be read
    """
    union = _Union(state, rank)
    seen = {text := _tree_of(files[rank]())}
    known = set(_keys(json.loads(text), rank))
    for other in sorted(files):
        # Keys that are objects are not in the tree, which is the same for others then.
        if (text := _tree_of(files[other]())) in seen and '["r",' not in text:
            continue
        seen.add(text)
        keys = set(_keys(json.loads(text), other))
        if not keys <= known:
            known |= keys
            union.add(read(other), other)
    return union.state


class _Union:
    """The union so far; it began as the state of the rank ``first``."""

    def __init__(self, state: Any, first: int) -> None:
        self.state, self._first = state, first
        #: The rank of each key that ``first`` does not have.
        self._ranks: dict[tuple[Any, ...], int] = {}
        self._wrong: list[str] = []

    def add(self, state: Any, rank: int) -> None:
        """Adds the state of a rank."""
        self.state = self._merged(self.state, state, (), rank)
        if wrong := self._wrong:
            more = f"\n  and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise StateMismatch(
                "the states of the ranks cannot be put together: give what differs a key of its own on each rank, load "
                "into a state that has the keys that you need, or take the file of one rank alone:\n  "
                + "\n  ".join(wrong[:_NAMED])
                + more
            )

    def _merged(self, one: Any, other: Any, path: tuple[Any, ...], rank: int) -> Any:
        kind = _kind(one)
        if kind != _kind(other):
            # A rank that has nothing there keeps nothing from being whole.
            if other is not None:
                self._note(path, f"{_brief(one)} on rank {self._rank_of(path)}, and {_brief(other)} on rank {rank}")
        elif kind == "dict":
            for key, value in other.items():
                below = (*path, key)
                if key in one:
                    one[key] = self._merged(one[key], value, below, rank)
                else:
                    one[key] = value
                    self._ranks[below] = rank
        elif kind == "list":
            if len(other) > len(one):
                self._note(path, f"{len(one)} values on rank {self._rank_of(path)}, and {len(other)} on rank {rank}")
            found = [self._merged(a, b, (*path, n), rank) for n, (a, b) in enumerate(zip(one, other, strict=False))]
            found += one[len(found) :]
            made: Any = type(one)
            return made._make(found) if tree.is_namedtuple(made) else made(found)
        return one

    def _note(self, path: tuple[Any, ...], what: str) -> None:
        self._wrong.append(f"{'.'.join(map(tree.show_key, path)) or 'the state'}: {what}")

    def _rank_of(self, path: tuple[Any, ...]) -> int:
        """Returns the rank from which the union has what stands at ``path``."""
        return next((self._ranks[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self._ranks), self._first)


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "dict"
    return "list" if isinstance(value, list | tuple) and holds_tensors(value) else "value"


def _brief(value: Any) -> str:
    return f"a {type(value).__name__}"


def _tree_of(stored: Stored) -> str:
    if stored.tree is None:
        raise ProtocolError(f"{stored.path} does not hold a state")
    return stored.tree


def _keys(node: Any, rank: int, path: str = "") -> Iterator[str]:
    """Yields the path of each node of a tree, with the way in which it may differ from that of another rank."""
    if type(node) is int:
        yield f"{path} leaf"
        return
    if isinstance(node, dict) or node[0] in ("o", "d"):
        yield f"{path} dict"
    for step, key, child in children(node):
        # The number of a key that is an object says nothing about the keys of other ranks.
        name = "" if step == "same" else f"{path}/{json.dumps(key)}{rank if isinstance(key, list) else ''}"
        yield from _keys(child, rank, name or path)
