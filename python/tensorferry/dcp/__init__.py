"""Storage for ``torch.distributed.checkpoint``: files, and the memory of a running job.

``FileWriter`` and ``FileReader`` replace ``FileSystemWriter`` and ``FileSystemReader``. A ``PeerWriter`` publishes the
state of a running job from its memory; a ``PeerReader`` in another job, of any world size and with any placements,
loads it. ``SavePlanner`` and ``LoadPlanner`` plan for many ranks. docs/guides/dcp.md is the guide. The public names are
imported on first use.
"""

from typing import TYPE_CHECKING

from .._first_use import on_first_use

if TYPE_CHECKING:
    from .failures import own_errors
    from .file_reader import FileReader
    from .file_writer import FileWriter
    from .peer_reader import PeerReader
    from .peer_writer import PeerWriter
    from .planners import LoadPlanner, SavePlanner

__all__ = ["FileReader", "FileWriter", "LoadPlanner", "PeerReader", "PeerWriter", "SavePlanner", "own_errors"]

if not TYPE_CHECKING:  # With a module __getattr__, a type checker would accept any name.
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "FileReader": ".file_reader",
            "FileWriter": ".file_writer",
            "LoadPlanner": ".planners",
            "PeerReader": ".peer_reader",
            "PeerWriter": ".peer_writer",
            "SavePlanner": ".planners",
            "own_errors": ".failures",
        },
    )
