"""``load`` into states whose dicts have keys that are no text."""

from __future__ import annotations

import pytest
import torch

from checkpoint_loads import load_state, rank_file, save_state
from equality import assert_same_state
from pickled_classes import Colour
from tensorferry.checkpointing import SyncCheckpointer, load_file, loading
from tensorferry.pickles.allowlist import Allowed

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def keyed(value: float, shift: int = 0) -> dict:
    """A state whose dicts have keys that are objects, in an order that ``shift`` turns."""
    keys = [(1, 2), (3, 4), 1.5, 2.5, frozenset({7}), frozenset({8, 9}), Colour.RED, b"ab", 1 << 70, "text"]
    turned = keys[shift:] + keys[:shift]
    tensors = {key: torch.full((2,), value * (1 + keys.index(key))) for key in turned}
    return {"deep": [tensors, {(key, 0): value * keys.index(key) for key in turned}], (0,): torch.full((3,), value)}


@pytest.mark.parametrize("dropped", [None, (1, 2), 2.5, Colour.RED])
@pytest.mark.parametrize("shift", [0, 3])
def test_values_under_object_keys_land_under_their_own_key(shift, dropped, tmp_path):
    save_state(tmp_path / "c", keyed(1.0))
    torch.save(keyed(1.0), tmp_path / "f.pt")
    allowed = Allowed([Colour])
    for load_into in (
        lambda target: loading.read(tmp_path / "c", target, allowed=allowed),
        lambda target: load_file(tmp_path / "f.pt", target, safe_globals=[Colour]),
        lambda target: load_file(rank_file(tmp_path / "c"), target, safe_globals=[Colour]),
        lambda target: SyncCheckpointer(safe_globals=[Colour]).load(tmp_path / "c", target),
    ):
        target, expected = keyed(0.0, shift), keyed(1.0, shift)
        for one in (target, expected):
            one["deep"][0].pop(dropped, None)
            one["deep"][1].pop((dropped, 0), None)
        tensors = dict(target["deep"][0])
        found = load_into(target)
        state, missing = found if isinstance(found, tuple) else (found, [])
        assert missing == []
        assert_same_state(state, expected)
        assert all(state["deep"][0][key] is tensor for key, tensor in tensors.items())


@pytest.mark.parametrize("key", [2**53 - 1, 2**53, -(2**53) + 1, -(2**53), 2**63 - 1, -(2**63), -(2**63) - 1])
def test_keys_are_integers_of_any_size(key, tmp_path):
    state = {key: torch.arange(3.0), 1: torch.ones(2)}
    loaded = load_state(save_state(tmp_path / "c", state))
    assert_same_state(state, loaded)
