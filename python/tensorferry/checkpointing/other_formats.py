"""Checkpoints of other formats, which a checkpointer does not load: who comes from one is told how to convert it."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from .._native import _file_entries
from ..errors import ProtocolError, TensorferryError
from ..storage import foreign, reserved
from ..storage.folder import INDEX
from ..storage.places import AnyPlace
from ..storage.whole_files import is_file, listed

logger = logging.getLogger("tensorferry")

#: The index of torch's own distributed checkpoint, of all ranks or of one; a pickle, unlike the marker of `FileWriter`.
_TORCH_INDEX = re.compile(r"(__\d+)?\.metadata")
_PICKLE = b"\x80"
#: A rank's file of torch's own `CheckpointWriter`.
_RANK_FILE = re.compile(r"checkpoint_\d+\.pt")
#: How many folders a line of the log names.
_NAMED = 8


def refuse(folder: AnyPlace) -> None:
    """Refuses a folder without an index of a checkpointer if it holds a distributed checkpoint of torch.

    Raises:
        ProtocolError: it does
        TensorferryError: it cannot be listed
    """
    if isinstance(folder, Path) and _holds_torch_dcp(folder):
        raise ProtocolError(
            f"{folder} holds a checkpoint of torch.distributed.checkpoint, not of a checkpointer: "
            f"`tensorferry convert {folder} NEW --to checkpoint` makes one of it, and tensorferry.dcp.FileReader loads "
            "it as it is"
        )
    if not isinstance(folder, Path) or folder.is_dir():
        foreign.refuse_folder_of_parts(folder)


def log_passed_over(root: AnyPlace) -> None:
    """Logs which checkpoints of other formats a folder has, or those directly in it; it raises nothing."""
    if not isinstance(root, Path):
        return
    try:
        folders = [root, *(root / name for name in listed(root))] if os.path.isdir(root) else []
    except TensorferryError:
        return
    found = [f"{folder} ({what})" for folder in folders if (what := _format_of(folder))]
    if not found:
        return
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    logger.warning(
        "no checkpoint of a checkpointer is in %s, and those of other formats are passed over: %s. "
        "`tensorferry convert OLD NEW --to checkpoint` makes one of a distributed checkpoint; load() takes the folder "
        "of torch's CheckpointWriter by its name",
        root,
        ", ".join(found[:_NAMED]) + more,
    )


def _format_of(folder: Path) -> str | None:
    """Returns which other format the checkpoint in ``folder`` has; ``None`` if there is none."""
    try:
        if is_file(folder / INDEX):
            own, distributed = _file_entries(folder / INDEX, [reserved.CHECKPOINT, reserved.INDEX])
            return "tensorferry.dcp.FileWriter" if own is None and distributed is not None else None
        if _holds_torch_dcp(folder):
            return "torch.distributed.checkpoint"
        return "torch's CheckpointWriter" if any(map(_RANK_FILE.fullmatch, listed(folder))) else None
    except TensorferryError:
        return None


def _holds_torch_dcp(folder: Path) -> bool:
    try:
        indexes = [name for name in os.listdir(folder) if _TORCH_INDEX.fullmatch(name)]
        return any(is_file(folder / name) and _is_pickle(folder / name) for name in indexes)
    except OSError:  # `SystemRefused` is one as well.
        return False


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == _PICKLE
