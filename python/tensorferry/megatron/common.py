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
import secrets
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from ..errors import ProtocolError, TensorferryError
from ..storage import commits, whole_files
from ..storage.objects.place import ObjectPlace
from ..storage.places import AnyPlace
from .release import COMMON_STATE_FNAME, CONFIG_FNAME, CheckpointingConfig, CheckpointingException


def encoded(state: Any) -> bytes:
    """Returns an object as ``torch.save`` writes it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def read(folder: AnyPlace) -> bytes | None:
    """Returns the bytes of ``common.pt``; ``None`` if there is none.

    Raises:
        CheckpointingException, TensorferryError: as for :func:`read_whole`
    """
    try:
        return read_whole(folder / COMMON_STATE_FNAME)
    except FileNotFoundError:
        return None


def read_whole(path: AnyPlace, most: int | None = None) -> bytes:
    """Returns the content of a file or object of at most ``most`` bytes, or as many as there is memory for.

    Raises:
        FileNotFoundError: there is no such file
        CheckpointingException: it is not a regular file, is longer, or cannot be read
        SystemRefused: it is longer than the memory that this process can have
        TensorferryError: a store does not answer, or refuses
    """
    try:
        return whole_files.read_whole(path, most)
    except ProtocolError as e:
        raise CheckpointingException(f"{e}: this is not a checkpoint of Megatron's") from e
    except FileNotFoundError:
        raise
    except OSError as e:
        if isinstance(e, TensorferryError):
            raise
        raise CheckpointingException(f"{path} cannot be read: {e}") from e


def config(folder: AnyPlace) -> CheckpointingConfig:
    """Returns what ``metadata.json`` says: the backend of a checkpoint and the version of its format.

    Raises:
        CheckpointingException: there is no such folder or file, or it cannot be read
        TensorferryError: a store does not answer, or refuses
    """
    if isinstance(folder, Path) and not folder.is_dir():
        raise CheckpointingException(f"Checkpoint directory {folder} does not exist")
    try:
        found = json.loads(read_whole(folder / CONFIG_FNAME, whole_files.FEW))
        # Earlier releases wrote more than later ones know.
        known = {field.name for field in fields(CheckpointingConfig)}
        return CheckpointingConfig(**{name: value for name, value in found.items() if name in known})
    except FileNotFoundError:
        raise CheckpointingException(
            f"{folder} is not a distributed checkpoint: it has no metadata.json, which a save writes last. The save "
            "was interrupted, or this is not the folder: load another checkpoint"
        ) from None
    except CheckpointingException:
        raise
    except Exception as e:
        if isinstance(folder, ObjectPlace) and isinstance(e, TensorferryError) and commits.says_nothing(e):
            raise
        raise CheckpointingException(
            f"{folder}/metadata.json cannot be read ({type(e).__name__}: {str(e)[:300]}). If a save of tensorferry's "
            "into this folder was killed, tensorferry.megatron.restore_common(folder) writes it anew; else load "
            "another checkpoint"
        ) from e


def write(folder: AnyPlace, data: bytes) -> None:
    """Writes ``common.pt``, unless it has this content already.

    Raises:
        CheckpointingException, TensorferryError: what is there cannot be read, as for :func:`read_whole`
        OSError: it cannot be written; the old one is still there
    """
    if read(folder) != data:
        _replace(folder / COMMON_STATE_FNAME, data)


def mark(folder: AnyPlace, backend: str, version: int) -> None:
    """Writes ``metadata.json``, which makes a folder, or a place in a store, a checkpoint for Megatron.

    Raises:
        OSError: it cannot be written; the old one is still there
        TensorferryError: a store does not answer, or refuses
    """
    _replace(folder / CONFIG_FNAME, json.dumps(asdict(CheckpointingConfig(backend, version))).encode())


def _replace(path: AnyPlace, data: bytes) -> None:
    whole_files.write_whole(path, data, path.with_name(f"{path.name}.{secrets.token_hex(6)}.partial"))
