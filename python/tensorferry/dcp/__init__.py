"""Storage for ``torch.distributed.checkpoint``: files, and the memory of a running job.

``FileWriter`` and ``FileReader`` take the place of ``FileSystemWriter`` and ``FileSystemReader``. ``PeerWriter``
publishes what a job holds, and ``PeerReader`` of another job, of any size and with other placements, loads from there.
docs/dcp.md tells more.
"""

from .files import FileReader, FileWriter
from .peer_reader import PeerReader
from .peer_writer import PeerWriter

__all__ = ["FileReader", "FileWriter", "PeerReader", "PeerWriter"]
