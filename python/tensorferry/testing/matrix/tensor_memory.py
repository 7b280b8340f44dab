"""What a trainer does to the memory of a state while a transport serves it, or fills it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._pytree import tree_flatten

__all__ = ["Replacing", "change", "free_at_once", "overwrite", "replace"]

Replacing: TypeAlias = Literal["data", "set", "half"]

_MMAP_THRESHOLD = -3
_STRANGE = 0xA5
_strangers: list[torch.Tensor] = []


def free_at_once() -> None:
    """Has the allocator of this process give memory of a MiB or more back as soon as it is freed.

    Whoever reads it then dies of it. Otherwise that depends on what was freed before: glibc learns from it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def overwrite(state: Any) -> None:
    """Writes over every tensor in place, as a trainer does that goes on: who still reads gets wrong bytes."""
    for tensor in _tensors(state):
        _bytes(tensor).fill_(_STRANGE)


def change(state: Any, newer: Any) -> None:
    """Writes the tensors of ``newer`` into those of ``state`` in place."""
    with torch.no_grad():
        for tensor, other in zip(_tensors(state), _tensors(newer), strict=True):
            _bytes(tensor).copy_(_bytes(other))


def replace(state: Any, how: Replacing) -> None:
    """Gives every tensor other memory, of the same bytes, and lets go of what it had.

    Args:
        state: the tree whose tensors these are
        how: ``"data"`` assigns to ``data``; the memory of before is then nobody's. ``"set"`` uses ``set_``, and
            ``"half"`` assigns another dtype, as ``module.half()`` does; other tensors then come to where the memory
            was, and are written to.
    """
    tensors = _tensors(state)
    # All at first: otherwise each would come to where the one before it was.
    others = [_OTHER[how](tensor) for tensor in tensors]
    sizes = [tensor.nbytes for tensor in tensors]
    for tensor, other in zip(tensors, others, strict=True):
        if how == "set":
            tensor.set_(other.untyped_storage(), 0, tensor.size(), tensor.stride())
        else:
            tensor.data = other
    if how != "data":
        _strangers.extend(torch.full((size,), _STRANGE, dtype=torch.uint8) for size in sizes)


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float16 if tensor.is_floating_point() else torch.int32)


_OTHER: dict[Replacing, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": torch.clone,
    "set": torch.clone,
    "half": _halved,
}


def _tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(state)[0] if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
