"""Amounts of memory: what an option says, and what a keeper takes where none was given."""

from __future__ import annotations

import os
import re

from ... import _validate
from ..._native import _memory_limit
from ...errors import InvalidArgument

#: The share of the machine's memory, or of the control group's, that a keeper may hold by default.
DEFAULT_SHARE = 0.5
_AMOUNT = re.compile(r"(?P<number>\d{1,30}(\.\d{1,30})?)\s*(?P<unit>%|[KMGT]?(i?B)?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


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


def amount(name: str, text: str, whole: int | None = None) -> int:
    """Returns the bytes that ``text`` stands for, as :func:`memory_limit` does; a share is one of ``whole``.

    Raises:
        InvalidArgument: it is no amount; ``name`` is what the message calls it
    """
    found = _AMOUNT.fullmatch(text.strip())
    if not found or (found["unit"] == "%" and whole is None):
        share = ", or a share such as 40%" if whole is not None else ""
        raise InvalidArgument(
            f"{name} must be a number of bytes, with K, M, G or T if you like{share}, not {_validate.brief(text)}"
        )
    number, unit = float(found["number"]), found["unit"].upper()
    if unit == "%":
        return int(number / 100 * (whole or 0))
    return int(number * 1024 ** _POWERS[unit.rstrip("B").rstrip("I")])


def readable(nbytes: int) -> str:
    """Returns ``nbytes`` for people: ``"1.5 GiB"``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
