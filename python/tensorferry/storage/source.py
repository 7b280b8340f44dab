"""What a checkpoint can be read from: the files of a folder (here), or the servers of peers (``peers.py``)."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

from .._native import _read_file
from ..errors import IncompleteCheckpoint, ProtocolError, SourceChanged, SystemRefused
from . import commits
from .objects.place import ObjectPlace
from .places import AnyPlace
from .slices import SliceTuple, nbytes_of
from .threads import call_in_threads

#: Objects that are read at once.
_AT_ONCE = 4

#: Called with the number of bytes that are there and the number of all bytes; an exception from it ends the read.
Progress: TypeAlias = Callable[[int, int], object]


class Parts:
    """The progress of a read that is made of several, one after the other.

    Args:
        progress: reports that of all of them together
        total: their bytes
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._begun = progress, total, 0
        self._reported: int | None = None

    def next(self, nbytes: int) -> Progress:
        """Returns what reports the progress of the next read, which counts for ``nbytes``, when all before are done."""
        before = self._begun
        self._begun = before + nbytes
        return lambda done, total: self._report(before + (nbytes * done // total if total else nbytes))

    def end(self) -> None:
        """Reports that all bytes are there."""
        self._report(self._total)

    def _report(self, done: int) -> None:
        if done != self._reported:
            self._reported = done
            self._progress(done, self._total)


class Source(Protocol):
    """A checkpoint of several containers, one of which has an index of them all."""

    def read_index(self) -> bytes:
        """Reads the index, still encoded. Called before :meth:`read`.

        Raises:
            ProtocolError: there is no index of this version
            TensorferryError: it cannot be read or verified
        """

    def read(self, slices: Mapping[str, list[SliceTuple]], progress: Progress | None = None) -> Mapping[str, int]:
        """Reads slices of the containers to their memory addresses.

        Args:
            slices: the slices by container, with the name that the index gives it
            progress: reports how many bytes of the slices are there, while they are read and when all of them are

        Returns:
            What was read, for a reader's ``report``.

        Raises:
            ProtocolError: a container does not belong to the checkpoint, or contradicts the slices
            TensorferryError: the bytes cannot be read or verified
        """


class FolderSource:
    """A checkpoint in a folder, or in a place of an object store.

    Args:
        index: the path of the index
        threads: threads that read; ``None`` chooses by the number of cores

    Attributes:
        digest: identifies the index that was read
    """

    def __init__(self, index: AnyPlace, threads: int | None) -> None:
        self._index = index
        self._threads = threads
        self._headers: dict[str, int] = {}
        self.digest = ""

    def read_index(self) -> bytes:
        """Reads the index, and which files belong to the checkpoint.

        Raises:
            ProtocolError: the file is not an index
            CorruptCheckpoint: the index does not match its checksums
            SystemRefused: the file cannot be read
            TensorferryError: otherwise as for :func:`commits.read`
        """
        text, commit = commits.read(self._index)
        self._headers, self.digest = commit.files, digest_of(text, commit.files)
        return text

    def containers(self) -> list[str]:
        """Returns the names of the files, in the order in which the index numbers them."""
        return sorted(self._headers)

    def read(self, slices: Mapping[str, list[SliceTuple]], progress: Progress | None = None) -> Mapping[str, int]:
        """Reads slices of the files to their memory addresses.

        Args:
            slices: the slices by file name
            progress: as for :meth:`Source.read`

        Returns:
            ``bytes`` of files that were read, and of these ``wanted``, those of the slices.

        Raises:
            ProtocolError: the index does not name the file, or it contradicts the slices
            CorruptCheckpoint: a block of a file does not match its checksum; file, tensor and block are named; or a
                file is not the one that the index names
            IncompleteCheckpoint: a file is gone
            SourceChanged: a save has replaced the checkpoint meanwhile
            SystemRefused: a file cannot be read
            TensorferryError: a store does not answer, or refuses; reads of other files have ended then
            Exception: what ``progress`` raises
        """
        folder = self._index.parent
        read = {"bytes": 0, "wanted": 0}
        for name in slices:
            # The names in the list are those of ranks' files: that is checked when it is read.
            if name not in self._headers:
                raise ProtocolError(
                    f"{folder}: {self._index.name} refers to {name!r}, which is not in its list of files"
                )
        if isinstance(folder, ObjectPlace):
            reports = self._read_together(slices, progress)
        else:
            reports = self._read_in_turn(slices, progress)
        for report in reports:
            for key, count in report.items():
                read[key] += count
        return read

    def _read_in_turn(self, slices: Mapping[str, list[SliceTuple]], progress: Progress | None) -> list[dict[str, int]]:
        """Reads slices of one file after the other."""
        parts = None if progress is None else Parts(progress, sum(map(nbytes_of, slices.values())))
        return [
            self._read_file(name, of_file, None if parts is None else parts.next(nbytes_of(of_file)))
            for name, of_file in slices.items()
        ]

    def _read_file(self, name: str, slices: list[SliceTuple], progress: Progress | None) -> dict[str, int]:
        """Reads slices of the file ``name`` to where they belong, and verifies them.

        Returns:
            As :meth:`read`.

        Raises:
            IncompleteCheckpoint: the file is not there
            SourceChanged: it is not there because a save has replaced the checkpoint
            Exception: otherwise as :meth:`read`
        """
        path = self._index.parent / name
        if isinstance(path, Path) and not path.is_file():
            raise self._missing(name)
        try:
            return _read_file(path, slices, threads=self._threads, header=self._headers[name], progress=progress)
        except (SystemRefused, IncompleteCheckpoint) as e:
            if path.is_file():
                raise
            raise self._missing(name) from e

    def _read_together(self, slices: Mapping[str, list[SliceTuple]], progress: Progress | None) -> list[dict[str, int]]:
        """Reads slices of several objects at once: each request is waited for, and most of that is not work."""
        place = self._index.parent
        assert isinstance(place, ObjectPlace)
        if len(slices) == 1 or self._threads == 1:
            return self._read_in_turn(slices, progress)
        total, done = sum(map(nbytes_of, slices.values())), dict.fromkeys(slices, 0)
        reporting = threading.Lock()

        def noted(name: str) -> Progress | None:
            def note(here: int, _: int) -> None:
                assert progress is not None
                # One thread at a time, as with files, and never fewer bytes than before.
                with reporting:
                    done[name] = here
                    progress(min(sum(done.values()), total), total)

            return None if progress is None else note

        calls = [partial(self._read_file, name, slices[name], noted(name)) for name in slices]
        return call_in_threads(calls, _AT_ONCE, place.end)

    def _missing(self, name: str) -> Exception:
        """Returns the error for a missing file, which depends on whether the index is still the one that was read."""
        try:
            text, commit = commits.read(self._index)
            is_replaced = digest_of(text, commit.files) != self.digest
        except (ProtocolError, SystemRefused):
            is_replaced = False
        if is_replaced:
            return replaced(self._index.parent)
        return IncompleteCheckpoint(
            f"{self._index.parent} holds an incomplete checkpoint: its index names {name}, and there is no such file. "
            "Load another checkpoint, or restore the file"
        )


def replaced(folder: AnyPlace) -> SourceChanged:
    """Returns the error for a load from ``folder`` during which a save has replaced the index."""
    return SourceChanged(f"{folder}: a save has replaced the checkpoint while it was being loaded: load again")


def digest_of(text: bytes, files: Iterable[str] = ()) -> str:
    """Returns a digest of an index and the names of its files, by which ranks compare what they have read."""
    return hashlib.blake2b("/".join(files).encode() + text, digest_size=16).hexdigest()
