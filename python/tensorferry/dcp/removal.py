"""Removes keys from a checkpoint in a folder or an object store."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..pickles.allowlist import Allowed
from ..storage import commits
from ..storage.folder import INDEX
from ..storage.places import AnyPlace
from . import index
from .save_plan import ABOUT


def remove_keys(folder: AnyPlace, prefix: str, allowed: Allowed) -> None:
    """Replaces the index by one without the keys that begin with ``prefix``, and removes files that it needs no more.

    What torch's planner has stored in the index goes, too. It may be called while saves into the folder run: what they
    commit stays, and loses these keys only if it was committed before the removal.

    Args:
        folder: the checkpoint
        prefix: the beginning of the keys
        allowed: the globals that the planner's data in the index may name

    Raises:
        SourceChanged: saves have replaced the index again and again
        TensorferryError: the index cannot be read or written
    """

    def without_prefix(text: bytes) -> tuple[bytes, Collection[str]]:
        metadata = index.decode(text, str(folder / INDEX), allowed)
        state: dict[str, Any] = metadata.state_dict_metadata
        kept = {key: about for key, about in state.items() if not key.startswith(prefix)}
        stored = {at: ref for at, ref in metadata.storage_data.items() if at.fqn in kept}
        metadata.state_dict_metadata, metadata.planner_data = kept, None
        return index.encode(metadata, stored), {ref.container for ref in stored.values()}

    commits.edit_index(folder / INDEX, without_prefix, ABOUT)
