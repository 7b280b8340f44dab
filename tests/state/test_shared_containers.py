"""States whose containers hold one another so often that they cannot be written out: refused at once."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tensorferry.errors import UnsupportedLeaf
from tensorferry.state import tree

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.timeout(60), pytest.mark.beyond_torchft]

Pair = collections.namedtuple("Pair", ["a", "b"])
KINDS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda one: {"a": one, "b": one},
    "dict of numbers": lambda one: {1: one, 2: one},
    "dict of other keys": lambda one: {(1, 2): one, None: one},
    "list": lambda one: [one, one],
    "tuple": lambda one: (one, one),
    "OrderedDict": lambda one: collections.OrderedDict(a=one, b=one),
    "defaultdict": lambda one: collections.defaultdict(list, a=one, b=one),
    "deque": lambda one: collections.deque([one, one]),
    "namedtuple": lambda one: Pair(one, one),
}


def doubled(kind: str, levels: int, inner: Any = None) -> dict[str, Any]:
    state = torch.ones(2) if inner is None else inner
    for _ in range(levels):
        state = KINDS[kind](state)
    return {"top": state}


@pytest.mark.waits
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_doubles_at_every_level_is_refused(kind: str, native: bool) -> None:
    with pytest.raises(UnsupportedLeaf, match=r"^top\..* stand in so many places .* once"):
        tree.flatten(doubled(kind, 32), native)


def test_what_stands_in_a_few_places_is_sent() -> None:
    shared = {"betas": (0.9, 0.999), "w": torch.ones(3)}
    for state in (doubled("dict", 10), [shared] * 10_000, [()] * 500_000, [list(range(1000))] * 200):
        flat = tree.flatten(state)
        assert tree.unflatten(flat.tree, flat.plain, flat.objects) == state or isinstance(state, dict)
