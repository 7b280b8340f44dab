"""Changes to the memory of a state, as a trainer makes them while a transport serves or fills that state."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._pytree import tree_flatten

Replacing: TypeAlias = Literal["data", "set", "half"]

_MMAP_THRESHOLD = -3
_FILLER = 0xA5
_reusing: list[torch.Tensor] = []


def free_at_once() -> None:
    """Makes the allocator of this process unmap memory of 1 MiB or more as soon as it is freed.

    A later access then ends the process. By default glibc raises that threshold after large frees.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def overwrite(state: Any) -> None:
    """Writes over every tensor in place, as the next training step does: a late reader gets wrong bytes."""
    for tensor in _tensors(state):
        _bytes(tensor).fill_(_FILLER)


def change(state: Any, newer: Any) -> None:
    """Writes the tensors of ``newer`` into those of ``state`` in place."""
    with torch.no_grad():
        for tensor, other in zip(_tensors(state), _tensors(newer), strict=True):
            _bytes(tensor).copy_(_bytes(other))


def replace(state: Any, how: Replacing) -> None:
    """Gives every tensor other memory and frees its old memory.

    Args:
        state: the tree that holds the tensors
        how: ``"data"`` assigns a copy to ``data``; the old memory is then unused. ``"set"`` puts a copy in place with
            ``set_``, and ``"half"`` assigns a copy of another dtype to ``data``, as ``module.half()`` does; the old
            memory is then likely to be reused by new tensors with other bytes.
    """
    tensors = _tensors(state)
    # All copies are made first: otherwise each could get the old memory of the tensor before.
    others = [_COPY[how](tensor) for tensor in tensors]
    sizes = [tensor.nbytes for tensor in tensors]
    for tensor, other in zip(tensors, others, strict=True):
        if how == "set":
            tensor.set_(other.untyped_storage(), 0, tensor.size(), tensor.stride())
        else:
            tensor.data = other
    if how != "data":
        _reusing.extend(torch.full((size,), _FILLER, dtype=torch.uint8) for size in sizes)


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float16 if tensor.is_floating_point() else torch.int32)


_COPY: dict[Replacing, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": torch.clone,
    "set": torch.clone,
    "half": _halved,
}


def _tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(state)[0] if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
