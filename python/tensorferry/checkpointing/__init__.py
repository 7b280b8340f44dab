"""Checkpointers, and what they need.

``AsyncCheckpointer`` copies a state into shared memory and has another process write it; ``SyncCheckpointer`` writes it
itself. The public names are imported on first use: the process that writes needs no torch.
"""

from typing import TYPE_CHECKING

from .._first_use import on_first_use

if TYPE_CHECKING:
    from .checkpointers import AsyncCheckpointer, SyncCheckpointer
    from .keeper.client import Keeper
    from .keeper.snapshot import peer_metadata
    from .latest import latest_checkpoint
    from .loading import load_file
    from .torch_parts import Stager

__all__ = [
    "AsyncCheckpointer",
    "Keeper",
    "Stager",
    "SyncCheckpointer",
    "latest_checkpoint",
    "load_file",
    "peer_metadata",
]

if not TYPE_CHECKING:  # With a module __getattr__, a type checker would accept any name.
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "AsyncCheckpointer": ".checkpointers",
            "Keeper": ".keeper.client",
            "Stager": ".torch_parts",
            "SyncCheckpointer": ".checkpointers",
            "latest_checkpoint": ".latest",
            "load_file": ".loading",
            "peer_metadata": ".keeper.snapshot",
        },
    )
