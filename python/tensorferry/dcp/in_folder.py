"""What the writer and the reader of a folder have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from .. import _validate
from ..storage.places import AnyPlace, any_place, begun, is_store_url
from . import marker

#: The name of the index that torch's own writer writes for all ranks.
TORCH_INDEX = marker.NAME


def checked_threads(threads: int | None) -> int | None:
    """Returns ``threads`` after checking that it is a number of threads, or ``None``."""
    return None if threads is None else _validate.integer("threads", threads, 1)


class InFolder:
    """The ``checkpoint_id`` of a writer or reader: the path of a folder, or the URL of a place in an object store."""

    _path: AnyPlace
    _store_options: Mapping[str, Any] | None
    _timeout: timedelta | None

    def _place(self, path: Any) -> AnyPlace:
        """Returns the place of a user's argument."""
        return any_place(path, store_options=self._store_options, timeout=self._timeout)

    def _next(self, checkpoint_id: str | os.PathLike[str] | None) -> AnyPlace:
        """Returns the place of a save or load that begins now."""
        return begun(self._place(checkpoint_id) if checkpoint_id else self._path)

    @property
    def checkpoint_id(self) -> AnyPlace:
        """The checkpoint's folder, or its place in a store."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` can be a local folder, or is a place in an object store: another URL is neither."""
        return isinstance(checkpoint_id, os.PathLike) or "://" not in str(checkpoint_id) or is_store_url(checkpoint_id)
