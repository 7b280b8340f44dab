"""A container file as memory: what a server publishes without reading the file first."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from pathlib import Path
from typing import Any

from .._native import Rows, Stored
from ..errors import SystemRefused, UnsupportedLeaf
from ..storage import reserved
from ..storage.container import VERSION, Container

#: Pages of a private mapping that nobody writes to need no memory of their own (Linux).
_NO_RESERVE = 0x4000
#: A row of what is published counts dimensions in one byte.
_MOST_DIMENSIONS = 255
#: Keys of ``__metadata__`` that belong to a file, or that every container has.
_OWN_KEYS = frozenset({"format", "tensorferry.version", "tensorferry.file", "tensorferry.checkpoint"})


class Mapping:
    """The pages of a file, for as long as somebody reads them. What is written to them does not reach the file.

    Args:
        path: the file

    Attributes:
        pages: the pages, as a buffer
        address: where they are
        nbytes: how many bytes they have
        payload_start: where the payload begins, if the file is a container

    Raises:
        SystemRefused: the file cannot be mapped
    """

    def __init__(self, path: Path) -> None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                # Writable, because only then it is a buffer for ctypes and torch.
                self.pages = mmap.mmap(
                    file, 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
            finally:
                os.close(file)
        except (OSError, ValueError) as e:
            raise SystemRefused(f"{path}: cannot be mapped: {e}") from e
        self.nbytes = len(self.pages)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.payload_start = 8 + int.from_bytes(self.pages[:8], "little")


def container_of(path: Path, control: list[tuple[str, bytes]] | None = None) -> Container:
    """Returns the container in the file ``path`` for publishing, over the pages of the file.

    The file must not be changed or shortened while it is published. Replacing it by a rename does no harm.

    Args:
        path: a file of this package, or any safetensors file: that is published as the state that maps its names to its
            tensors
        control: further control entries

    Raises:
        TensorferryError: the file cannot be read, or is not a container
    """
    stored = Stored.open(path, checksums=False)
    check_dimensions(path, stored)
    mapping = Mapping(path)
    rows = Rows(object, object, {}, native=False)
    names, dtypes, shapes = stored.names, stored.dtypes, stored.shapes
    for name, dtype, shape, start, size in zip(names, dtypes, shapes, stored.starts, stored.sizes, strict=True):
        if name != reserved.DIGESTS:
            rows.append(mapping, name, dtype, shape, mapping.address + mapping.payload_start + start, size, 0)
    control = list(control or ())
    if not control and not any(name.startswith(reserved.PREFIX) for name in names if name != reserved.DIGESTS):
        control.append((reserved.MANIFEST, _flat_manifest(names)))
    about = [(key, value) for key, value in stored.about if key not in _OWN_KEYS]
    # Borrowed: whoever writes to the file meanwhile makes receivers notice it.
    return Container(rows, mapping, False, control, about)


def check_dimensions(path: Path, stored: Stored) -> None:
    """Refuses a file of another program with tensors of more dimensions than this package can send.

    Raises:
        UnsupportedLeaf: there is one
    """
    for name, shape in zip(stored.names, stored.shapes, strict=True):
        if len(shape) > _MOST_DIMENSIONS:
            raise UnsupportedLeaf(
                f"{path}: {name} has {len(shape)} dimensions, and tensorferry holds tensors of at most "
                f"{_MOST_DIMENSIONS}"
            )


def _flat_manifest(names: list[str]) -> bytes:
    """Returns the manifest of a state that is one dict of tensors."""
    leaves = [name for name in names if name != reserved.DIGESTS]
    fields: dict[str, Any] = {
        "version": VERSION,
        "flags": "",
        "objects": 0,
        "keys": {},
        "storages": [],
        "tensors": [],
        "shared": [],
        "shards": {},
        "globals": {},
        "tree": {name: number for number, name in enumerate(leaves)},
    }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 64)
