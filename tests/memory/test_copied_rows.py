"""The rows of a state are copied into one buffer natively: every byte once, and what they came from is let go."""

from __future__ import annotations

import gc
import itertools
import random
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from equality import assert_same_state
from tensorferry.memory.accelerator import ACCELERATOR
from tensorferry.memory.staging import HostStager
from tensorferry.state.snapshot import StateSnapshot

pytestmark = [pytest.mark.beyond_torchft, pytest.mark.timeout(60)]


def odd_state(seed: int) -> dict[str, Any]:
    """Tensors of many sizes, some of them aliases, views, tied, empty, not contiguous or over memory of others."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [draw.choice([0, 1, 3, 15, 16, 17, 255, 4096, 70_001, 400_000]) for _ in range(40)]
    state: dict[str, Any] = {str(n): torch.randn(size) for n, size in enumerate(sizes)}
    memory, weight = bytearray(draw.randbytes(4096)), nn.Parameter(torch.randn(64, 64))
    state |= {
        "bytes": torch.arange(draw.randrange(1, 300)).to(torch.uint8),
        "weight": weight,
        "tied": weight,
        "alias": weight.detach(),
        "column": weight.detach()[:, 3],
        "part": torch.arange(100.0)[7:31],
        "expanded": torch.randn(3, 1).expand(3, 1000),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": torch.randn(9, dtype=torch.complex64).conj(),
        "over memory": torch.frombuffer(memory, dtype=torch.uint8),
        "over its end": torch.frombuffer(memory, dtype=torch.uint8, offset=1024),
        "number": draw.random(),
    }
    return state


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_is_the_state_of_one_moment_and_its_rows_lie_apart(seed: int) -> None:
    state = odd_state(seed)
    before = odd_state(seed)
    made = StateSnapshot(state, HostStager(ACCELERATOR), "copy")
    for leaf in state.values():
        if isinstance(leaf, torch.Tensor) and leaf.numel() and leaf.stride(0):
            leaf.detach().zero_()
    assert_same_state(made.rebuild(), before)
    (buffer,) = made.buffers()
    places = sorted((made.rows.address(n), made.rows.size(n)) for n in range(len(made.rows)) if made.rows.size(n))
    assert all((at - buffer.address) % 64 == 0 for at, _ in places)
    assert all(at + size <= following for (at, size), (following, _) in itertools.pairwise(places))
    assert buffer.address == places[0][0]
    assert places[-1][0] + sum(places[-1][1:]) <= buffer.address + buffer.memory.nbytes


def test_what_was_copied_is_not_kept() -> None:
    class Marked(bytearray):
        """Memory that can be watched."""

    memory = Marked(400)
    gone: list[bool] = []
    weakref.finalize(memory, gone.append, True)
    state = {"a": torch.frombuffer(memory, dtype=torch.float32), "view": torch.arange(10.0)[2:5]}
    del memory
    made = StateSnapshot(state, HostStager(ACCELERATOR), "copy")
    state.clear()
    # A collection does nothing while another thread is in the middle of one.
    until = time.monotonic() + 30
    while not gone and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert gone == [True]
    assert made.rebuild()["view"].tolist() == [2.0, 3.0, 4.0]
