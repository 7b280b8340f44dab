"""A state made from a seed, so that a receiver can compute what the source holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten

_LARGE = 8
_SMALL = 64


def sample_state(seed: int, nbytes: int, objects: int | None = None) -> dict[str, Any]:
    """Returns weights, optimizer state and plain objects; another seed gives other bytes everywhere.

    Args:
        seed: of the tensors' bytes
        nbytes: size of the weights together; the optimizer's tensors come on top
        objects: seed of everything that is not a tensor; ``seed`` if left out
    """
    plain = seed if objects is None else objects
    random = torch.Generator().manual_seed(seed)

    def some(size: int, dtype: torch.dtype) -> torch.Tensor:
        # Eight bytes at a time: a cell of the matrix would spend half of its time here.
        lowest, highest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        return torch.randint(lowest, highest, (size // 8,), dtype=torch.int64, generator=random).view(dtype)

    large = nbytes // _LARGE // 8 * 8
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    return {
        "model": {f"layer{i}.weight": some(large, dtypes[i % len(dtypes)]) for i in range(_LARGE)},
        "optim": {
            "state": {i: {"step": some(8, torch.int64), "exp_avg": some(1024, torch.float32)} for i in range(_SMALL)},
            "param_groups": [{"lr": plain / 1000, "betas": (0.9, 0.999), "params": list(range(_SMALL))}],
        },
        "seed": plain,
        "name": f"state {plain}",
    }


def wrong_bytes(received: Any, expected: Any) -> int:
    """Counts the bytes of ``received`` that differ from ``expected``.

    A tensor of another type, dtype or shape counts with all its bytes; any other leaf that differs counts with the
    length of its ``repr``. A tree of another structure counts as all of the expected state.
    """
    want, want_tree = tree_flatten(expected)
    got, got_tree = tree_flatten(received)
    if got_tree != want_tree:
        return sum(_wrong_bytes_of_leaf(None, leaf) for leaf in want)
    return sum(_wrong_bytes_of_leaf(a, b) for a, b in zip(got, want, strict=True))


def _wrong_bytes_of_leaf(got: Any, want: Any) -> int:
    if not isinstance(want, torch.Tensor):
        return 0 if type(got) is type(want) and got == want else len(repr(want))
    if type(got) is not type(want) or got.dtype != want.dtype or got.shape != want.shape:
        return int(want.nbytes)
    return int((got.contiguous().view(torch.uint8) != want.contiguous().view(torch.uint8)).sum())
