"""A container whose entries lie in memory, and where it can go: to a server, or into a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from .._native import Readiness, Rows, Server, Written, _write_file

#: Version of the format, of containers and of manifests.
VERSION = 1
#: What every container says of itself in ``__metadata__``.
_METADATA = (("format", "pt"), ("tensorferry.version", str(VERSION)))


@dataclass(frozen=True)
class Container:
    """Entries, and the memory behind them.

    Attributes:
        rows: the entries that lie in memory
        owner: keeps that memory alive
        private: whether nobody else writes to it
        control: name and bytes of the entries that come first
        about: further keys and values of ``__metadata__``
    """

    rows: Rows
    owner: Any
    private: bool
    control: Sequence[tuple[str, bytes]] = ()
    about: Sequence[tuple[str, str]] = ()

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """Keys and values of ``__metadata__``."""
        return [*_METADATA, *self.about]

    def publish(
        self,
        server: Server,
        step: int,
        *,
        alternate: Callable[[str], list[Any] | str | None] | None = None,
        filled: bool = True,
    ) -> Readiness | None:
        """Hands it to ``server``, to be served as ``step`` in place of what is served now.

        Args:
            server: serves it until something else is published or it is withdrawn
            step: its number
            alternate: what the server answers to requests for other names below the step's; ``None`` if nothing
            filled: whether all bytes are in memory already

        Returns:
            What tells the server how many bytes are there, if not all are.
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
        )

    def write(
        self, path: PathLike[str], *, partial: PathLike[str], threads: int | None = None, cached: bool = False
    ) -> Written:
        """Writes it into the file ``path``, which is there when all of it is on the disk.

        Args:
            path: takes the place of a file of that name
            partial: the name of the file while it is written
            threads: threads to write with; ``None`` chooses by the number of cores
            cached: write large files, too, through the page cache

        Raises:
            SystemRefused: the system refuses, a full disk for one
        """
        return _write_file(
            path,
            partial=partial,
            rows=self.rows,
            control=list(self.control),
            metadata=self.metadata,
            threads=threads,
            cached=cached,
        )
