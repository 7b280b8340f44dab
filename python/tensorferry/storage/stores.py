"""What a checkpoint lies in: one protocol with two backends, folders (``folder_store.py``) and buckets.

Commits, leftovers and series are written once, on top of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from .container import Container
from .folder_store import FolderStore
from .objects.bucket import BucketStore
from .places import AnyPlace


class Stat(Protocol):
    """What is known of a file or an object."""

    @property
    def st_size(self) -> int:
        """Its length in bytes."""

    @property
    def st_mtime(self) -> float:
        """When it was written, in seconds since the epoch, by the clock of the file system or the store."""

    @property
    def st_mtime_ns(self) -> int:
        """The same in nanoseconds."""


class Store(Protocol):
    """The files of a checkpoint, by their names.

    Each method raises ``SystemRefused`` if the system refuses, and another :class:`TensorferryError` if a store does
    not answer, or refuses.

    Attributes:
        may_be_late: whether a write may be made although it has failed
        absent: the version of a file that is not there
        pauses: seconds between two looks for what others write, at first and at most
    """

    may_be_late: bool
    absent: Any

    @property
    def compares(self) -> bool:
        """Whether an index is replaced on a condition, instead of under a lock."""

    pauses: tuple[float, float]

    def entries(self, *beginnings: str) -> Mapping[str, Stat]:
        """Returns what is there under names that begin so; it may have others as well."""

    def subfolders(self) -> list[str]:
        """Returns the names of the folders in it."""

    def stat(self, name: str) -> Stat | None:
        """Returns what is known of a file; ``None`` if there is no such file."""

    def open(self, name: str) -> tuple[Any, Any]:
        """Returns what the engine reads a file by, ``None`` without one; and its version, for :meth:`new_index`."""

    def read(self, name: str, most: int | None) -> bytes:
        """Returns the content of a file that has at most ``most`` bytes; with ``None``, as many as memory has room for.

        Raises:
            OSError: it cannot be read
            ProtocolError: it is longer, grows or shrinks meanwhile, or is not a regular file
        """

    def write(
        self, name: str, data: bytes, partial: str, *, synced: bool = True, modified_ns: int | None = None
    ) -> None:
        """Writes a file whole, in place of what is there; as :func:`whole_files.write_whole`."""

    def remove(self, names: Iterable[str]) -> None:
        """Removes files; those that are gone count as removed."""

    def holding(self, names: Iterable[str]) -> AbstractContextManager[Mapping[str, Stat]]:
        """While the block runs, no other save removes these files, even if their writer is dead; yields what is there.

        Raises:
            IncompleteCheckpoint: one of the files is gone
        """

    def locked(self) -> AbstractContextManager[None]:
        """While the block runs, no other thread or process of this machine replaces an index.

        Raises:
            InvalidArgument: the calling thread is in such a block already, of whichever folder
            SystemRefused: another process keeps the folder locked
        """

    def new_index(self, name: str, content: Container) -> AbstractContextManager[Callable[[Any], float]]:
        """Yields what puts a new index in the place of the one that :meth:`open` has shown, by its version.

        It returns when the index was written, as :attr:`Stat.st_mtime`, and raises ``SourceChanged`` if another one is
        there by now. Stores without conditions, and folders, replace whatever is there.
        """

    def remove_dead(
        self, names: Mapping[str, Any], now: float, abandoned: float, needed: Callable[[], set[str]]
    ) -> None:
        """Removes files whose writer is dead, and which no index names.

        Args:
            names: those that may be left, as :meth:`entries` returns them
            now: the time by the clock that has stamped them
            abandoned: seconds after which each writer counts as dead
            needed: returns the names that the index has now
        """

    def create(self) -> bool:
        """Creates the folder, where there are folders; returns whether it was not there before."""

    def sync(self) -> None:
        """Brings the entries of the folder to the disk; raises ``OSError``."""

    def remove_if_empty(self) -> None:
        """Removes the folder if nothing is in it."""


def store_of(place: AnyPlace) -> Store:
    """Returns the files in a folder or a place."""
    return FolderStore(place) if isinstance(place, Path) else BucketStore(place)
