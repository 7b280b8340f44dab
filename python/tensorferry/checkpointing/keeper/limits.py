"""Amounts of memory: what an option says, and what a keeper takes where none was given."""

from __future__ import annotations

import os

from ... import _validate
from ..._native import _memory_limit
from ..._validate import amount, readable
from ...errors import InvalidArgument

__all__ = ("amount", "memory_limit", "readable")

#: The share of the machine's memory, or of the control group's, that a keeper may hold by default.
DEFAULT_SHARE = 0.5


def memory_limit(text: str | None) -> int:
    """Returns the bytes that ``text`` stands for.

    ``"20G"``, ``"20GiB"`` and ``"20GB"`` are 20 * 2**30, ``"40%"`` is a share of what this process can have, and a
    plain number is bytes. ``None`` is half of it. What it can have is the machine's memory without swap, or what a
    control group or the limit of the address space leaves of it.

    Raises:
        InvalidArgument: it is none of these, or not between 1 MiB and what this process can have
    """
    has = _memory_limit() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if text is None:
        return int(has * DEFAULT_SHARE)
    nbytes = amount("memory", text, has)
    if not 1 << 20 <= nbytes <= has:
        raise InvalidArgument(
            f"memory must be between 1 MiB and the {has} bytes there are, not {_validate.brief(text)}"
        )
    return nbytes
