"""Uploads a container in parts, several at a time, each from a copy of its own that is checksummed.

A request that was given up, or that the store has answered before it read all of it, may be read by the client for a
while yet. It reads the copy: the tensors are the caller's again when :func:`upload` has returned or raised.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._native import HostView, Parts
from ...errors import (
    IncompleteCheckpoint,
    SourceChanged,
    StoreRefused,
    SystemRefused,
    TensorferryError,
    TransferCancelled,
)
from ..container import Container
from ..source import Progress
from ..threads import uninterrupted
from . import client
from .bucket import put_new
from .place import ObjectPlace
from .requests import ending

#: The least bytes of a part; how many parts an object has at most, of the 10,000 that stores allow; and how many are
#: under way, unless the caller chooses. Each one under way has its memory.
PART, _MOST_PARTS, _AT_A_TIME = 8 << 20, 9_000, 8
_MIB = 1 << 20


@dataclass(frozen=True)
class Uploaded:
    """What was uploaded, with the names that the engine has for files.

    Attributes:
        bytes: the length of the object
        header: the checksum of the container's header
        direct: 0, since no page cache is involved
    """

    bytes: int
    header: int
    direct: int = 0


def part_bytes(nbytes: int) -> int:
    """Returns how many bytes the parts of an object of ``nbytes`` bytes have."""
    return max(PART, -(-nbytes // _MOST_PARTS // _MIB) * _MIB)


def upload(
    place: ObjectPlace, container: Container, threads: int | None = None, progress: Progress | None = None
) -> Uploaded:
    """Uploads a container; the object is there when all of it is, and not before.

    Args:
        place: the object; the caller has chosen a name that nobody else has, as one that is there is replaced
        container: what is uploaded
        threads: how many parts are under way at a time; ``None`` chooses
        progress: called now and then with the number of bytes that were read and the number of all bytes

    Raises:
        TensorferryError: the store does not answer in time, or refuses; the message names the object and the part
        ForkedProcess: requests were made before this process was forked
        Exception: what ``progress`` raises
    """
    parts = Parts(rows=container.rows, control=list(container.control), metadata=container.metadata)
    size = part_bytes(parts.nbytes)
    source = _PartSource(parts, size, container)
    at_a_time = threads or _AT_A_TIME

    def report() -> None:
        if progress is not None:
            progress(min(source.read, parts.nbytes), parts.nbytes)

    try:
        _put(place, source, parts.nbytes, size, at_a_time, report)
        report()
    except BaseException:
        if source.failed is not None:
            raise source.failed from None
        raise
    finally:
        source.stop()
    return Uploaded(parts.nbytes, parts.header)


def _put(
    place: ObjectPlace,
    content: Any,
    nbytes: int,
    size: int,
    at_a_time: int,
    report: Callable[[], None] | None = None,
) -> None:
    """Uploads an object; the parts of an upload that is interrupted stay in the store.

    Args:
        place: the object
        content: its bytes, as the library takes them: a file, or an iterator of pieces of ``size`` bytes or fewer
        nbytes: its length
        size: the length of each part of the upload but the last one
        at_a_time: how many parts are under way at a time
        report: called now and then; its exception ends the upload

    Raises:
        TensorferryError: the store does not answer in time, or refuses; the message names the object and the part
        Exception: what ``report`` raises
    """
    library, store, key, calls = client.obstore(), place.store, place.key, place.calls()

    async def put() -> Any:
        # Several requests are made only for what does not fit into one.
        return await library.put_async(
            store, key, content, use_multipart=nbytes > size, chunk_size=size, max_concurrency=at_a_time
        )

    unknown: IncompleteCheckpoint | None = None
    try:
        with ending(calls):
            calls.finish(calls.begin(put), str(place), "writing it", report)
    except IncompleteCheckpoint as e:
        # A client that completes an upload again, since the answer was lost, may hear that there is none.
        unknown = e
    try:
        place.check_kept(nbytes)
    except StoreRefused as e:
        raise unknown or e from None


def upload_file(place: ObjectPlace, path: Path) -> int:
    """Uploads a file as it is to where no object is; returns its length.

    What is uploaded in parts is written without a condition, which the library has not for it: if another writer makes
    the object after the look for it, that one is replaced. Parts of an upload that fails may stay.

    Raises:
        SourceChanged: there is an object; of a file that fits into one request, one with other content; or the file
            was written to meanwhile
        SystemRefused: the file cannot be read
        TensorferryError: the store does not answer in time, or refuses
    """
    try:
        with path.open("rb") as file:
            before = os.fstat(file.fileno())

            def check_unchanged() -> None:
                now = os.fstat(file.fileno())
                if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                    raise SourceChanged(f"{path} was changed while it was copied: copy it again")

            nbytes = before.st_size
            size = part_bytes(nbytes)
            if nbytes <= size:
                data = file.read()
                check_unchanged()
                put_new(place, data)
                return nbytes
            if place.is_file():
                raise SourceChanged(f"{place}: there is an object already")
            try:
                _put(place, file, nbytes, size, _AT_A_TIME)
            finally:  # The store has another length then, and is not to blame.
                check_unchanged()
    except TensorferryError:
        raise
    except OSError as e:
        raise SystemRefused(e.errno, f"{path} cannot be read: {e.strerror}") from e
    return nbytes


class _PartSource:
    """Yields the bytes of a container in memory that is used again once the client has let go of it.

    Args:
        parts: reads them
        size: bytes of a part
        container: keeps the memory alive that they are read from, or brings it
    """

    def __init__(self, parts: Parts, size: int, container: Container) -> None:
        self._owner = container.owner
        self._late, self._starts = container.late, parts.starts if container.late is not None else []
        self._parts, self._size = parts, min(size, -(-parts.nbytes // 512) * 512)
        self._free: collections.deque[_Memory] = collections.deque()
        self._is_over = False
        self._reading = threading.Lock()
        self.read = 0
        self.failed: BaseException | None = None

    def __iter__(self) -> _PartSource:
        return self

    def __next__(self) -> HostView:
        with self._reading:
            if self.read >= self._parts.nbytes:
                raise StopIteration
            if self._is_over:
                raise TransferCancelled("the upload was ended")
            try:
                memory = self._free.pop()
            except IndexError:
                memory = _Memory(self._size)
            try:
                late, stop = self._late, self.read + self._size
                places = [] if late is None else late.places(self._starts, self.read, stop)
            except BaseException as e:
                self.failed = e
                raise
            nbytes = self._parts.fill(memory.address, self._size, places)
            self.read += nbytes
            return HostView(_Lease(memory, self._free), memory.address, nbytes)

    def stop(self) -> None:
        """When this returns or raises, nothing reads the state any more."""
        self._is_over = True
        uninterrupted(self._wait)

    def _wait(self) -> None:
        with self._reading:
            pass


class _Memory:
    """Memory for one part, whose pages are taken when they are used: large ones, if the kernel has them."""

    def __init__(self, nbytes: int) -> None:
        self._pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._held = ctypes.c_char.from_buffer(self._pages)
        self.address = ctypes.addressof(self._held)


class _Lease:
    """The use of memory by the client, which ends when the client drops this object."""

    def __init__(self, memory: _Memory, free: collections.deque[_Memory]) -> None:
        self._memory, self._free = memory, free

    def __del__(self) -> None:
        self._free.append(self._memory)
