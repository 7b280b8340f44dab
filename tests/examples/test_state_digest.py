"""The digest that compares states changes with every kind of difference."""

import pytest
import torch
from state_digest import state_bytes, state_digest

STATE = {"w": torch.arange(6.0).reshape(2, 3), "n": {"step": 3, "lr": [0.1, None]}, "e": torch.empty(0)}


def test_equal_states_have_equal_digests():
    other = {"n": {"lr": (0.1, None), "step": 3}, "e": torch.empty(0), "w": STATE["w"].t().contiguous().t()}
    assert state_digest(other) == state_digest(STATE)
    assert state_bytes(STATE) == 24


@pytest.mark.parametrize(
    "change",
    [
        {"w": torch.arange(6.0).reshape(3, 2)},
        {"w": torch.arange(6.0).reshape(2, 3).to(torch.float64)},
        {"w": torch.arange(6.0).reshape(2, 3) + torch.eye(2, 3) * 1e-6},
        {"n": {"step": 4, "lr": [0.1, None]}},
        {"n": {"step": 3.0, "lr": [0.1, None]}},
        {"more": 1},
    ],
)
def test_any_difference_shows(change):
    assert state_digest(STATE | change) != state_digest(STATE)


def test_negative_zero_and_nan_payloads_are_differences():
    assert state_digest(torch.tensor([0.0])) != state_digest(torch.tensor([-0.0]))
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    assert state_digest(quiet) != state_digest(other)
