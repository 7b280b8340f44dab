"""A container whose entries lie in memory, and its two destinations: a server or a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

from .._native import FilePages, FileWriting, Readiness, Server, Shelf, Table

if TYPE_CHECKING:
    from .places import AnyPlace

#: Version of the format of containers and manifests.
VERSION = 1
#: Bytes of a file that are written at a time where rows come late.
_STEP = 64 << 20
#: Keys and values in the ``__metadata__`` of every container.
_METADATA = (("format", "pt"), ("tensorferry.version", str(VERSION)))


class Stored(Protocol):
    """A file or an object that was written; while this lives, a file is locked."""

    @property
    def bytes(self) -> int:
        """Its length in bytes."""

    @property
    def direct(self) -> int:
        """How many bytes of a file went past the page cache."""

    @property
    def header(self) -> int:
        """The checksum of the container's header."""


class LateRows(Protocol):
    """Rows that come into host memory while they are written."""

    def places(self, starts: Sequence[int], begin: int, stop: int) -> list[tuple[int, int]]:
        """Brings what they have of a part of a container; what they had of the part before is not needed any more.

        Args:
            starts: where each row begins in the container
            begin: where the part begins
            stop: where it ends

        Returns:
            For each row of the part the byte of the container at which it begins there, and its address.

        Raises:
            Exception: whatever has it fail
        """


@dataclass(frozen=True)
class Container:
    """The entries of a container, and the memory behind them.

    Attributes:
        rows: the entries whose bytes lie in memory
        owner: keeps that memory alive
        private: whether nothing else writes to that memory
        control: name and bytes of each control entry; they come before ``rows``
        about: further keys and values for ``__metadata__``
        late: brings those rows that have no memory yet, for :meth:`write`
    """

    rows: Table
    owner: Any
    private: bool
    control: Sequence[tuple[str, bytes]] = ()
    about: Sequence[tuple[str, str]] = ()
    late: LateRows | None = None

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """All keys and values of the container's ``__metadata__``."""
        return [*_METADATA, *self.about]

    def publish(
        self,
        server: Server | Shelf,
        step: int,
        *,
        alternate: Callable[[str], list[Any] | None] | None = None,
        filled: bool = True,
        pages: Sequence[FilePages] = (),
    ) -> Readiness | None:
        """Publishes the container on ``server`` as ``step``, in place of what is served now.

        Args:
            server: serves the container until it is withdrawn or another one is published
            step: the step number
            alternate: called with the name in requests for other resources of the step; returns the parts of the
                answer, or ``None`` if there is no such resource
            filled: whether all bytes are in memory already
            pages: those of files in which rows lie; once one of them has changed, receives fail

        Returns:
            If ``filled`` is false, the handle with which the caller reports how many bytes are ready; else ``None``.

        Raises:
            InvalidArgument: the rows make no valid container
            ForkedProcess: this process was forked from the one that made the server
        """
        return server.publish(
            step,
            rows=self.rows,
            control=list(self.control),
            metadata=self.metadata,
            owner=self.owner,
            private=self.private,
            alternate=alternate,
            filled=filled,
            pages=list(pages),
        )

    def write(
        self,
        path: AnyPlace,
        *,
        partial: AnyPlace,
        threads: int | None = None,
        cached: bool | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Stored:
        """Writes the container to the file or object ``path``, which appears only when all of it is there.

        When this returns, the file and its name are on the disk. After an error, no incomplete file is left; parts of
        an object may be, see ``objects/upload.py``.

        Args:
            path: the file or object; one that is there is replaced, without a condition
            partial: the name of the file while it is being written, in the same folder and free; an object needs none.
                If it is ``path``, the file appears at once, and its name is not synced
            threads: threads that write, or parts of an object that are uploaded at a time; ``None`` chooses
            cached: whether large files are written through the page cache; ``None`` chooses, see ``FileWriter``
            progress: called with the number of bytes written and the number of all bytes

        Returns:
            How much was written; while this object lives, the file stays locked.

        Raises:
            InvalidArgument: the entries make no valid container
            SystemRefused: the system refuses, for example because the disk is full
            TensorferryError: the store does not answer in time, or refuses
            Exception: what ``progress`` raises, or what :attr:`late` does
        """
        if not isinstance(path, PathLike):
            from .objects.upload import upload

            return upload(path, self, threads, progress)
        assert isinstance(partial, PathLike)
        writing = FileWriting(
            path,
            partial=partial,
            rows=self.rows,
            control=list(self.control),
            metadata=self.metadata,
            threads=threads,
            cached=cached,
            progress=progress,
        )
        try:
            if self.late is not None:
                starts = writing.starts
                for at in range(0, writing.end, _STEP):
                    writing.write(at + _STEP, self.late.places(starts, at, at + _STEP))
            writing.write(writing.end)
            return writing.finish()
        finally:
            writing.close()
