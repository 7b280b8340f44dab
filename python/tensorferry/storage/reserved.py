"""Names of a container's entries that the format keeps for itself; docs/format.md has what they hold."""

from __future__ import annotations

PREFIX = "__tensorferry__/"
#: A state's tree and the layout of its memory, as JSON.
MANIFEST = f"{PREFIX}manifest"
#: What of a state is no plain tensor.
PICKLE = f"{PREFIX}pickle"
#: The index of a distributed checkpoint.
INDEX = f"{PREFIX}dcp"
#: Which files an index is about. Indexes of older versions do not have it.
INDEX_FILES = f"{PREFIX}files"

#: safetensors keeps this key for the container's own metadata.
_METADATA = "__metadata__"


def piece(storage: int, number: int) -> str:
    """The entry of a piece of a storage that no plain tensor fills."""
    return f"{PREFIX}storage/{storage}/{number}"


def pickled_object(number: int) -> str:
    """The entry of an object in a distributed checkpoint."""
    return f"{PREFIX}objects/{number}"


def pickled_tensor(number: int) -> str:
    """The entry of a tensor in a distributed checkpoint that is more than its elements."""
    return f"{PREFIX}tensors/{number}"


def is_reserved(name: str) -> bool:
    """Whether no tensor of a user's may be called ``name``."""
    return not name or name == _METADATA or name.startswith(PREFIX)
