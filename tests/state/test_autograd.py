"""What is written into tensors that autograd has saved makes a gradient an error, not a wrong number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from in_place_doors import PLAN_DOORS, STATE_DOORS, Door
from tensorferry import StateMismatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.beyond_torchft,
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore::FutureWarning"),
]

each_door = pytest.mark.parametrize("door", [*STATE_DOORS, *PLAN_DOORS], ids=lambda door: door.__name__)

#: The tensors that are received into, by what they are of a leaf ``w``.
TARGETS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda w: w,
    "detached": lambda w: w.detach(),
    "row": lambda w: w.detach()[1],
    "column": lambda w: w.detach()[:, 1],
    "transposed": lambda w: w.detach().t(),
}


@each_door
@pytest.mark.parametrize("target", TARGETS)
def test_a_gradient_that_needs_the_old_values_is_an_error(door: Door, target: str, tmp_path: Path) -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    of_weight, of_row = (weight * weight).sum(), (weight[1] * weight[1]).sum()
    live = {"w": TARGETS[target](weight)}
    door({"w": torch.full(live["w"].shape, 5.0)}, live, tmp_path, ())
    assert live["w"].eq(5).all()
    for result in (of_weight, of_row):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()


@each_door
def test_so_is_one_that_needs_those_of_a_dtensor(door: Door, tmp_path: Path) -> None:
    """It has a counter of its own, besides that of its local tensor."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = DTensor.from_local(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        result = (weight * weight).sum()
        live = {"w": weight.detach()}
        door({"w": DTensor.from_local(torch.full((4,), 5.0), mesh, [Shard(0)])}, live, tmp_path, ())
        assert weight.to_local().eq(5).all()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()
    finally:
        dist.destroy_process_group()


@each_door
def test_a_load_that_is_refused_makes_no_gradient_an_error(door: Door, tmp_path: Path) -> None:
    weight = torch.ones(4, requires_grad=True)
    result = (weight * weight).sum()
    live: dict[str, Any] = {"a": torch.zeros(3), "w": weight.detach()}
    with pytest.raises(
        (StateMismatch, CheckpointException), match=r"a: torch.float32 \[3\] here|Size mismatch .* for a"
    ):
        door({"a": torch.zeros(5), "w": torch.full((4,), 5.0)}, live, tmp_path, ())
    assert live["w"].eq(1).all()
    result.backward()
    assert weight.grad is not None


@each_door
def test_inference_tensors_are_received_into(door: Door, tmp_path: Path) -> None:
    """They have no counter, and torch's ``copy_`` refuses them outside of its inference mode."""
    with torch.inference_mode():
        live = {"direct": torch.zeros(1 << 12), "late": torch.zeros(8)[::2], "scalar": torch.zeros(())}
    saved = {"direct": torch.ones(1 << 12), "late": torch.ones(4), "scalar": torch.ones(())}
    door(saved, live, tmp_path, ())
    assert all(value.eq(1).all() for value in live.values())
