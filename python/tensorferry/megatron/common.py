"""The common part of a state, which is the same on all ranks: ``common.pt``, and a copy of it inside the checkpoint.

Every release reads ``common.pt`` by itself. Releases before 0.19 write it themselves as well, before they call the
strategy, over the one that is there. So a save into a folder that has a checkpoint, if it is killed, leaves the tensors
of the old checkpoint beside the common state of the new one. The copy shows that, and :func:`restore` mends it.
"""

from __future__ import annotations

import io
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from .release import COMMON_STATE_FNAME


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
    """Writes ``common.pt``, which is either the old or the new one at any moment."""
    if read(folder) == data:
        return
    partial = folder / f"{COMMON_STATE_FNAME}.{secrets.token_hex(6)}.partial"
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / COMMON_STATE_FNAME)
    finally:
        partial.unlink(missing_ok=True)
