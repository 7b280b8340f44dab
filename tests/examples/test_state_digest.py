"""The digest that compares states changes with every kind of difference."""

import torch
from state_digest import state_bytes, state_digest

STATE = {"w": torch.arange(6.0).reshape(2, 3), "n": {"step": 3, "lr": [0.1, None]}, "e": torch.empty(0)}


def test_a_digest_is_that_of_the_values():
    other = {"n": {"lr": (0.1, None), "step": 3}, "e": torch.empty(0), "w": STATE["w"].t().contiguous().t()}
    assert state_digest(other) == state_digest(STATE)
    assert state_bytes(STATE) == 24
    quiet, nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    for change in (
        {"w": STATE["w"].reshape(3, 2)},
        {"w": -STATE["w"].clone()},
        {"n": {"step": 3.0, "lr": [0.1, None]}},
        {"more": 1},
    ):
        assert state_digest(STATE | change) != state_digest(STATE)
    assert state_digest(quiet) != state_digest(nan)
