"""What an argument of the command line names: running peers, a file or a folder, and of which kind."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from .._native import _file_entries
from ..dcp import marker
from ..errors import IncompleteCheckpoint, InvalidArgument, ProtocolError, StoreRefused, SystemRefused, TensorferryError
from ..storage import commits, foreign, reserved
from ..storage.folder import INDEX, unfinished
from ..storage.objects.answers import is_forbidden
from ..storage.objects.place import ObjectPlace
from ..storage.places import AnyPlace, any_place, is_store_url
from ..storage.settled import ATTEMPTS, read_settled
from ..storage.whole_files import FEW, is_file, read_whole, subfolders
from .peers import is_metadata

#: The files by which checkpoints of others are recognised.
_MEGATRON, _RANK_FILE = "metadata.json", "checkpoint_0.pt"
#: The files of which each checkpoint in a folder has one, but for those of Megatron's zarr.
_SIGNS = (INDEX, marker.NAME, _RANK_FILE, foreign.MODEL_INDEX)
#: How the names of files end that hold a state.
FILES = (".safetensors", ".pt", ".pth")
#: How many other folders are named for one without a checkpoint.
_NAMED = 8

_T = TypeVar("_T")


class CheckpointKind(Enum):
    """What there is."""

    PEERS = "peers"
    CONTAINER = "safetensors file"
    ARCHIVE = "torch.save file"
    CHECKPOINT = "checkpointer's folder"
    DISTRIBUTED = "distributed checkpoint"
    TORCH_DISTRIBUTED = "distributed checkpoint of torch"
    MEGATRON = "checkpoint of Megatron"
    SHARDS = "model in several safetensors files"


@dataclass(frozen=True)
class Place:
    """A checkpoint that the command line names.

    Attributes:
        kind: what it is
        text: as it was given
    """

    kind: CheckpointKind
    text: str

    @property
    def path(self) -> Any:
        """The file or the folder, or its place in an object store."""
        return any_place(self.text) if is_store_url(self.text) else Path(self.text)

    @property
    def layout(self) -> CheckpointKind:
        """How its files are laid out: those of most of Megatron's backends are a distributed checkpoint's."""
        if self.kind is CheckpointKind.MEGATRON and is_file(self.path / INDEX):
            return CheckpointKind.DISTRIBUTED
        if self.kind is CheckpointKind.MEGATRON and (self.path / marker.NAME).is_file():
            return CheckpointKind.TORCH_DISTRIBUTED
        return self.kind


def find(text: str) -> Place:
    """Returns what ``text`` names.

    Raises:
        IncompleteCheckpoint: there is nothing, or a folder without a checkpoint
        ProtocolError: it is a file of another kind, or a folder whose index is none
        CorruptCheckpoint: the index in the folder is damaged
        InvalidArgument: it is no path, or the folder of torch's own checkpointer
        SystemRefused: it cannot be read
        TensorferryError: the store does not answer, or refuses
    """
    if is_metadata(text):
        return Place(CheckpointKind.PEERS, text)
    if not text or "\0" in text:
        raise InvalidArgument("a path must not be empty, and must not have NUL characters")
    path = any_place(text) if is_store_url(text) else Path(text)
    is_archive = _is_archive_in_store(path) if isinstance(path, ObjectPlace) else _is_archive(path)
    if is_archive is None:
        return Place(_kind_of_folder(path), text)
    if path.name == foreign.MODEL_INDEX:
        return Place(CheckpointKind.SHARDS, str(path.parent))
    return Place(CheckpointKind.ARCHIVE if is_archive else CheckpointKind.CONTAINER, text)


def _is_archive(path: Path) -> bool | None:
    """Whether a file is an archive of torch's; ``None`` for a folder; raises as :func:`find`."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise IncompleteCheckpoint(f"{path}: there is no such file or folder") from None
    except OSError as e:
        raise SystemRefused(e.errno, f"{path}: cannot be read: {e.strerror}") from e
    if stat.S_ISDIR(mode):
        return None
    if not stat.S_ISREG(mode):
        raise ProtocolError(f"{path} is neither a file nor a folder")
    return path.name != foreign.MODEL_INDEX and foreign.is_archive(path)


def _is_archive_in_store(place: ObjectPlace) -> bool | None:
    """As :func:`_is_archive`, in a store."""
    try:
        opened = place.opened() if place.may_be_file else None
    except IncompleteCheckpoint:
        opened = None
    if opened is None:
        return None
    return place.name != foreign.MODEL_INDEX and foreign.is_archive(place, opened.head(foreign.HEAD))


def settled(read: Callable[[], _T], *texts: str, attempts: int = ATTEMPTS, still: bool = False) -> _T:
    """Reads what ``texts`` name; as :func:`read_settled`, called for those that are paths or URLs; raises as it."""
    paths = [
        any_place(text) if is_store_url(text) else Path(text)
        for text in texts
        if text and "\0" not in text and not is_metadata(text)
    ]
    return read_settled(read, *paths, attempts=attempts, still=still) if paths else read()


def _kind_of_folder(folder: AnyPlace) -> CheckpointKind:
    """Returns what kind of checkpoint a folder holds, by the index in it; raises as :func:`find`."""
    index, refused = folder / INDEX, []

    def has(name: str) -> bool:
        # Without the permission to list, stores answer that something is not permitted where nothing is.
        try:
            return is_file(folder / name)
        except StoreRefused as e:
            if not is_forbidden(e):
                raise
            refused.append(e)
            return False

    kind = None
    if has(INDEX):
        if _file_entries(index, [reserved.CHECKPOINT])[0] is not None:
            return CheckpointKind.CHECKPOINT
        commits.read(index)
        kind = CheckpointKind.DISTRIBUTED
    elif has(marker.NAME) and not marker.is_marker(folder / marker.NAME):
        kind = CheckpointKind.TORCH_DISTRIBUTED
    # Megatron's folders hold one of these two, or arrays of zarr.
    if has(_MEGATRON) and _is_of_megatron(folder / _MEGATRON):
        return CheckpointKind.MEGATRON
    if kind is not None:
        return kind
    if has(foreign.MODEL_INDEX):
        return CheckpointKind.SHARDS
    if has(_RANK_FILE):
        raise InvalidArgument(f"{folder} is a folder of torch's own checkpointer: name the file of a rank in it")
    if refused:
        raise refused[0]
    if (left := unfinished(folder)) is not None:
        raise left
    foreign.refuse_folder_of_parts(folder)
    held = _checkpoints_in(folder)
    more = f" and {len(held) - _NAMED} more" if len(held) > _NAMED else ""
    there = f". Name one of what is in it: {', '.join(held[:_NAMED])}{more}" if held else ""
    raise IncompleteCheckpoint(f"{folder} holds no checkpoint: it has neither {INDEX} nor {marker.NAME}{there}")


def has_signs(folder: AnyPlace) -> bool:
    """Whether a folder has a file by which a checkpoint is recognised."""
    return any(is_file(folder / name) for name in _SIGNS) or _holds_megatron(folder)


def _holds_megatron(folder: AnyPlace) -> bool:
    return is_file(folder / _MEGATRON) and _is_of_megatron(folder / _MEGATRON)


def _is_of_megatron(path: AnyPlace) -> bool:
    """Whether a ``metadata.json`` is Megatron's: other programs write files of that name as well.

    Raises:
        TensorferryError: it cannot be read
    """
    try:
        found = json.loads(read_whole(path, FEW))
    except (ValueError, RecursionError):  # `ProtocolError`, of one that is too long, is a `ValueError`.
        return False
    except OSError as e:
        if isinstance(e, TensorferryError):
            raise
        raise SystemRefused(e.errno, f"{path}: cannot be read: {e.strerror}") from e
    return isinstance(found, dict) and isinstance(found.get("sharded_backend"), str)


def _checkpoints_in(folder: AnyPlace) -> list[str]:
    """Returns the names of the checkpoints in a folder; in a store, of all folders."""
    if isinstance(folder, ObjectPlace):
        return sorted(subfolders(folder), reverse=True)
    try:
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
        return sorted((name for name in names if name.endswith(FILES) or has_signs(folder / name)), reverse=True)
    except OSError:
        return []


def checkpoint_that_was_not_pulled(folder: Path) -> str | None:
    """Returns the name of a file that belongs to a checkpoint in ``folder`` which no pull has written.

    ``None`` if there is no such checkpoint.
    """
    from ..storage import commits
    from .download import was_pulled

    torch_index = folder / marker.NAME
    if _holds_megatron(folder):
        return _MEGATRON
    for path in (folder / _RANK_FILE, folder / foreign.MODEL_INDEX):
        if os.path.lexists(path):
            return path.name
    if os.path.lexists(torch_index) and not marker.is_marker(torch_index):
        return torch_index.name
    if not os.path.lexists(folder / INDEX):
        return None
    try:
        files = commits.files_of(folder / INDEX).files
    except TensorferryError:
        return INDEX
    return next((name for name in files if not was_pulled(folder / name)), None if files else INDEX)
