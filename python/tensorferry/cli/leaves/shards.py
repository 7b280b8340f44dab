"""A model in several safetensors files, with the index that Hugging Face's programs write beside them."""

from __future__ import annotations

import json
from typing import Any

from ...errors import IncompleteCheckpoint, ProtocolError, SystemRefused, TensorferryError
from ...storage.foreign import MODEL_INDEX
from ...storage.names import checked_plain
from ...storage.places import AnyPlace
from ...storage.whole_files import is_file, read_whole

#: No index is longer, in bytes.
_LONGEST = 100_000_000


def files_of(folder: Any) -> dict[Any, list[str]]:
    """Returns the files that the index in ``folder`` names, each with the names of its tensors.

    Raises:
        IncompleteCheckpoint: a file is missing
        ProtocolError: the index is not valid, or names a file outside of the folder
        SystemRefused: the index cannot be read
    """
    index = folder / MODEL_INDEX
    try:
        fields = json.loads(read_whole(index, _LONGEST))
    except OSError as e:
        if isinstance(e, TensorferryError):
            raise
        raise SystemRefused(e.errno, f"{index}: cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        if isinstance(e, ProtocolError):
            raise
        raise ProtocolError(f"{index}: its index cannot be read ({e})") from e
    places = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(places, dict):
        raise ProtocolError(f"{index}: its index cannot be read (it has no weight_map)")
    found: dict[Any, list[str]] = {}
    for tensor, name in places.items():
        found.setdefault(folder / checked_plain(name, f"{folder}: its index"), []).append(tensor)
    for path in found:
        if not is_file(path):
            raise IncompleteCheckpoint(f"{folder} is incomplete: {path.name} is missing")
    return dict(sorted(found.items()))


def check_names(path: AnyPlace, expected: list[str], held: list[str]) -> None:
    """Compares the tensors that the index has in a file with those that are in it.

    Raises:
        IncompleteCheckpoint: one is not there
    """
    if missing := sorted(set(expected) - set(held)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise IncompleteCheckpoint(f"{path} does not hold {missing[0][:200]}{more}, which the index has there")
