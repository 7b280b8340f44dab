"""Small files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, data: bytes, partial: Path, *, synced: bool = True, modified_ns: int | None = None) -> None:
    """Writes ``data`` to ``partial`` and renames that to ``path``: readers find either all of it or what was there.

    Args:
        path: the file
        data: its content
        partial: its name while it is being written, in the same folder; a file of that name is replaced
        synced: waits until the content is on the disk before the rename; the rename itself may still be lost
        modified_ns: sets its time of modification, in nanoseconds

    Raises:
        OSError: it cannot be written; what ``path`` was is still there, and ``partial`` is removed
    """
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            if modified_ns is not None:
                os.utime(partial, ns=(modified_ns, modified_ns))
            if synced:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
