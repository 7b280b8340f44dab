"""Which cases of a test a change runs, and which wait for the night."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_at_night(cases: Iterable[Any], *, by_day: int = 1) -> list[Any]:
    """Returns ``cases`` for ``parametrize``: each change runs the first ``by_day`` of them, a night all.

    A tuple has the values of several arguments.
    """
    params = [
        case if hasattr(case, "marks") else pytest.param(*(case if isinstance(case, tuple) else (case,)))
        for case in cases
    ]
    at_night = [pytest.param(*p.values, marks=[*p.marks, pytest.mark.nightly], id=p.id) for p in params[by_day:]]
    return [*params[:by_day], *at_night]
