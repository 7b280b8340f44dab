"""Small files that are there whole or not at all, and folders whose entries are on the disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, data: bytes, partial: Path, *, synced: bool = True, modified_ns: int | None = None) -> None:
    """Writes ``data`` to ``partial`` and renames that to ``path``: readers find either all of it or what was there.

    Args:
        path: the file
        data: its content
        partial: its name while it is being written, in the same folder; a file or link of that name is replaced
        synced: waits until the content is on the disk before the rename; the rename itself may still be lost
        modified_ns: sets its time of modification, in nanoseconds

    Raises:
        OSError: it cannot be written; what ``path`` was is still there, and ``partial`` is removed
    """
    partial.unlink(missing_ok=True)
    try:
        # Exclusively: what a link of that name leads to is not written.
        with partial.open("xb") as file:
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


def sync_folder(folder: Path) -> None:
    """Syncs the entries of ``folder`` to the disk.

    Raises:
        OSError: the system refuses
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
