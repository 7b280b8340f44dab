"""What a snapshot costs the keeper in memory, and whether that much can be had."""

from __future__ import annotations

import mmap

from ...errors import SystemRefused
from .limits import shown

#: Bytes that each byte of a table of entries takes at most when it is read and served: rows, names, the header that is
#: served and where each entry lies.
TABLE_COST = 12
#: Likewise each byte of the control entries.
CONTROL_COST = 4
#: Bytes of a row of a table besides its name, and of each of its dimensions.
_ROW, _DIMENSION = 31, 8
#: Bytes that stay free for all else.
_SPARE = 32 << 20


def cost_of(nbytes: int, table: int, control: int) -> int:
    """Returns the bytes of memory that a snapshot takes, with all that describes it.

    Args:
        nbytes: the memory that came with it
        table: bytes of its table of entries
        control: bytes of its control entries
    """
    return nbytes + TABLE_COST * table + CONTROL_COST * control


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
        mmap.mmap(-1, nbytes + _SPARE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, ValueError, OverflowError) as e:
        raise SystemRefused(f"the keeper cannot have {shown(nbytes)} more: {e}") from e
