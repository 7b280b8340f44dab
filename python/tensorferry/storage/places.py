"""The place that a path names, which users give as text: the same one for whoever writes there and whoever reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .. import _validate
from ..errors import InvalidArgument, SystemRefused


def place_of(path: Any, name: str = "path") -> Path:
    """Returns the absolute path of the file or folder that ``path`` names now, as the system would find it.

    A relative path is one in the current folder, and links on the way are followed before a ``..`` behind them leads up
    again. The result has neither, so that it names the same place in another process, after ``chdir``, and when a link
    on the way leads elsewhere. If the last name in ``path`` is a link, it stays; ``~`` is a name like any other.

    Args:
        path: a string or a path object
        name: the name of the argument, for messages

    Raises:
        InvalidArgument: it does not name a file or folder of this machine
        SystemRefused: it is relative, and the current folder is gone
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or not _is_file_name(text):
        raise InvalidArgument(f"{name} must be the path of a folder, not {_validate.brief(path)}")
    if "://" in text:
        raise InvalidArgument(
            f"{_validate.brief(path)} is not a folder of this machine: checkpoints are written to file systems only"
        )
    above, last = os.path.split(text.rstrip("/") or "/")
    try:
        if last in ("", ".", ".."):
            return Path(os.path.realpath(text))
        return Path(os.path.realpath(above), last)
    except OSError as e:
        raise SystemRefused(e.errno, f"{text} cannot be found from the current folder: {e.strerror}") from e


def _is_file_name(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
