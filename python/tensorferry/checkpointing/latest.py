"""The newest checkpoint that all ranks of a job can load, from disk or from the keepers of their nodes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SystemRefused
from .loading import complete_checkpoints

if TYPE_CHECKING:
    from .keeper.client import Keeper
    from .saving import Ranks

logger = logging.getLogger("tensorferry")


def find_latest(root: Path, ranks: Ranks, keeper: Keeper | None) -> tuple[Path, str] | None:
    """Returns the folder and the id of the newest save below ``root``, on all ranks the same; ``None`` without one.

    A save counts if it is committed on the disk as rank 0 sees it, or if every rank has its snapshot in the keeper of
    its node or a buddy. Where ranks agree by a function of the user's, which cannot collect, rank 0's keeper must know
    the snapshots of all ranks. Ranks agree on the name of the folder below ``root``, which may be a link that leads to
    another place on each node.
    """
    root = Path(os.path.realpath(root))
    own: list[list[Any]] = []
    if keeper is not None:
        known = keeper.below(root, ranks.rank, ranks.world_size)
        own = [[one.began, Path(one.path).name, one.save_id, one.complete] for one in known]
    gathered = ranks.gather(own)
    choice: list[Any] | None = None
    if ranks.rank == 0:
        choice = max([*_committed(root), *_in_memory(gathered or [own], gathered is not None)], default=None)
    choice = ranks.from_first(choice)
    return None if choice is None else (root / choice[1], str(choice[2]))


def _committed(root: Path) -> list[list[Any]]:
    try:
        found = complete_checkpoints(root)
    except SystemRefused as e:
        logger.debug("no checkpoint is on the disk: %s", e)
        return []
    return [[index.began, folder.name, index.save_id] for folder, index in found]


def _in_memory(gathered: Sequence[list[list[Any]]], of_all: bool) -> list[list[Any]]:
    """Returns what each rank has listed; of rank 0 alone, what it knows to be there for all ranks."""
    common = {(began, name, save_id) for began, name, save_id, complete in gathered[0] if complete or of_all}
    for listed in gathered[1:]:
        common &= {(began, name, save_id) for began, name, save_id, _ in listed}
    return [list(one) for one in common]
