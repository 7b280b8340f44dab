"""What torch needs so that ranks can agree: it sends objects through NumPy, which it does not install."""

from __future__ import annotations

from importlib.util import find_spec

import torch

#: What to do where it is missing.
WITHOUT_NUMPY = (
    "torch.distributed cannot send objects between ranks without NumPy, which is not installed here, so a save or load "
    "of several ranks fails: pip install numpy"
)


def lack_numpy() -> bool:
    """Whether the ranks cannot send each other objects because NumPy is missing."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return False
    return find_spec("numpy") is None
