"""A digest of a state, by which a job's processes and its test compare what they hold."""

from __future__ import annotations

import hashlib


def digest(state) -> str:
    """Returns a digest of this rank's part of all tensors in ``state``, and of the values beside them."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._pytree import tree_flatten_with_path

    found = hashlib.sha256()
    for path, leaf in sorted(tree_flatten_with_path(state)[0], key=lambda pair: str(pair[0])):
        found.update(str(path).encode())
        if isinstance(leaf, DTensor):
            leaf = leaf.to_local()
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
    return found.hexdigest()
