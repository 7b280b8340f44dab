"""Keys of dicts whose text does not say which ones they are: in place, none is taken for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equality import assert_same_state
from tensorferry.errors import StateMismatch
from tensorferry.state.in_place import InPlaceTargets

pytestmark = [pytest.mark.timeout(60), pytest.mark.beyond_torchft]


class Alike:
    """A key whose text does not say which one it is."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike) and other.number == self.number

    def __repr__(self) -> str:
        return "Alike"


LONG = "x" * 5000


@pytest.mark.parametrize(("one", "other"), [(Alike(1), Alike(2)), ((LONG, 1), (LONG, 2))], ids=["alike", "long"])
def test_keys_with_the_same_text_are_not_taken_for_one_another(one: Any, other: Any) -> None:
    for sent, live in (
        ({one: 1.0}, [one, other]),
        ({one: 1.0, other: 2.0}, [other, one]),
        ({one: 1.0, other: 2.0}, [one]),
    ):
        tensors: dict[Any, Any] = {key: torch.full((1,), value) for key, value in sent.items()}
        mine: dict[Any, Any] = {"deep": {key: torch.zeros(1) for key in live}}
        assert_same_state(InPlaceTargets(mine).fill({"deep": tensors}), {"deep": tensors})
        assert all(float(tensor) in (0.0, sent.get(key)) for key, tensor in mine["deep"].items())
        with pytest.raises(StateMismatch, match="only here"):
            InPlaceTargets(mine, strict=True).fill({"deep": tensors})
