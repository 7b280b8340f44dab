"""Leaves cases out of tests that have many, for a run that is to be short."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

#: A test with fewer cases keeps all of them.
MANY = 6


def keep_every_nth(config: pytest.Config, items: list[pytest.Item], nth: int) -> None:
    """Keeps of each test with many cases the first one and every ``nth`` behind it; pytest counts the others."""
    cases = Counter(map(_test, items))
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        test = _test(item)
        (left_out if cases[test] >= MANY and seen[test] % nth else kept).append(item)
        seen[test] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
