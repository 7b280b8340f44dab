"""Removes keys from a checkpoint in a folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ..dcp import index
from ..dcp.save_plan import ABOUT
from ..memory.tensors import no_rows
from ..storage import commits, reserved
from ..storage.commits import Commit
from ..storage.container import Container
from ..storage.folder import INDEX


def remove(folder: Path, prefix: str, metadata: Metadata) -> None:
    """Replaces the index by one without the keys that begin with ``prefix``, and removes files that it needs no more.

    Args:
        folder: the checkpoint
        prefix: the beginning of the keys
        metadata: what the folder's index says; it is changed

    Raises:
        TensorferryError: the index cannot be read or written
    """
    before = commits.read(folder / INDEX)[1]
    state: dict[str, Any] = metadata.state_dict_metadata
    kept = {key: about for key, about in state.items() if not key.startswith(prefix)}
    stored = {at: ref for at, ref in metadata.storage_data.items() if at.fqn in kept}
    metadata.state_dict_metadata, metadata.planner_data = kept, None
    needed = {ref.container for ref in stored.values()}
    files = {name: header for name, header in before.files.items() if name in needed}
    control = [
        (reserved.INDEX, index.encode(metadata, stored)),
        (reserved.INDEX_FILES, Commit(files, time.time_ns()).encode()),
    ]
    partial = folder / f"{INDEX}.{commits.new_id()}.partial"
    Container(no_rows(), None, True, control, ABOUT).write(folder / INDEX, partial=partial, threads=1)
    commits.remove(folder, sorted(before.files.keys() - files.keys()))
