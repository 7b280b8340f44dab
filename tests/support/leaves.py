"""The catalogue: every kind of leaf that training states hold, and odd trees, each as a named constructor.

What each entry states about torchft 0.2.0 was measured on its HTTPTransport; `pytest --transport torchft` checks it
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from leaf import Leaf
from object_leaves import OBJECTS, REFUSED, TRAINING, TREES
from tensor_leaves import ALIASES, PARAMETERS, SPECIAL, TENSORS

CARRIED = [*TENSORS, *PARAMETERS, *ALIASES, *SPECIAL, *OBJECTS, *TRAINING, *TREES]
CATALOGUE = {leaf.name: leaf for leaf in [*CARRIED, *REFUSED]}
#: The leaves that need no process group.
ALONE = [leaf for leaf in CARRIED if not leaf.group]
assert len(CATALOGUE) == len(CARRIED) + len(REFUSED), "a name is used twice"


def warnings_of(leaf: Leaf) -> list[pytest.MarkDecorator]:
    """Returns marks that ignore the warnings of a leaf in the test that uses it."""
    return [pytest.mark.filterwarnings(entry) for entry in leaf.warns]


def cases(leaves: Iterable[Leaf]) -> list[Any]:
    """Returns the leaves as parameters of a test, with their names as ids."""
    return [pytest.param(leaf, id=leaf.name, marks=warnings_of(leaf)) for leaf in leaves]
