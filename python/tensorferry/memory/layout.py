"""Where pieces lie in a buffer that holds several of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

#: Pieces start at multiples of this many bytes in their buffer.
ALIGNMENT = 64


def side_by_side(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Returns the offset of each piece of ``sizes`` bytes in a buffer that holds them in this order, and its length."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
