"""How tensors lie on the ranks of a job."""

from __future__ import annotations

import functools
from datetime import timedelta

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

__all__ = ["TIMEOUT", "Replicate", "distribute_tensor", "layouts"]

TIMEOUT = timedelta(seconds=60)


@functools.cache
def layouts(world):
    """Returns meshes and placements for a job of that size, by name."""
    mesh = init_device_mesh("cpu", (world,))
    return {"rows": (mesh, [Shard(0)]), "columns": (mesh, [Shard(1)])}
