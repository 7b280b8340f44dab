"""What the writer and the reader of a folder have in common."""

from __future__ import annotations

import os
from pathlib import Path

from .. import _validate
from . import marker

#: The index of a rank that saves without a coordinator.
RANK_INDEX = "index-rank{:05d}.safetensors"
#: The name of the index that torch's own writer writes for all ranks.
TORCH_INDEX = marker.NAME


def thread_count(threads: int | None) -> int | None:
    """Returns ``threads`` after checking that it is a number of threads, or ``None``."""
    return None if threads is None else _validate.integer("threads", threads, 1)


class InFolder:
    """The ``checkpoint_id`` of a writer or reader: the path of a folder."""

    _path: Path

    @property
    def checkpoint_id(self) -> Path:
        """The checkpoint's folder."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` can be a local folder: a URL cannot."""
        return isinstance(checkpoint_id, os.PathLike) or "://" not in str(checkpoint_id)
