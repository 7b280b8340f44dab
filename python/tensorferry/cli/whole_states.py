"""States of jobs of several ranks, made whole for formats that know of no ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ..errors import UnsupportedLeaf
from ..state import tree
from ..state.local_parts import is_spread
from .leaves.values import whole_of

if TYPE_CHECKING:
    from torch import Tensor


def without_ranks(state: Any, place: str) -> Any:
    """Returns ``state`` with a plain tensor in place of each DTensor or ShardedTensor that is whole in one part.

    Raises:
        UnsupportedLeaf: one is not whole, or is whole in several parts only
    """
    flat = tree.flatten(state)
    for number, (value, path) in enumerate(zip(flat.objects, flat.object_paths, strict=True)):
        if is_spread(value):
            flat.objects[number] = _whole_tensor(value, f"{place}: {path}")
    return tree.unflatten(flat.tree, flat.plain, flat.objects)


def _whole_tensor(value: Any, name: str) -> Tensor:
    """Returns the whole tensor that ``value`` is, or has as its only part.

    Raises:
        UnsupportedLeaf: it has another part, or several
    """
    whole = whole_of(value)
    if is_spread(whole):
        raise UnsupportedLeaf(
            f"{name} is a part of a tensor that is spread over ranks, {list(value.size())} in all, and the other parts "
            "are not there: convert a checkpoint that has those of all ranks, or keep the format with --to tensorferry"
        )
    return cast("Tensor", whole.detach())
