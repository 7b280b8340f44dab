"""Changes to the memory of a state, as a trainer makes them while a transport serves or fills that state."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

_MMAP_THRESHOLD = -3
_FILLER = 0xA5


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


def replace(state: Any) -> None:
    """Gives every tensor other memory, and frees its old memory, by an assignment to ``data``."""
    tensors = _tensors(state)
    # All copies are made first: otherwise each could get the old memory of the tensor before.
    for tensor, other in zip(tensors, [tensor.clone() for tensor in tensors], strict=True):
        tensor.data = other


def _tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(state)[0] if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
