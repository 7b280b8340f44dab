"""A state pickled by the native code, or by Python alone."""

from __future__ import annotations

from typing import Any

import pytest

from tensorferry.state import pickling, tree


def in_python(patch: pytest.MonkeyPatch) -> None:
    """Lets states be read and pickled without the native code."""
    flatten = tree.flatten
    patch.setattr(tree, "flatten", lambda state, _native=True: flatten(state, False))


def dump(state: Any) -> bytes:
    """Returns the pickle of what the header of a state leaves to pickles."""
    return pickling.dump(tree.flatten(state))[0]
