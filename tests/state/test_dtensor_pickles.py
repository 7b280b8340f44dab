"""DTensors are pickled natively, and share the specs that do not differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from exchange import send_and_receive
from pickled_states import in_python
from random_states import Meshes
from tensorferry.state import tree

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch's tensors are read in Python"
)
def test_specs_that_differ_in_anything_are_told_apart(meshes: Meshes) -> None:
    class OtherSize(tuple[int, ...]):
        def __eq__(self, other: object) -> bool:
            return self is other

        __hash__ = tuple.__hash__

    def made(placements: tuple[Any, ...] = (Shard(0),), **changed: Any) -> DTensor:
        meta = TensorMeta(torch.Size([2, 4]), (4, 1), torch.float32)._replace(**changed.pop("meta", {}))
        spec = DTensorSpec(meshes.all[0], placements, tensor_meta=meta)
        vars(spec).update(changed)
        return DTensor(torch.zeros(2, 4), spec, requires_grad=False)

    kinds: list[Callable[[], DTensor]] = [
        made,
        lambda: made((Shard(1),)),
        lambda: made((Replicate(),)),
        lambda: made((Partial("sum"),)),
        lambda: made((Partial("avg"),)),
        lambda: made((_StridedShard(0, split_factor=2),)),
        lambda: made((Shard(0), Shard(0))),
        lambda: made(meta={"shape": torch.Size([4, 2])}),
        lambda: made(meta={"stride": (1, 2)}),
        lambda: made(note=1),
        lambda: made(note=True),
        lambda: made(other=1),
    ]
    alike = [kind() for _ in range(3) for kind in kinds]
    assert tree.flatten(alike).unread == []
    firsts = tree.flatten(alike).rows.first_specs
    assert [id(spec) for spec, _ in firsts] == [id(one._spec) for one in alike[: len(kinds)]]
    # Each of these is like itself only.
    own = [made(note=OtherSize([1])), made(note=OtherSize([1])), made(note=[]), made(note=[]), made(note=1 << 70)]
    assert len(tree.flatten(own).rows.first_specs) == len(own)
    # What was computed of a spec does not count.
    hashed = made()
    hash(hashed._spec)
    assert len(tree.flatten([made(), hashed]).rows.first_specs) == 1


@pytest.mark.beyond_torchft
@pytest.mark.parametrize("is_row", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_the_local_part_of_a_dtensor_that_is_a_leaf_stays_one_object(
    native: bool, is_row: bool, meshes: Meshes, open_transport: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        in_python(monkeypatch)
    whole = torch.arange(12.0).view(3, 4)
    local = whole if is_row else whole[1:]
    spec = DTensor.from_local(local, meshes.all[0], [Shard(0)], run_check=False)._spec
    one, two = (DTensor(local, spec, requires_grad=False) for _ in range(2))
    received = send_and_receive(open_transport(), open_transport(), [one, local, two])
    assert received[0]._local_tensor is received[1] is received[2]._local_tensor
    assert torch.equal(received[1], local)
