"""Storage for ``torch.distributed.checkpoint``: files, and the memory of a running job.

``FileWriter`` and ``FileReader`` replace ``FileSystemWriter`` and ``FileSystemReader``. A ``PeerWriter`` publishes the
state of a running job from its memory; a ``PeerReader`` in another job, of any world size and with any placements,
loads it. docs/guides/dcp.md is the guide.
"""

from .files import FileReader, FileWriter
from .peer_reader import PeerReader
from .peer_writer import PeerWriter

__all__ = ["FileReader", "FileWriter", "PeerReader", "PeerWriter"]
