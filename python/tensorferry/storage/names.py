"""The names of the files in a checkpoint folder: how they are made, and which of those in an index are believed.

An index is data: whoever can write it chooses the names in it. They pass :func:`checked_files` when the index is
decoded, before anything opens, links, renames or removes a file by them, and an index with any other name is not a
checkpoint, for no reader and no writer.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import ProtocolError

#: The longest file name, in bytes.
_LONGEST = 255
_RANDOM_DIGITS = 12
_RANK_FILE = re.compile(r"rank(?P<rank>[0-9]{5,})-(?P<id>[0-9a-f]{12,20})\.safetensors")
#: With what the names of objects begin that saves into stores write.
BEGINNINGS = ("index", "rank")
#: Files of saves, complete or in part; those in part may belong to a save that was killed.
_OURS = re.compile(
    rf"({_RANK_FILE.pattern}"
    r"|index\.safetensors(\.(?P<partial>[0-9a-f]{20}))?)(\.partial|\.failed)?"
    r"|\.metadata\.(?P<marker>[0-9a-f]{20})\.partial"
)


@functools.cache
def machine() -> str:
    """Returns 8 hexadecimal digits that identify the running kernel, which is what holds the locks.

    They are random, and those of this process alone, where the system does not identify its kernel.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = secrets.token_bytes(16)
    return hashlib.sha256(boot).hexdigest()[:8]


def new_id() -> str:
    """Returns a new unique id for the file names of one save: the machine's 8 hexadecimal digits and 12 random ones."""
    return machine() + secrets.token_hex(_RANDOM_DIGITS // 2)


def parts_of_name(name: str) -> re.Match[str] | None:
    """Returns the parts of a name that a save of this package gives a file, complete or in part; ``None`` for others.

    The groups are ``rank``, and in ``id``, ``partial`` or ``marker`` the id of the writer.
    """
    return _OURS.fullmatch(name)


def writer_of(name: str) -> str:
    """Returns the id of the writer in the name of a save's file; empty if it has none, as that of an index."""
    found = parts_of_name(name)
    return "" if found is None else found["id"] or found["partial"] or found["marker"] or ""


def is_ours(name: str) -> bool:
    """Whether a file of this name was written by a save of this package, completely or in part."""
    return parts_of_name(name) is not None


def may_be_left(name: str) -> bool:
    """Whether a file of this name may be a leftover: a save's, and not an index."""
    found = parts_of_name(name)
    return found is not None and (not name.startswith("index") or name.endswith(".partial"))


def checked_files(names: Iterable[Any], where: object) -> list[str]:
    """Returns the names of the files that an index lists, after checking that each is the name of a rank's file.

    Args:
        names: as the index has them
        where: how the message names the index

    Raises:
        ProtocolError: one of them is not, for example because it leads out of the folder
    """
    checked = []
    for name in names:
        if type(name) is not str or len(name) > _LONGEST or _RANK_FILE.fullmatch(name) is None:
            raise ProtocolError(
                f"{where}: its index names {_brief(name)} among its files, which is not the name of a rank's file"
            )
        checked.append(name)
    return checked


def checked_plain(name: Any, where: object) -> str:
    """Returns a name from the index of another program, after checking that it is that of a file in its folder.

    Args:
        name: as the index has it
        where: how the message names the index

    Raises:
        ProtocolError: it is not: it is empty, too long, ``.`` or ``..``, or has a separator or a NUL
    """
    is_plain = type(name) is str and name not in ("", ".", "..") and "/" not in name and "\0" not in name
    if not is_plain or not _fits(name):
        raise ProtocolError(f"{where} names a file outside of its folder, {_brief(name)}")
    return str(name)


def _fits(name: str) -> bool:
    try:
        return len(name.encode(errors="surrogateescape")) <= _LONGEST
    except UnicodeEncodeError:
        return False


def _brief(name: Any) -> str:
    return repr(name[:200]) if isinstance(name, str) else f"a {type(name).__name__}"
