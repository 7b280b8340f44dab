"""The part of a checkpoint's state that a load into another state, the target, takes: only the target's keys.

The rules are those of torch's ``CheckpointReader``, at every level of nested dicts: keys that only the checkpoint has
are left out; those that only the target has are missing, and keep their values.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch

from .._native import _add_pieces
from ..memory.tensors import storage_key
from . import pickling, tree
from .in_place import IN_FILE, InPlaceTargets
from .match import Match, holds_tensors


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


def merged(target: Any, part: Any, kept: Collection[int] = ()) -> Any:
    """Puts ``part``, which was built for ``target``, into it.

    Args:
        target: the state that is loaded into
        part: what there was for it
        kept: the identities of values in ``target`` that stay

    Returns:
        ``target`` itself if it is one of ``kept``, or a dict, which is updated; otherwise ``part``.
    """
    if kept and id(target) in kept:
        return target
    if isinstance(target, dict) and isinstance(part, dict):
        for key, value in part.items():
            target[key] = merged(target[key], value, kept)
        return target
    # A list without tensors is a value.
    if isinstance(target, list | tuple) and isinstance(part, list | tuple) and holds_tensors(target):
        together = [merged(a, p, kept) for a, p in zip(target, part, strict=True)]
        kind: Any = type(part)
        return kind._make(together) if tree.is_namedtuple(kind) else kind(together)
    return part


def chosen(flat: tree.Flat, target: Any) -> Match:
    """Returns what a load into ``target`` takes of a state; nothing is compared."""
    tensors = {-n - 1 for n, value in enumerate(flat.objects) if isinstance(value, torch.Tensor)}
    return Match(
        json.loads(flat.tree), target, tensors, len(flat.plain), IN_FILE, flat.keys, flat.objects, is_part=True
    )


def fill(target: Any, state: Any, strict: bool = False) -> tuple[Any, list[str]]:
    """Copies the part of ``state`` that ``target`` has keys for into the tensors of ``target``.

    Returns:
        What :func:`merged` returns: ``target`` itself, updated, if it is a dict; and the paths that ``state`` does not
        have.

    Raises:
        StateMismatch: the two differ in dtypes, shapes or types, or keys are missing and ``strict`` is set; nothing was
            overwritten then. Or torch cannot copy a tensor, and others may have new values
        UnsupportedLeaf: as for :func:`tree.flatten`
    """
    targets = InPlaceTargets(target, strict=strict, is_part=True)
    return merged(target, targets.fill(state, IN_FILE)), targets.missing
