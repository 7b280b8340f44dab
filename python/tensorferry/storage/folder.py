"""The folder of a checkpoint that a checkpointer writes: a state container for each rank, and an index.

What is where, in a checkpoint of ``N`` ranks:

    rank00000-<id>.safetensors          the state of rank 0, as ``HTTPTransport`` would serve it, with checksums
    ...                                 up to rank N - 1
    index.safetensors                   written last, by a rename: it makes the folder a checkpoint

``<id>`` is the machine's id and the save's (``names.new_id``, ``storage/commits.py`` says why). The index has two
entries: ``INDEX_FILES``, the commit with name and checksum of each file, and ``CHECKPOINT``, JSON with

    version      of this entry
    save         the id of the save, 12 hexadecimal digits, the same on all ranks
    files        the name of each rank's file, by rank
    shards       for each path of the state at which some rank has a DTensor or a ShardedTensor: the global shape, the
                 dtype, and for each part of it the fields of its manifest (docs/reference/format.md), with ``rank``
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._native import _file_entries
from ..errors import IncompleteCheckpoint, ProtocolError, SystemRefused, TensorferryError
from . import commits, reserved
from .commits import Commit
from .names import BEGINNINGS, is_ours
from .places import AnyPlace
from .stores import store_of
from .whole_files import listed, missing

#: The file that makes a folder a checkpoint.
INDEX = "index.safetensors"
_VERSION = 1
#: The ``__metadata__`` of the files, besides that of every container.
ABOUT = (("tensorferry.checkpoint", "1"),)


@dataclass(frozen=True)
class Index:
    """What the index of a checkpoint says.

    Attributes:
        save_id: the id of the save
        commit: its files without their ranks, when the save began, its lineage and its step
        world_size: how many ranks have saved
        files: by rank the name of its file and the checksum of that file's header
        shards: by path where the parts of a DTensor lie
    """

    save_id: str
    commit: Commit
    world_size: int
    files: dict[int, tuple[str, int]]
    shards: dict[str, Any]

    @property
    def began(self) -> int:
        """When the save began, in nanoseconds since the epoch."""
        return self.commit.began

    @property
    def step(self) -> int | None:
        """The number that the caller gave the state."""
        return self.commit.step


def read_index(folder: AnyPlace) -> Index:
    """Reads the index of the checkpoint in ``folder``.

    Raises:
        IncompleteCheckpoint: there is none
        ProtocolError: the index is not valid, or that of another kind of checkpoint
        CorruptCheckpoint: it does not match its checksums
        SystemRefused: it cannot be read
        TensorferryError: a store does not answer, or refuses
    """
    path, store = folder / INDEX, store_of(folder)
    opened, _ = store.open(INDEX)
    if opened is None:
        raise _no_index(folder)
    try:
        # From one file, which a save may be about to replace.
        text, names_and_headers = _file_entries(opened, [reserved.CHECKPOINT, reserved.INDEX_FILES])
    except SystemRefused as e:
        if store.stat(INDEX) is not None:
            raise
        raise _no_index(folder) from e
    if text is None:
        raise ProtocolError(
            f"{path} is not the index of a checkpointer's save. A checkpoint of torch.distributed.checkpoint is loaded "
            f"with tensorferry.dcp.FileReader, and `tensorferry convert {folder} NEW --to checkpoint` makes a "
            "checkpointer's of it"
        )
    commit = commits.decode(path, names_and_headers)
    try:
        fields = json.loads(text)
        if fields["version"] != _VERSION:
            raise ProtocolError(
                f"{path} has version {str(fields['version'])[:20]}, not {_VERSION}: upgrade tensorferry"
            )
        names, shards = fields["files"], fields["shards"]
        if not isinstance(shards, dict) or not isinstance(names, list):
            raise ValueError("a field of it has another type")
        files = {rank: (name, commit.files[name]) for rank, name in enumerate(names)}
        if not files or set(commit.files) != {name for name, _ in files.values()} or len(commit.files) != len(files):
            raise ValueError("its two lists of files differ")
        return Index(str(fields["save"]), commit, len(files), files, shards)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        if isinstance(e, TensorferryError):
            raise
        raise ProtocolError(f"{path}: its index cannot be read ({type(e).__name__}: {e})") from e


def is_of_other_program(folder: AnyPlace) -> bool:
    """Whether the file that has the name of an index is whole, and another program's or ``FileWriter``'s.

    Raises:
        TensorferryError: a store does not answer, or refuses
    """
    try:
        return _file_entries(folder / INDEX, [reserved.CHECKPOINT])[0] is None
    except TensorferryError as e:
        if not isinstance(folder, Path) and commits.says_nothing(e):
            raise
        return False


def missing_files(folder: AnyPlace, index: Index) -> list[str]:
    """Returns the names of files of the checkpoint in ``folder`` that are not there.

    Raises:
        SystemRefused: the system does not say whether one is
        TensorferryError: a store does not answer, or refuses
    """
    return missing(folder, [name for name, _ in index.files.values()])


def unfinished(folder: AnyPlace) -> IncompleteCheckpoint | None:
    """Returns the error for a folder with files of a save, which has no index; ``None`` if it has one or no such file.

    ``None`` as well if the folder cannot be listed.
    """
    try:
        left = sorted(name for name in listed(folder, *BEGINNINGS) if is_ours(name))
    except TensorferryError:
        return None
    if not left or INDEX in left:
        return None
    return IncompleteCheckpoint(
        f"{folder} holds an incomplete checkpoint: the save that wrote {left[0]} ended before it wrote {INDEX}, or has "
        "not finished. Load an earlier checkpoint"
    )


def _no_index(folder: AnyPlace) -> IncompleteCheckpoint:
    return IncompleteCheckpoint(f"{folder} holds no complete checkpoint: it has no {INDEX}{_left_in(folder)}")


def _left_in(folder: AnyPlace) -> str:
    """Returns the end of a message that there is no checkpoint in ``folder``: what is there instead."""
    try:
        names = listed(folder, *BEGINNINGS)
    except TensorferryError as e:
        cause = e.__cause__
        return f" ({cause.strerror if isinstance(cause, OSError) and cause.strerror else e})"
    if INDEX in names:
        return " that is a file"
    count = sum(1 for name in names if is_ours(name))
    return f", only files of saves that have not finished ({count})" if count else ""


def committed_save(folder: AnyPlace) -> str | None:
    """Returns the id of the save that the index of ``folder`` belongs to; ``None`` without a valid index.

    Raises:
        TensorferryError: see :func:`commits.says_nothing`
    """
    try:
        return read_index(folder).save_id
    except TensorferryError as e:
        if commits.says_nothing(e):
            raise
        return None


def encode_index(save_id: str, files: list[str], shards: dict[str, Any]) -> bytes:
    """Returns the bytes of the index's entry ``CHECKPOINT``; ``shards`` is as ``spread.spread_tensors`` returns it."""
    fields = {"version": _VERSION, "save": save_id, "files": files, "shards": shards}
    return json.dumps(fields, separators=(",", ":")).encode()
