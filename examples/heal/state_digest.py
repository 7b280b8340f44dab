"""SHA-256 over a training state: every leaf with its path, type, dtype, shape and bytes."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) in an order that does not depend on the insertion order of dictionaries."""
    if isinstance(state, Mapping):
        for key in sorted(state, key=repr):
            yield from leaves(state[key], f"{path}/{key!r}")
    elif isinstance(state, list | tuple):
        for index, item in enumerate(state):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path, state


def state_digest(state: Any) -> str:
    """Hex SHA-256 of all leaves: equal digests mean bit-equal tensors and equal numbers, strings and so on."""
    digest = hashlib.sha256()
    for path, leaf in leaves(state):
        if isinstance(leaf, torch.Tensor):
            tensor = leaf.detach().cpu().contiguous()
            digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)} {tensor.nbytes}\n".encode())
            if tensor.nbytes:
                digest.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        else:
            digest.update(f"{path} {type(leaf).__qualname__} {leaf!r}\n".encode())
    return digest.hexdigest()


def state_bytes(state: Any) -> int:
    """Bytes of all tensors of a state."""
    return sum(leaf.nbytes for _, leaf in leaves(state) if isinstance(leaf, torch.Tensor))
