"""The files of a checkpoint that Megatron itself reads, ``common.pt`` and ``metadata.json``.

``common.pt`` is the part of a state that is the same on all ranks. A copy of it is inside the checkpoint.

Every release reads ``common.pt`` by itself. Releases before 0.19 write it themselves as well, before they call the
strategy, over the one that is there. So a save into a folder that has a checkpoint, if it is killed, leaves the tensors
of the old checkpoint beside the common state of the new one. A copy inside the checkpoint shows that, and the file can
be written anew from it. Megatron also empties ``metadata.json`` before it writes it; what is written here is either the
old or the new file at any moment.
"""

from __future__ import annotations

import io
import json
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .release import COMMON_STATE_FNAME, CONFIG_FNAME, CheckpointingConfig


def encoded(state: Any) -> bytes:
    """Returns an object as ``torch.save`` writes it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def read(folder: Path) -> bytes | None:
    """Returns the bytes of ``common.pt``; ``None`` if there is none."""
    try:
        data: bytes = (folder / COMMON_STATE_FNAME).read_bytes()
    except FileNotFoundError:
        return None
    return data


def write(folder: Path, data: bytes) -> None:
    """Writes ``common.pt``."""
    if read(folder) != data:
        _replace(folder / COMMON_STATE_FNAME, data)


def mark(folder: Path, backend: str, version: int) -> None:
    """Writes ``metadata.json``, which makes a folder a checkpoint for Megatron."""
    _replace(folder / CONFIG_FNAME, json.dumps(asdict(CheckpointingConfig(backend, version))).encode())


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f"{path.name}.{secrets.token_hex(6)}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
