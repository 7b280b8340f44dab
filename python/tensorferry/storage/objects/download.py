"""Copies of objects in files, for what reads files only."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...errors import SystemRefused
from .place import ObjectPlace


def download_file(source: ObjectPlace, target: Path) -> int:
    """Copies an object into a new file, whose bytes are on the disk then; returns its length.

    The entry in its folder is not synced. After an error, what was made of the file stays.

    Raises:
        SystemRefused: the file cannot be written, or is there already
        TensorferryError: the object cannot be read
    """
    opened = source.opened()
    try:
        with target.open("x+b") as file:
            if opened.nbytes:
                # A full disk is told before anything is read.
                os.posix_fallocate(file.fileno(), 0, opened.nbytes)
            for (at, _, _), data in opened.pieces([(0, 0, opened.nbytes)]):
                file.seek(at)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        if isinstance(e, SystemRefused) or e.errno is None:
            raise
        raise SystemRefused(e.errno, f"{target}: cannot be written: {e.strerror}") from e
    return opened.nbytes


@contextlib.contextmanager
def local_file(source: ObjectPlace) -> Iterator[Path]:
    """Yields a copy of an object in a folder for temporary files for as long as the block runs.

    Raises:
        SystemRefused, TensorferryError: as for :func:`download_file`
        OSError: the folder cannot be made
    """
    with tempfile.TemporaryDirectory(prefix="tensorferry-") as folder:
        copied = Path(folder) / source.name
        download_file(source, copied)
        yield copied
