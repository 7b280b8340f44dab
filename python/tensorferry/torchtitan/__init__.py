"""For torchtitan: overrides that are named on its command line.

``--override.imports tensorferry.torchtitan.files`` saves and loads with tensorferry's files.
``--override.imports tensorferry.torchtitan.installed`` calls ``tensorferry.install()``, for torchtitan's fault
tolerance: its checkpoint manager is another one, and its ``Manager`` then heals through our ``HTTPTransport``.
"""

from __future__ import annotations

from typing import Any

from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.config import derive, override

from ..frameworks.installing import install
from .manager import FileCheckpointManager

__all__ = ["files", "installed"]


# Defined here, because torchtitan knows an override by the module that defines it.
@override(target=CheckpointManager.Config, exact=True, description="checkpoints in tensorferry's files")  # type: ignore[untyped-decorator]
def files(config: Any, **options: Any) -> Any:
    """Replaces the configuration of torchtitan's checkpoint manager.

    Args:
        config: that configuration; all its fields are kept
        options: ``threads``, ``cached``, ``safe_globals``, ``trust_pickle``

    Returns:
        The configuration of a :class:`FileCheckpointManager`.
    """
    return derive(config, FileCheckpointManager.Config, **options)


@override(target=CheckpointManager.Config, description="torch's and torchft's classes are tensorferry's")  # type: ignore[untyped-decorator]
def installed(config: Any, **options: Any) -> Any:
    """Calls :func:`tensorferry.install` in this process, for as long as it lives.

    Args:
        config: the configuration of torchtitan's checkpoint manager, or of one derived from it
        options: the arguments of ``install``

    Returns:
        The configuration as it is.
    """
    install(**options)
    return config
