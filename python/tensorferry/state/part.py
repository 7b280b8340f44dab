"""The part of a state that another state asks for: only its keys, at every level of nested dicts.

The rules are those of torch's ``CheckpointReader``: keys of dicts that the asking state does not have are left out;
those that only it has are missing, and stay as they are; elements of lists and tuples all belong to it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch

from .._native import _add_pieces
from ..errors import StateMismatch
from ..memory.tensors import storage_key
from . import pickling, tree
from .grammar import Node, children, objects_of
from .in_place import InPlaceTargets
from .optimizers import warn_of_missing_in


class RequestedPart:
    """The part of a state that ``asking`` asks for.

    Args:
        text: the tree of the whole state, as JSON text
        objects: its leaves with negative numbers
        asking: the state that asks for it; ``None`` in place of a value takes whatever there is
        strict: whether nothing may be missing
        kept: the identities of values in ``asking`` that are left as they are

    Attributes:
        tree: the tree of the part, as JSON text
        leaves: the numbers of its plain leaves
        objects: the places in ``objects`` of those that it has
        missing: the paths of ``asking`` that the state does not have

    Raises:
        StateMismatch: values at the same path have different types, or keys are missing and ``strict`` is set; the
            message names all of them
    """

    def __init__(
        self,
        text: str,
        objects: Sequence[Any],
        asking: Any,
        strict: bool = False,
        kept: Collection[int] | None = None,
    ) -> None:
        self.leaves: set[int] = set()
        self.objects: set[int] = set()
        self.missing: list[str] = []
        self._all = objects
        self._kept = kept or ()
        self._wrong: list[str] = []
        whole = json.loads(text)
        node = self._chosen(whole, asking, "")
        if self._wrong:
            raise StateMismatch(
                "nothing was overwritten: the checkpoint does not fit into this state:\n  " + "\n  ".join(self._wrong)
            )
        if strict and self.missing:
            raise StateMismatch(f"nothing was overwritten: the checkpoint is missing keys: {self.missing}")
        warn_of_missing_in(asking, whole)
        self.tree = json.dumps(node, separators=(",", ":"))

    def _object(self, number: int) -> Any:
        self.objects.add(-number - 1)
        return self._all[-number - 1]

    def _chosen(self, node: Node, asking: Any, path: str) -> Node:
        """Returns the part of ``node`` that ``asking`` asks for."""
        if asking is None:
            return self._take_whole(node)
        if id(asking) in self._kept:
            return {}
        if type(node) is int:
            self._compare(node, asking, path)
            return self._take_whole(node)
        kind = "dict" if type(node) is dict or node[0] in "odf" else node[0]
        if kind == "a":
            # The attributes of a dict that is there already are its own.
            return self._chosen(node[2], asking, path)
        if kind == "dict":
            return self._of_dict(node, asking, path)
        expected, first = {"l": (list, 1), "t": (tuple, 1), "n": (tuple, 2), "q": (deque, 2)}[kind]
        below = node[first:]
        if not isinstance(asking, expected):
            return self._refuse(path, asking, expected.__name__)
        if expected is tuple and len(asking) != len(below):
            self._wrong.append(f"{path}: a tuple of {len(asking)} here, of {len(below)} in the checkpoint")
            return node
        if kind == "n":
            self._object(node[1])
        self.missing += [f"{path}[{i}]" for i in range(len(below), len(asking))]
        given = [*asking, *([None] * (len(below) - len(asking)))]
        chosen = [self._chosen(c, g, f"{path}[{i}]") for i, (c, g) in enumerate(zip(below, given, strict=False))]
        return [*node[:first], *chosen]

    def _of_dict(self, node: Node, asking: Any, path: str) -> Node:
        """Returns the node of a dict with the keys of ``asking`` only; notes those that it lacks as missing."""
        if not isinstance(asking, dict):
            return self._refuse(path, asking, "dict")
        if type(node) is list and node[0] == "f":
            self._object(node[1])
            return ["f", node[1], self._of_dict(node[2], asking, path)]
        there = {self._key(text): (text, value) for _, text, value in children(node)}
        chosen = []
        for key, given in asking.items():
            below = f"{path}.{key}" if path else str(key)
            if key not in there:
                self.missing.append(below)
                continue
            text, value = there[key]
            if type(text) is list:
                self._object(text[1])
            chosen.append((text, self._chosen(value, given, below)))
        if type(node) is dict:
            return dict(chosen)
        return ["o", dict(chosen)] if node[0] == "o" else ["d", node[1], [list(pair) for pair in chosen]]

    def _key(self, text: Any) -> Any:
        return self._all[-text[1] - 1] if type(text) is list else text

    def _compare(self, number: int, asking: Any, path: str) -> None:
        """Refuses the leaf with this number if ``asking`` has a value of another type in its place."""
        value = torch.Tensor if number >= 0 else self._all[-number - 1]
        if value is torch.Tensor or isinstance(value, torch.Tensor):
            if not isinstance(asking, torch.Tensor):
                self._refuse(path, asking, "tensor")
        elif not isinstance(asking, type(value)):
            self._refuse(path, asking, type(value).__name__)

    def _refuse(self, path: str, asking: Any, there: str) -> Node:
        self._wrong.append(f"{path or 'the state itself'}: {type(asking).__name__} here, {there} in the checkpoint")
        return 0

    def _take_whole(self, node: Node) -> Node:
        """Notes all leaves and objects of ``node``, and returns it."""
        if type(node) is int:
            if node >= 0:
                self.leaves.add(node)
            else:
                self._object(node)
        else:
            for number in objects_of(node):
                self._object(number)
            for _, _, child in children(node):
                self._take_whole(child)
        return node


def storages_of(objects: list[Any]) -> set[int]:
    """Returns the identities of all storages that lie behind ``objects``.

    Raises:
        UnsupportedLeaf: one of them cannot be pickled
    """
    flat = tree.flatten(objects)
    if flat.objects:
        pickling.dump(flat)
        # From here on, what the objects reach has rows, too.
        _add_pieces(flat.rows)
    return {storage_key(owner) for owner in flat.rows.owners}


def merged(asking: Any, part: Any, kept: Collection[int] | None = None) -> Any:
    """Puts ``part``, which was built for ``asking``, into it.

    Args:
        asking: the state that asked
        part: what there was for it
        kept: the identities of values in ``asking`` that stay

    Returns:
        ``asking`` itself if it is a dict, updated; otherwise ``part``, with what it lacks.
    """
    if kept and id(asking) in kept:
        return asking
    if isinstance(asking, dict) and isinstance(part, dict):
        for key, value in part.items():
            asking[key] = merged(asking[key], value, kept)
        return asking
    if isinstance(asking, list) and type(part) is list:
        together = [merged(a, p, kept) for a, p in zip(asking, part, strict=False)]
        return together + (part[len(asking) :] or asking[len(part) :])
    if isinstance(asking, tuple) and isinstance(part, tuple) and len(asking) == len(part):
        together = [merged(a, p, kept) for a, p in zip(asking, part, strict=True)]
        kind: Any = type(part)
        return kind._make(together) if tree.is_namedtuple(kind) else kind(together)
    return part


def fill(asking: Any, state: Any, strict: bool = False, kept: Collection[int] | None = None) -> tuple[Any, list[str]]:
    """Copies what ``asking`` asks for out of ``state``, which is here already, into its tensors.

    Returns:
        ``asking``, updated, and the paths that ``state`` does not have.

    Raises:
        StateMismatch: the two differ in dtypes, shapes or types, or keys are missing and ``strict`` is set; nothing was
            overwritten then
    """
    flat = tree.flatten(state)
    part = RequestedPart(flat.tree, flat.objects, asking, strict, kept)
    chosen = tree.unflatten(part.tree, flat.plain, flat.objects)
    return merged(asking, InPlaceTargets(asking).fill(chosen), kept), part.missing
