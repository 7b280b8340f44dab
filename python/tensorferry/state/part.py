"""The part of a checkpoint's state that a load into another state, the target, takes: only the target's keys.

The rules are those of torch's ``CheckpointReader``, at every level of nested dicts: keys that only the checkpoint has
are left out; those that only the target has are missing, and keep their values; all elements of lists and tuples are
taken.
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
from ..pickles.allowlist import refuse_unlisted
from ..pickles.globals.kinds import Unlisted
from . import pickling, tree
from .grammar import Node, children, objects_of
from .in_place import IN_FILE, InPlaceTargets, differing_kinds
from .optimizers import warn_of_missing_in


class RequestedPart:
    """The part of a state that is loaded into ``target``.

    Args:
        text: the tree of the whole state, as JSON text
        objects: its leaves with negative numbers
        target: the state that is loaded into; ``None`` in place of a value takes whatever there is
        strict: whether nothing may be missing
        kept: the identities of values in ``target`` that are left as they are

    Attributes:
        tree: the tree of the part, as JSON text
        leaves: the numbers of its plain leaves
        objects: the places in ``objects`` of those that it has
        missing: the paths of ``target`` that the state does not have

    Raises:
        UnsafePickle: an object of the part holds something that is not on the allow-list
        StateMismatch: values at the same path have different types, or keys are missing and ``strict`` is set; the
            message names all of them
    """

    def __init__(
        self,
        text: str,
        objects: Sequence[Any],
        target: Any,
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
        node = self._chosen(whole, target, "")
        refuse_unlisted([objects[place] for place in self.objects])
        if self._wrong:
            raise StateMismatch(
                "nothing was overwritten: the checkpoint does not fit into this state:\n  " + "\n  ".join(self._wrong)
            )
        if strict and self.missing:
            raise StateMismatch(f"nothing was overwritten: the checkpoint is missing keys: {self.missing}")
        warn_of_missing_in(target, whole)
        self.tree = json.dumps(node, separators=(",", ":"))

    def _object(self, place: int) -> Any:
        """Notes that the object at ``place`` is loaded, and returns it."""
        self.objects.add(place)
        return self._all[place]

    def _chosen(self, node: Node, target: Any, path: str) -> Node:
        """Returns the part of ``node`` that is loaded into ``target``."""
        if target is None:
            return self._take_whole(node)
        if id(target) in self._kept:
            return {}
        if type(node) is int:
            self._compare(node, target, path)
            return self._take_whole(node)
        kind = "dict" if type(node) is dict or node[0] in "odf" else node[0]
        if kind == "a":
            # The attributes of a dict that is there already are its own.
            return self._chosen(node[2], target, path)
        if kind == "dict":
            return self._of_dict(node, target, path)
        expected, first = {"l": (list, 1), "t": (tuple, 1), "n": (tuple, 2), "q": (deque, 2)}[kind]
        below = node[first:]
        if not isinstance(target, expected):
            return self._refuse(path, target, expected.__name__)
        if expected is tuple and len(target) != len(below):
            self._wrong.append(f"{path}: a tuple of {len(target)} here, of {len(below)} in the checkpoint")
            return node
        if kind == "n":
            self._object(node[1])
        self.missing += [f"{path}[{i}]" for i in range(len(below), len(target))]
        given = [*target, *([None] * (len(below) - len(target)))]
        chosen = [self._chosen(c, g, f"{path}[{i}]") for i, (c, g) in enumerate(zip(below, given, strict=False))]
        return [*node[:first], *chosen]

    def _of_dict(self, node: Node, target: Any, path: str) -> Node:
        """Returns the node of a dict with the keys of ``target`` only; notes those that it lacks as missing."""
        if not isinstance(target, dict):
            return self._refuse(path, target, "dict")
        if type(node) is list and node[0] == "f":
            self._object(node[1])
            return ["f", node[1], self._of_dict(node[2], target, path)]
        there = {self._key(text): (text, value) for _, text, value in children(node)}
        chosen = []
        for key, given in target.items():
            below = f"{path}.{key}" if path else str(key)
            if key not in there:
                self.missing.append(below)
                # It may be one whose class is not allowed.
                self.objects |= {text[1] for known, (text, _) in there.items() if type(known) is Unlisted}
                continue
            text, value = there[key]
            if type(text) is list:
                self._object(text[1])
            chosen.append((text, self._chosen(value, given, below)))
        if type(node) is dict:
            return dict(chosen)
        return ["o", dict(chosen)] if node[0] == "o" else ["d", node[1], [list(pair) for pair in chosen]]

    def _key(self, text: Any) -> Any:
        return self._all[text[1]] if type(text) is list else text

    def _compare(self, number: int, target: Any, path: str) -> None:
        """Refuses the leaf with this number if ``target`` has a value of another type or kind in its place."""
        value = torch.Tensor if number >= 0 else self._all[-number - 1]
        if value is torch.Tensor or isinstance(value, torch.Tensor):
            if not isinstance(target, torch.Tensor):
                self._refuse(path, target, "tensor")
            elif number < 0 and (kinds := differing_kinds(target, value)) is not None:
                self._wrong.append(f"{path or 'the state itself'}: {kinds[0]} here, {kinds[1]} in the checkpoint")
        elif type(value) is not Unlisted and not isinstance(target, type(value)):
            self._refuse(path, target, type(value).__name__)

    def _refuse(self, path: str, target: Any, there: str) -> Node:
        self._wrong.append(f"{path or 'the state itself'}: {type(target).__name__} here, {there} in the checkpoint")
        return 0

    def _take_whole(self, node: Node) -> Node:
        """Notes all leaves and objects of ``node``, and returns it."""
        if type(node) is int:
            if node >= 0:
                self.leaves.add(node)
            else:
                self._object(-node - 1)
        else:
            for place in objects_of(node):
                self._object(place)
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


def merged(target: Any, part: Any, kept: Collection[int] | None = None) -> Any:
    """Puts ``part``, which was built for ``target``, into it.

    Args:
        target: the state that is loaded into
        part: what there was for it
        kept: the identities of values in ``target`` that stay

    Returns:
        ``target`` itself if it is one of ``kept``, or a dict, which is updated; otherwise ``part``, with what it lacks.
    """
    if kept and id(target) in kept:
        return target
    if isinstance(target, dict) and isinstance(part, dict):
        for key, value in part.items():
            target[key] = merged(target[key], value, kept)
        return target
    if isinstance(target, list) and type(part) is list:
        together = [merged(a, p, kept) for a, p in zip(target, part, strict=False)]
        return together + (part[len(target) :] or target[len(part) :])
    if isinstance(target, tuple) and isinstance(part, tuple) and len(target) == len(part):
        together = [merged(a, p, kept) for a, p in zip(target, part, strict=True)]
        kind: Any = type(part)
        return kind._make(together) if tree.is_namedtuple(kind) else kind(together)
    return part


def fill(target: Any, state: Any, strict: bool = False, kept: Collection[int] | None = None) -> tuple[Any, list[str]]:
    """Copies the part of ``state`` that ``target`` has keys for into the tensors of ``target``.

    Returns:
        What :func:`merged` returns: ``target`` itself, updated, if it is a dict; and the paths that ``state`` does not
        have.

    Raises:
        StateMismatch: the two differ in dtypes, shapes or types, or keys are missing and ``strict`` is set; nothing was
            overwritten then. Or torch cannot copy a tensor, and others may have new values
        UnsupportedLeaf: as for :func:`tree.flatten`
    """
    flat = tree.flatten(state)
    part = RequestedPart(flat.tree, flat.objects, target, strict, kept)
    chosen = tree.unflatten(part.tree, flat.plain, flat.objects)
    return merged(target, InPlaceTargets(target).fill(chosen, IN_FILE), kept), part.missing
