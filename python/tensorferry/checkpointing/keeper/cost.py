"""What a snapshot costs the keeper in memory, and whether that much can be had."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from ...errors import SystemRefused
from .limits import readable

#: Bytes that each byte of a table of entries takes at most while it is read, and when it is served: rows, names, the
#: header and where each entry lies.
_READING_TABLE, _HOLDING_TABLE = 12, 7
#: Likewise each byte of the control entries.
_READING_CONTROL, _HOLDING_CONTROL = 5, 2
#: Bytes of a row of a table besides its name, and of each of its dimensions.
_ROW, _DIMENSION = 31, 8
#: ``MAP_NORESERVE``, which ``mmap`` has not in all versions of Python: not to count as memory that is used.
_NORESERVE = 0x4000
#: Bytes that stay free for all else.
_SPARE = 32 << 20


@dataclass(frozen=True)
class Cost:
    """How large a snapshot is.

    Attributes:
        nbytes: the memory that came with it
        table: bytes of its table of entries
        control: bytes of its control entries
    """

    nbytes: int
    table: int
    control: int = 0

    @property
    def reading(self) -> int:
        """Bytes of memory that the snapshot takes while it is read, with all that describes it."""
        return self.nbytes + _READING_TABLE * self.table + _READING_CONTROL * self.control

    @property
    def holding(self) -> int:
        """Bytes of memory that the snapshot takes once it was read."""
        return self.nbytes + _HOLDING_TABLE * self.table + _HOLDING_CONTROL * self.control


def table_size(entries: int, names: int, dimensions: int) -> int:
    """Returns the bytes of the table of so many entries, with names and dimensions of so many in all."""
    return 24 + _ROW * entries + names + _DIMENSION * dimensions


def probe(nbytes: int) -> None:
    """Checks that this process can have ``nbytes`` bytes more, where its memory or address space is limited.

    The native code cannot go on when it gets none. Nothing is touched.

    Raises:
        SystemRefused: it cannot
    """
    try:
        mmap.mmap(-1, nbytes + _SPARE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE).close()
    except (OSError, ValueError, OverflowError) as e:
        raise SystemRefused(f"the keeper cannot have {readable(nbytes)} more: {e}") from e
