"""Amounts of memory: what an option says, and what a keeper takes where none was given."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ... import _validate
from ...errors import InvalidArgument

#: The share of the machine's memory, or of the control group's, that a keeper may hold by default.
DEFAULT_SHARE = 0.5
_AMOUNT = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>%|[KMGT]?(i?B)?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
#: Where the memory limits of control groups are mounted.
_GROUPS = Path("/sys/fs/cgroup")


def machine_memory() -> int:
    """Returns the bytes of memory that this process may use: all of the machine's, or fewer in a control group."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        own = Path("/proc/self/cgroup").read_text()
    except OSError:
        return limits[0]
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, file = _GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = _GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be that of another namespace; the group's own limit is at the top then.
        group = Path(os.path.normpath(f"{root}/{path.lstrip('/')}"))
        for folder in {root, group, *group.parents}:
            if folder == root or root in folder.parents:
                limits += _limit(folder / file)
    return min(limits)


def _limit(file: Path) -> list[int]:
    try:
        return [int(file.read_text())]
    except (OSError, ValueError):  # "max", or there is no such group.
        return []


def memory_limit(text: str | None) -> int:
    """Returns the bytes that ``text`` stands for.

    ``"20G"``, ``"20GiB"`` and ``"20GB"`` are 20 * 2**30, ``"40%"`` is a share of :func:`machine_memory`, and a plain
    number is bytes. ``None`` is half of the machine's.

    Raises:
        InvalidArgument: it is none of these, or not between 1 MiB and the machine's memory
    """
    has = machine_memory()
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


def shown(nbytes: int) -> str:
    """Returns ``nbytes`` for people: ``"1.5 GiB"``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
