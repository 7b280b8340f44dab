"""States that only torch can read, in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

from ..dcp.files import FileReader


def load_distributed(folder: Path) -> Any:
    """Returns the whole state of a distributed checkpoint, of this package or of torch, in host memory.

    Pickles are read with the allow-list.

    Raises:
        TensorferryError: it is incomplete, damaged, or names what is not allowed
    """
    state: dict[str, Any] = {}
    dcp.state_dict_loader._load_state_dict(
        state, storage_reader=FileReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state
