"""What an argument of the command line names: running peers, a file or a folder, and of which kind."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .._native import _file_entries
from ..dcp import marker
from ..errors import IncompleteCheckpoint, InvalidArgument, ProtocolError, SystemRefused, TensorferryError
from ..storage import reserved
from ..storage.folder import INDEX
from .sources import is_metadata

#: The files by which checkpoints of others are recognised.
_MEGATRON, _RANK_FILE = "metadata.json", "checkpoint_0.pt"
#: The index of a model in several files, as Hugging Face's programs write it.
HF_INDEX = "model.safetensors.index.json"


class Kind(Enum):
    """What there is."""

    PEERS = "peers"
    CONTAINER = "safetensors file"
    ARCHIVE = "torch.save file"
    CHECKPOINT = "checkpointer's folder"
    DISTRIBUTED = "distributed checkpoint"
    TORCH_DISTRIBUTED = "distributed checkpoint of torch"
    MEGATRON = "checkpoint of Megatron"


@dataclass(frozen=True)
class Place:
    """A checkpoint that the command line names.

    Attributes:
        kind: what it is
        text: as it was given
    """

    kind: Kind
    text: str

    @property
    def path(self) -> Path:
        """The file or the folder."""
        return Path(self.text)

    @property
    def layout(self) -> Kind:
        """How its files are laid out: those of most of Megatron's backends are a distributed checkpoint's."""
        if self.kind is Kind.MEGATRON and (self.path / INDEX).is_file():
            return Kind.DISTRIBUTED
        if self.kind is Kind.MEGATRON and (self.path / marker.NAME).is_file():
            return Kind.TORCH_DISTRIBUTED
        return self.kind


def find(text: str) -> Place:
    """Returns what ``text`` names.

    Raises:
        IncompleteCheckpoint: there is nothing, or a folder without a checkpoint
        ProtocolError: it is a file of another kind
        SystemRefused: it cannot be read
    """
    if is_metadata(text):
        return Place(Kind.PEERS, text)
    if not text or "\0" in text:
        raise InvalidArgument("a path must not be empty, and must not have NUL characters")
    path = Path(text)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return Place(_kind_of_folder(path), text)
        if not stat.S_ISREG(mode):
            raise ProtocolError(f"{path} is neither a file nor a folder")
        with path.open("rb") as file:
            head = file.read(4)
    except IncompleteCheckpoint:  # It is a FileNotFoundError as well.
        raise
    except FileNotFoundError:
        raise IncompleteCheckpoint(f"{path}: there is no such file or folder") from None
    except OSError as e:
        raise SystemRefused(e.errno, f"{path}: cannot be read: {e.strerror}") from e
    return Place(Kind.ARCHIVE if head == b"PK\x03\x04" else Kind.CONTAINER, text)


def _kind_of_folder(folder: Path) -> Kind:
    index = folder / INDEX
    # Megatron's folders hold one of the others.
    if (folder / _MEGATRON).is_file():
        return Kind.MEGATRON
    if index.is_file():
        checkpoint, distributed = _file_entries(index, [reserved.CHECKPOINT, reserved.INDEX])
        if checkpoint is not None:
            return Kind.CHECKPOINT
        if distributed is not None:
            return Kind.DISTRIBUTED
        raise ProtocolError(f"{index} is not an index: it has neither {reserved.CHECKPOINT} nor {reserved.INDEX}")
    torch_index = folder / marker.NAME
    if torch_index.is_file() and not marker.is_marker(torch_index):
        return Kind.TORCH_DISTRIBUTED
    if (folder / _RANK_FILE).is_file():
        raise InvalidArgument(f"{folder} is a folder of torch's own checkpointer: name the file of a rank in it")
    raise IncompleteCheckpoint(f"{folder} holds no checkpoint: it has neither {INDEX} nor {marker.NAME}")


def checkpoint_that_was_not_pulled(folder: Path) -> str | None:
    """Returns the name of a file that belongs to a checkpoint in ``folder`` which no pull has written."""
    from ..storage import commits
    from ..storage.download import was_pulled

    torch_index = folder / marker.NAME
    for path in (folder / _MEGATRON, folder / _RANK_FILE, folder / HF_INDEX):
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
