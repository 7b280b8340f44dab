"""Strategies for the common part alone, by the interfaces of releases that have such: ``common.pt``, written at once.

No release takes a strategy to save it with any more; those before 0.19 take one to load it with
(``common_strategy=``). Theirs reads ``common.pt`` with torch's unpickler, this one with the allow-list of
``load_strategy``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..storage.places import any_place
from . import common
from .interfaces import LoadCommonStrategy, SaveCommonStrategy
from .load import LoadStrategy, load_strategy
from .release import CheckpointingException


class CommonLoadStrategy(LoadCommonStrategy):
    """Loads the common part of a checkpoint.

    Args:
        sharded: reads the checkpoint; its ``safe_globals`` and ``trust_pickle`` hold for the common part
    """

    def __init__(self, sharded: LoadStrategy | None = None) -> None:
        super().__init__()
        self._sharded = load_strategy() if sharded is None else sharded

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Always true."""
        return True

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Checks the common backend of a checkpoint.

        Raises:
            CheckpointingException: it is not ``torch``, which is that of all releases
        """
        if loaded_version != "torch":
            raise CheckpointingException(f"the common part is of backend {loaded_version!r}, and not of 'torch'")

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Checks the version of the common part.

        Raises:
            CheckpointingException: it is not 1, the only one that there is
        """
        if loaded_version != 1:
            raise CheckpointingException(f"the common part has version {loaded_version!r}, and not 1")

    def load(self, checkpoint_dir: str | Path) -> Any:
        """Returns the common part; the name that this method had at first."""
        return self.load_common(checkpoint_dir)

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        """Returns the common part.

        Raises:
            CheckpointingException: the checkpoint cannot be read, or needs something that is not on the allow-list
        """
        return self._sharded.common_state(checkpoint_dir)

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Returns the values of sharded objects, like ``LoadStrategy.load``. All ranks call it."""
        return self._sharded.load(sharded_objects_state_dict, checkpoint_dir)


class CommonSaveStrategy(SaveCommonStrategy):
    """Saves the common part of a checkpoint on rank 0: the file is either the old or the new one at any moment."""

    def __init__(self, backend: str = "torch", version: int = 1) -> None:
        super().__init__(backend, version)

    def save(self, common_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Saves the common part; the name that this method had at first."""
        self.save_common(common_state_dict, checkpoint_dir)

    def save_common(self, common_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Saves the common part on rank 0; the other ranks do nothing, and do not wait.

        Raises:
            InvalidArgument: ``checkpoint_dir`` cannot be used
            CheckpointingException: the ``common.pt`` that is there cannot be read
            OSError: the system refuses
            TensorferryError: a store does not answer, or refuses
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            common.write(any_place(checkpoint_dir, "checkpoint_dir"), common.encoded(common_state_dict))
