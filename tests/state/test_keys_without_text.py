"""Keys of dicts whose text does not say which ones they are: in place, none is taken for another."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tensorferry.state import tree
from tensorferry.state.match import Match

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
@pytest.mark.parametrize("are_known", [False, True])
def test_keys_with_the_same_text_are_not_taken_for_one_another(one: Any, other: Any, are_known: bool) -> None:
    """A receiver has only the texts of the keys before it fetches; who has the objects compares these."""
    for sent, live in (
        ({one: 1.0}, [one, other]),
        ({one: 1.0, other: 2.0}, [other, one]),
        ({one: 1.0, other: 2.0}, [one]),
    ):
        flat = tree.flatten({key: torch.full((1,), value) for key, value in sent.items()})
        mine = {key: torch.zeros(1) for key in live}
        node, objects = json.loads(flat.tree), flat.objects if are_known else None
        match = Match(node, mine, (), len(flat.plain), "at the source", flat.keys, objects)
        assert all(
            float(flat.plain[number]) in [sent[key] for key in sent if mine.get(key) is tensor]
            for number, tensor, _ in match.pairs
        )
        assert len(match.pairs) == (len(sent.keys() & mine.keys()) if are_known else 0)
