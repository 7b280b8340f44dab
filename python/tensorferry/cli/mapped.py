"""A container file as memory: what a server publishes without reading the file first."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._native import FilePages, Stored, Table
from ..errors import SourceChanged, SystemRefused, UnsupportedLeaf
from ..storage import foreign, reserved
from ..storage.container import VERSION, Container
from ..storage.places import AnyPlace
from .download import PULLED

#: A row of what is published counts dimensions in one byte.
_MOST_DIMENSIONS = 255
#: Keys of ``__metadata__`` that belong to a file, or that every container has.
_OWN_KEYS = frozenset({"format", "tensorferry.version", "tensorferry.file", "tensorferry.checkpoint", PULLED})


class Mapping:
    """The pages of a file, for as long as somebody reads them. What is written to them does not reach the file.

    Whoever reads them asks ``pages.is_unchanged`` afterwards: a file that is shortened has zeros there.

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
        self.pages = FilePages(path)
        self.nbytes = len(self.pages)
        self.address = self.pages.address
        head = (ctypes.c_char * min(8, self.nbytes)).from_buffer(self.pages)  # type: ignore[arg-type]  # a buffer
        self.payload_start = 8 + int.from_bytes(head.raw, "little")


class ServedFiles:
    """The files that a server publishes, whose names must not lead to others while they are opened.

    A file is opened more than once before it is served: to compare it with its checksums, to read its header, and for
    its pages. All must be of one file.
    """

    def __init__(self) -> None:
        self._pages: dict[Path, FilePages] = {}

    @contextlib.contextmanager
    def opening(self, path: Path) -> Iterator[Path]:
        """Yields ``path``, as which the same file must be there before and after the block.

        Raises:
            SourceChanged: it is another one afterwards, or its length or time shows that it was written to
            SystemRefused: it cannot be examined
        """
        before = _file_identity(path)
        yield path
        if _file_identity(path) != before:
            raise SourceChanged(f"{path} was changed or replaced while it was opened: serve it again")

    def add(self, path: Path, pages: FilePages) -> list[FilePages]:
        """Notes that ``pages`` of the file are served; returns them for ``publish``."""
        self._pages[path] = pages
        return [pages]

    def changed(self) -> list[Path]:
        """Returns the files whose content is seen to have changed; one that was replaced or removed keeps its own."""
        return [path for path, pages in self._pages.items() if not pages.is_unchanged]


def _file_identity(path: Path) -> tuple[int, ...]:
    """Returns what changes when another file takes this one's place, or a write changes its length or time.

    Raises:
        SystemRefused: the system does not say
    """
    try:
        about = path.stat()
    except OSError as e:
        raise SystemRefused(e.errno, f"{path}: cannot be read: {e.strerror}") from e
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def container_of(path: Path, control: list[tuple[str, bytes]] | None = None) -> tuple[Container, FilePages]:
    """Returns the container in the file ``path`` for publishing, over the pages of the file, and these pages.

    Replacing the file by a rename does no harm. If its content is changed, receives must fail: ``publish`` takes the
    pages for that.

    Args:
        path: a file of this package, or any safetensors file: that is published as the state that maps its names to its
            tensors
        control: further control entries

    Raises:
        TensorferryError: the file cannot be read, or is not a container
    """
    stored = Stored.open(path, checksums=False)
    check_foreign(path, stored)
    mapping = Mapping(path)
    # Its checksums are what receivers compare with what they get: a file can change without its time showing it.
    mapping.pages.compare_with(stored)
    rows = Table()
    names, dtypes, shapes = stored.names, stored.dtypes, stored.shapes
    for name, dtype, shape, start, size in zip(names, dtypes, shapes, stored.starts, stored.sizes, strict=True):
        if name != reserved.DIGESTS:
            rows.append(mapping, name, dtype, shape, mapping.address + mapping.payload_start + start, size, 0)
    control = list(control or ())
    if not control and not any(name.startswith(reserved.PREFIX) for name in names if name != reserved.DIGESTS):
        control.append((reserved.MANIFEST, _flat_manifest(names)))
    about = [(key, value) for key, value in stored.about if key not in _OWN_KEYS]
    # Borrowed: whoever writes to the file meanwhile makes receivers notice it.
    return Container(rows, mapping, False, control, about), mapping.pages


def check_foreign(path: AnyPlace, stored: Stored) -> None:
    """Refuses a file of another program that has parts of tensors, or more dimensions than this package can send.

    Raises:
        ProtocolError: it has parts
        UnsupportedLeaf: a tensor has too many dimensions
    """
    foreign.refuse_parts(path, stored)
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
