"""A rank's part of a tensor takes the values of that part alone, through each door that has only one rank's state."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from in_place_doors import Door, archive, file, keeper, stock, transport
from tensorferry import StateMismatch
from tensorferry.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(90), pytest.mark.beyond_torchft]

#: Of those that have no offsets, the placements can be told alone.
WITH_OFFSETS = [transport, keeper, file]
WITHOUT_OFFSETS = [stock, archive]
#: Those that refuse to save summands.
OF_CHECKPOINTERS = [keeper, file]


@contextlib.contextmanager
def job(rank: int) -> Iterator[Any]:
    """A rank of a job of two; yields its mesh."""
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def part(rank: int, placement: Placement | None, value: float, rows: int = 2) -> torch.Tensor:
    """The part of a matrix that a rank has; without a placement, the matrix."""
    with job(rank) as mesh:
        if placement is None:
            return torch.full((4, 4), value)
        return DTensor.from_local(torch.full((rows, 4), value), mesh, [placement], run_check=False)


def states(saved: torch.Tensor, live: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"first": torch.ones(9), "w": saved}, {"first": torch.zeros(9), "w": live}


def check_nothing_is_overwritten(live: dict[str, Any]) -> None:
    assert not live["first"].any()
    assert not getattr(live["w"], "_local_tensor", live["w"]).any()


@pytest.mark.parametrize("door", [*WITH_OFFSETS, *WITHOUT_OFFSETS], ids=lambda door: door.__name__)
@pytest.mark.parametrize(("placement", "rows"), [(Shard(0), 2), (Replicate(), 4), (Partial(), 4)])
def test_the_same_part_is_taken(placement: Placement, rows: int, door: Door, tmp_path: Path) -> None:
    source, live = states(part(1, placement, 5.0, rows), part(1, placement, 0.0, rows))
    local = live["w"].to_local()
    if placement == Partial() and door in OF_CHECKPOINTERS:
        with job(1), pytest.raises(InvalidArgument, match=r"w cannot be a part of a checkpoint: .* it is Partial"):
            door(source, live, tmp_path, ())
        return
    with job(1):
        loaded = door(source, live, tmp_path, ())
    assert loaded["w"] is live["w"]
    assert local.eq(5).all()


@pytest.mark.parametrize("door", WITH_OFFSETS, ids=lambda door: door.__name__)
@pytest.mark.parametrize(("saved", "here"), [(0, 1), (1, 0)])
def test_the_part_of_another_rank_is_refused_though_its_shape_is_the_same(
    saved: int, here: int, door: Door, tmp_path: Path
) -> None:
    source, live = states(part(saved, Shard(0), 5.0), part(here, Shard(0), 0.0))
    message = rf"nothing was overwritten.*\n  w: the parts \[\[\[{2 * here}, 0\], \[2, 4\]\]\] here"
    with job(here), pytest.raises(StateMismatch, match=message):
        door(source, live, tmp_path, ())
    check_nothing_is_overwritten(live)


@pytest.mark.parametrize("door", [*WITH_OFFSETS, *WITHOUT_OFFSETS], ids=lambda door: door.__name__)
@pytest.mark.parametrize(
    ("saved", "here"),
    [
        (Replicate(), None), (None, Replicate()), (Shard(0), None), (None, Shard(0)), (Replicate(), Shard(0)),
        (Partial(), Replicate()), (Replicate(), Partial()),
    ],
)  # fmt: skip
def test_a_part_a_summand_and_a_whole_tensor_are_different_kinds(
    saved: Placement | None, here: Placement | None, door: Door, tmp_path: Path
) -> None:
    rows = {None: 4, Replicate(): 4, Shard(0): 2, Partial(): 4}
    refused: Any = (StateMismatch, r"nothing was overwritten.*\n  w: .* here, .* (in|at) the")
    if saved == Partial() and door in OF_CHECKPOINTERS:
        refused = InvalidArgument, "it is Partial"
    source, live = states(part(0, saved, 5.0, rows[saved]), part(0, here, 0.0, rows[here]))
    with job(0), pytest.raises(refused[0], match=refused[1]):
        door(source, live, tmp_path, ())
    check_nothing_is_overwritten(live)
