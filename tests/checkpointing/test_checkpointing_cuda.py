"""Checkpointers of states on a real GPU. What a stand-in can show is tested with one in the other files here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from equality import assert_same_state
from nights import mostly_at_night
from tensorferry.checkpointing import AsyncCheckpointer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.process,
    pytest.mark.cuda,
    pytest.mark.beyond_torchft,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none here"),
]

#: Keeps the device busy for some hundred milliseconds.
LONG_CYCLES = 500_000_000
MIB = 1 << 20


def weights(device: str, value: float) -> dict[str, torch.Tensor]:
    """Returns some 190 MiB on a device, and a tensor on the host."""
    large = {f"w{i}": torch.full((24 * MIB // 4,), value + i, device=device) for i in range(8)}
    return {**large, "half": torch.full((7, 5), value, device=device, dtype=torch.bfloat16), "host": torch.arange(9.0)}


def warm_up(checkpointer: AsyncCheckpointer, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Makes one save, after which page-locked memory, streams and the process exist."""
    for future in checkpointer.save(str(folder / "warm-up"), state):
        future.result(60)
    for tensor in state.values():
        tensor.add_(0).fill_(float(tensor[(0,) * tensor.dim()]))
    torch.cuda._sleep(1)
    torch.cuda.synchronize()


@pytest.mark.parametrize("own_stream", mostly_at_night([False, True]))
def test_what_is_queued_is_saved_and_what_comes_later_is_not(own_stream: bool, tmp_path: Path) -> None:
    state = weights("cuda", 1.0)
    host = state["host"].clone()
    checkpointer = AsyncCheckpointer()
    warm_up(checkpointer, state, tmp_path)
    state["host"].copy_(host)
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        torch.cuda._sleep(LONG_CYCLES)
        for name, tensor in state.items():
            if name != "host":
                tensor.add_(1)
        assert not torch.cuda.current_stream().query(), "it is done already: the test shows nothing"
        staged, written = checkpointer.save(str(tmp_path / "one"), state)
        staged.result(60)
        for tensor in state.values():
            tensor.fill_(-1)
    written.result(60)
    assert_same_state(checkpointer.load(str(tmp_path / "one")), weights("cpu", 2.0))
    checkpointer.close()
