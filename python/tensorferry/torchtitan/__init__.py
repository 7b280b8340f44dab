"""For torchtitan: ``--override.imports tensorferry.torchtitan.files`` saves and loads with tensorferry's files."""

from __future__ import annotations

from typing import Any

from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.config import derive, override

from .manager import FileCheckpointManager

__all__ = ["files"]


# Defined here, because torchtitan knows an override by the module that defines it.
@override(target=CheckpointManager.Config, exact=True, description="checkpoints in tensorferry's files")  # type: ignore[untyped-decorator]
def files(config: Any, **options: Any) -> Any:
    """Replaces the configuration of torchtitan's checkpoint manager.

    Args:
        config: that configuration; all its fields are kept
        options: ``threads``, ``cached``, ``trust_pickle``

    Returns:
        The configuration of a :class:`FileCheckpointManager`.
    """
    return derive(config, FileCheckpointManager.Config, **options)
