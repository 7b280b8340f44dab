"""Tensors are described by native code where torch allows it, and by Python otherwise: both must agree."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from leaves import CARRIED
from tensorferry.state import tree

pytestmark = [pytest.mark.timeout(60), pytest.mark.beyond_torchft]


def seen(state: Any, native: bool) -> dict[str, Any]:
    flat = tree.flatten(state, native)
    rows = flat.rows
    return {
        "tree": json.loads(flat.tree),
        "rows": list(zip(rows.names, rows.dtypes, rows.shapes, rows.sizes, rows.flags, strict=True)),
        "memory": [id(t) for t in rows.memory],
        "objects": [id(o) for o in flat.objects if isinstance(o, torch.Tensor)],
        "paths": flat.object_paths,
    }


@pytest.mark.parametrize("leaf", [leaf for leaf in CARRIED if not leaf.group], ids=lambda leaf: leaf.name)
def test_both_ways_read_every_leaf_alike(leaf: Any) -> None:
    state = leaf.state(leaf.value())
    assert seen(state, native=True) == seen(state, native=False)


def test_what_a_program_has_put_in_place_of_a_property_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's C functions are called directly only as long as torch itself would call them."""
    state = {"tensor": torch.ones(3), "parameter": nn.Parameter(torch.ones(3))}
    assert tree.flatten(state).rows.flags == "03"
    with monkeypatch.context() as patch:
        patch.setattr(nn.Parameter, "is_neg", lambda _: True, raising=False)
        assert tree.flatten(state).rows.names == ["tensor"]
        patch.setattr(torch.Tensor, "is_neg", lambda _: True)
        assert tree.flatten(state).rows.names == []
    with monkeypatch.context() as patch:
        patch.setattr(nn.Parameter, "requires_grad", property(lambda _: False))
        assert tree.flatten(state).rows.flags == "01"
    assert tree.flatten(state).rows.flags == "03"
