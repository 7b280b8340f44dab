"""The names of container entries that the format reserves; docs/reference/format.md describes what they hold."""

from __future__ import annotations

PREFIX = "__tensorferry__/"
#: The tree of a state and the layout of its memory, as JSON.
MANIFEST = f"{PREFIX}manifest"
#: The pickle of everything in a state that is not a plain tensor.
PICKLE = f"{PREFIX}pickle"
#: The index of a distributed checkpoint.
INDEX = f"{PREFIX}index"
#: That of versions before 0.1.0, which is not read.
OLD_INDEX = f"{PREFIX}dcp"
#: The index of a checkpoint that a checkpointer has saved.
CHECKPOINT = f"{PREFIX}checkpoint"
#: The files that an index refers to. Indexes of older versions do not have this entry.
INDEX_FILES = f"{PREFIX}files"
#: The checksums of a file, its last entry.
DIGESTS = f"{PREFIX}digests"

#: safetensors reserves this key for the container's own metadata.
_METADATA = "__metadata__"


def pickled_object(number: int) -> str:
    """Returns the entry name of an object in a distributed checkpoint."""
    return f"{PREFIX}objects/{number}"


def pickled_tensor(number: int) -> str:
    """Returns the entry name of a tensor in a distributed checkpoint that had to be pickled."""
    return f"{PREFIX}tensors/{number}"


def is_reserved(name: str) -> bool:
    """Whether a user's tensor may not be called ``name``."""
    return not name or name == _METADATA or name.startswith(PREFIX)
