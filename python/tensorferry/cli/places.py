"""What an argument of the command line names: running peers, a file or a folder, and of which kind."""

from __future__ import annotations

import contextlib
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
from ..storage import reserved
from ..storage.folder import INDEX, unfinished
from ..storage.objects.place import ObjectPlace
from ..storage.places import AnyPlace, any_place, is_store_url
from ..storage.settled import ATTEMPTS, read_settled
from ..storage.whole_files import is_file
from .leaves import shards
from .sources import is_metadata

#: The files by which checkpoints of others are recognised.
_MEGATRON, _RANK_FILE = "metadata.json", "checkpoint_0.pt"
#: The files of which each checkpoint in a folder has one.
_SIGNS = (INDEX, marker.NAME, _MEGATRON, _RANK_FILE, shards.INDEX)
#: How the names of files end that hold a state.
FILES = (".safetensors", ".pt", ".pth")
#: How much of a file is looked at, and how torch wrote files before release 1.6.
_HEAD, _OLD_TORCH = 64, b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
#: The longest header of a safetensors file, and how many other folders are named for one without a checkpoint.
_LONGEST_HEADER, _NAMED = 100_000_000, 8

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
    if is_store_url(text):
        return _find_in_store(text)
    path = Path(text)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return Place(_kind_of_folder(path), text)
        if not stat.S_ISREG(mode):
            raise ProtocolError(f"{path} is neither a file nor a folder")
        if path.name == shards.INDEX:
            return Place(CheckpointKind.SHARDS, str(path.parent))
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except TensorferryError:  # Some are an OSError as well, and are whole as they are.
        raise
    except FileNotFoundError:
        raise IncompleteCheckpoint(f"{path}: there is no such file or folder") from None
    except OSError as e:
        raise SystemRefused(e.errno, f"{path}: cannot be read: {e.strerror}") from e
    return _file(path, head, text)


def _find_in_store(text: str) -> Place:
    """As :func:`find`, for a URL."""
    place = any_place(text)
    assert isinstance(place, ObjectPlace)
    try:
        opened = place.opened() if place.may_be_file else None
    except IncompleteCheckpoint:
        opened = None
    if opened is None:
        return Place(_kind_of_folder(place), text)
    if place.name == shards.INDEX:
        return Place(CheckpointKind.SHARDS, str(place.parent))
    return _file(place, opened.head(_HEAD), text)


def _file(path: AnyPlace, head: bytes, text: str) -> Place:
    """Returns what a file with this beginning is; raises as :func:`find`."""
    if head.startswith(b"PK\x03\x04"):
        return Place(CheckpointKind.ARCHIVE, text)
    if (what := _unlike_a_container(head)) is not None:
        raise ProtocolError(f"{path} is neither a safetensors nor a torch.save file: {what}")
    return Place(CheckpointKind.CONTAINER, text)


def settled(read: Callable[[], _T], *texts: str, attempts: int = ATTEMPTS, still: bool = False) -> _T:
    """Reads what ``texts`` name; as :func:`read_settled`, called for those that are paths or URLs; raises as it."""
    paths = [
        any_place(text) if is_store_url(text) else Path(text)
        for text in texts
        if text and "\0" not in text and not is_metadata(text)
    ]
    return read_settled(read, *paths, attempts=attempts, still=still) if paths else read()


def _unlike_a_container(head: bytes) -> str | None:
    """Returns what is wrong with the first bytes of a file that should be a safetensors file."""
    if not head:
        return "it is empty"
    if head.startswith(_OLD_TORCH):
        return "torch before release 1.6 has saved it, so load it with torch, and save it again"
    length = int.from_bytes(head[:8], "little")
    if len(head) > 8 and (length > _LONGEST_HEADER or head[8:9] != b"{"):
        return "it is text" if _is_text(head) else f"it begins with the bytes {head[:8].hex(' ')}"
    return None


def _is_text(head: bytes) -> bool:
    return all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head)


class _Looks:
    """Looks for the files of a folder. In a store, one that may not be seen may be missing.

    Without the permission to list, stores answer that something is not permitted where nothing is. So the refusal is
    an error only if nothing else is found.
    """

    def __init__(self, folder: AnyPlace) -> None:
        self._folder = folder
        self._refused: StoreRefused | None = None

    def has(self, name: str) -> bool:
        """Whether the file ``name`` is seen."""
        try:
            return is_file(self._folder / name)
        except StoreRefused as e:
            self._refused = self._refused or e
            return False

    def check(self) -> None:
        """Raises the first refusal."""
        if self._refused is not None:
            raise self._refused


def _kind_of_folder(folder: AnyPlace) -> CheckpointKind:
    """Returns what kind of checkpoint a folder holds, by the index in it; raises as :func:`find`."""
    index, looks = folder / INDEX, _Looks(folder)
    # Megatron's folders hold one of the others.
    if looks.has(_MEGATRON):
        return CheckpointKind.MEGATRON
    if looks.has(INDEX):
        checkpoint, distributed = _file_entries(index, [reserved.CHECKPOINT, reserved.INDEX])
        if checkpoint is not None:
            return CheckpointKind.CHECKPOINT
        if distributed is not None:
            return CheckpointKind.DISTRIBUTED
        raise ProtocolError(f"{index} is not an index: it has neither {reserved.CHECKPOINT} nor {reserved.INDEX}")
    torch_index = folder / marker.NAME
    if looks.has(marker.NAME) and not marker.is_marker(torch_index):
        return CheckpointKind.TORCH_DISTRIBUTED
    if looks.has(shards.INDEX):
        return CheckpointKind.SHARDS
    if looks.has(_RANK_FILE):
        raise InvalidArgument(f"{folder} is a folder of torch's own checkpointer: name the file of a rank in it")
    looks.check()
    if (left := unfinished(folder)) is not None:
        raise left
    held = _checkpoints_in(folder)
    more = f" and {len(held) - _NAMED} more" if len(held) > _NAMED else ""
    there = f". Name one of what is in it: {', '.join(held[:_NAMED])}{more}" if held else ""
    raise IncompleteCheckpoint(f"{folder} holds no checkpoint: it has neither {INDEX} nor {marker.NAME}{there}")


def has_signs(folder: AnyPlace) -> bool:
    """Whether a folder has a file by which a checkpoint is recognised."""
    return any(is_file(folder / name) for name in _SIGNS)


def kind_of_file(path: Path) -> str:
    """Returns what a file is called that holds a state; empty if it is another one, or cannot be read."""
    try:
        return find(str(path)).kind.value
    except TensorferryError:
        return ""


def _checkpoints_in(folder: AnyPlace) -> list[str]:
    """Returns the names of the checkpoints in a folder, the latest first; in a store, of all folders, by name."""
    if isinstance(folder, ObjectPlace):
        return sorted(folder.folders(), reverse=True)
    found: list[tuple[float, str]] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                is_one = (
                    has_signs(Path(entry.path)) if entry.is_dir() else entry.is_file() and entry.name.endswith(FILES)
                )
                if is_one and not entry.name.startswith("."):
                    found.append((entry.stat().st_mtime, entry.name))
    return [name for _, name in sorted(found, reverse=True)]


def checkpoint_that_was_not_pulled(folder: Path) -> str | None:
    """Returns the name of a file that belongs to a checkpoint in ``folder`` which no pull has written.

    ``None`` if there is no such checkpoint.
    """
    from ..storage import commits
    from ..storage.download import was_pulled

    torch_index = folder / marker.NAME
    for path in (folder / _MEGATRON, folder / _RANK_FILE, folder / shards.INDEX):
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
