"""The file by which tools find a checkpoint of torch's writer, for folders that ``FileWriter`` has written.

torchtitan, torchtune and others take a folder for a checkpoint only if it has a ``.metadata``, torch's index, and
start from scratch otherwise. ``FileWriter`` leaves one that holds a sentence instead of an index.

torch's readers unpickle it. ``L`` is the instruction of pickles for a number in decimal digits, so unpickling the
sentence behind it executes nothing and raises ``ValueError``, with the sentence in its message.
"""

from __future__ import annotations

import os
import stat

from ..errors import IncompleteCheckpoint, message_of, name_of, named
from ..storage.objects.place import ObjectPlace
from ..storage.places import AnyPlace
from ..storage.stores import Stat
from ..storage.whole_files import open_at_once, sync_folder, write_whole

#: The name of torch's index of all ranks.
NAME = ".metadata"
#: Every version of the sentence begins with this.
_BEGINS = b"L This folder holds a checkpoint of tensorferry"
#: Python shows the first 200 characters of it.
_TEXT = _BEGINS + b", not one of torch's: load it with tensorferry.dcp.FileReader\n"
#: Readers that do not know the marker refuse an index that is not newer than torch's; file systems have clocks of up
#: to two seconds.
_OLDER_NS = 4_000_000_000


def may_be_marker(about: Stat) -> bool:
    """Whether a file has the length of a marker, which an index of torch's has not."""
    return about.st_size == len(_TEXT)


def is_marker(path: AnyPlace) -> bool:
    """Whether the file at ``path`` is a marker, and not an index of torch's; no if a file cannot be read.

    Raises:
        TensorferryError: a store does not answer, or refuses
    """
    if isinstance(path, ObjectPlace):
        try:
            return path.opened().begins_with(_BEGINS)
        except IncompleteCheckpoint:
            return False
    try:
        with open_at_once(path) as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(len(_BEGINS)) == _BEGINS
    except OSError:
        return False


def leave(index: AnyPlace, save_id: str) -> None:
    """Puts the marker beside ``index``, which is complete, in the place of torch's index if there is one.

    Args:
        index: the path of the index
        save_id: the unique id of the save, for the name of the file while it is incomplete

    Raises:
        SystemRefused: it cannot be written
        TensorferryError: the store does not answer, or refuses
    """
    path = index.parent / NAME
    partial = index.parent / f"{NAME}.{save_id}.partial"
    try:
        write_whole(path, _TEXT, partial, modified_ns=index.stat().st_mtime_ns - _OLDER_NS)
        sync_folder(index.parent)
    except OSError as e:
        text = (
            f"{path} cannot be written: {message_of(e)}. The checkpoint is complete, but tools look for {NAME} and "
            "will not find it"
        )
        raise named(name_of(e), text) from e
