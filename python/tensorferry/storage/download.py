"""A container file that a receive fills: the bytes of a source go from the network straight into its pages.

While it is incomplete, the file has another name. A later download of the same source finds it, and has the engine
compare what is there with the source's digests, so that only what is missing is fetched.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

from .._native import Remote, Report, _seal_file
from ..errors import InvalidArgument, ProtocolError, SystemRefused
from .folder import sync_folder
from .reserved import DIGESTS

#: The payload of a file begins at a multiple of this.
_PAGE = 4096
#: A checksum of 8 bytes for each block of so many, and what else is in their table.
_BLOCK, _TABLE = 512, 48
#: The key of ``__metadata__`` by which no two files of a folder have the same header.
_FILE = "tensorferry.file"
_UNIQUE = re.compile(rb'"tensorferry\.file":"([0-9a-f]{32})"')
#: No header is longer.
_LONGEST_HEADER = 100_000_000


class Download:
    """A file in which a source's container comes to lie, with checksums of its own.

    Args:
        remote: the source, opened
        partial: the name of the file while it is incomplete
        unique: whether its header gets a random entry, as those of all files in a checkpoint's folder have

    Attributes:
        resumed: whether the file was there already

    Raises:
        InvalidArgument: another process is downloading into the same file, or it has another name
        ProtocolError: the source serves an entry with the name that the checksums have in a file
        SystemRefused: the file cannot be made, for example because the disk is full
    """

    def __init__(self, remote: Remote, partial: Path, *, unique: bool = False) -> None:
        self._remote, self._partial = remote, partial
        self._map: mmap.mmap | None = None
        if DIGESTS in remote.names:
            raise ProtocolError(f"the source serves an entry {DIGESTS}, which only files have")
        payload = max((start + size for start, size in zip(remote.starts, remote.sizes, strict=True)), default=0)
        try:
            self._fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as e:
            raise SystemRefused(e.errno, f"{partial}: cannot be written: {e.strerror}") from e
        try:
            self._lock()
            header = self._header(payload, self._token() if unique else None)
            self._start = len(header)
            total = len(header) + payload + _table(payload)
            self.resumed = self._has(header, total)
            if not self.resumed:
                self._begin(header, total)
            self._map = mmap.mmap(self._fd, total)
        except OSError as e:
            self.close()
            raise SystemRefused(e.errno, f"{partial}: cannot be written: {e.strerror}") from e
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidArgument(
                f"another process is downloading into {self._partial}: wait for it, or choose another name"
            ) from None
        except OSError as e:
            # A file system without locks.
            if e.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        status = os.fstat(self._fd)
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            raise InvalidArgument(
                f"{self._partial} has another name, under which its content would change as well: remove it, or choose "
                "another name"
            )
        if not os.path.samestat(status, os.stat(self._partial)):
            raise InvalidArgument(f"another process has just completed {self._partial}: download again")

    def _token(self) -> str:
        """Returns the random entry of the header: that of the file, if it is one that was begun."""
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        found = _UNIQUE.search(os.pread(self._fd, min(length, _LONGEST_HEADER), 8))
        return found[1].decode() if found else secrets.token_hex(16)

    def _header(self, payload: int, token: str | None) -> bytes:
        remote = self._remote
        about = {key: value for key, value in remote.about if key != _FILE}
        fields: dict[str, Any] = {"__metadata__": about if token is None else {**about, _FILE: token}}
        columns = zip(remote.names, remote.dtypes, remote.shapes, remote.starts, remote.sizes, strict=True)
        for name, dtype, shape, start, size in columns:
            fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        nbytes = _table(payload)
        fields[DIGESTS] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [payload, payload + nbytes]}
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(len(text) + 8) % _PAGE)
        return len(text).to_bytes(8, "little") + text

    def _has(self, header: bytes, total: int) -> bool:
        return os.fstat(self._fd).st_size == total and os.pread(self._fd, len(header), 0) == header

    def _begin(self, header: bytes, total: int) -> None:
        os.ftruncate(self._fd, 0)
        # Room for all of it is taken now: a write to a page for which the disk has none would end the process.
        try:
            os.posix_fallocate(self._fd, 0, total)
        except OSError as e:
            self._partial.unlink()
            raise OSError(e.errno, f"there is no room for its {total} bytes ({e.strerror})") from e
        written = 0
        while written < len(header):
            written += os.pwrite(self._fd, header[written:], written)

    def fetch(self) -> Report:
        """Fetches and verifies what is missing. After an exception the file stays, for another attempt.

        Raises:
            TensorferryError: as for ``HTTPTransport.recv_checkpoint``
        """
        assert self._map is not None
        first = ctypes.c_char.from_buffer(self._map)
        base = ctypes.addressof(first) + self._start
        try:
            _, report = self._remote.fetch([base + start for start in self._remote.starts], resume=self.resumed)
        finally:
            del first
        return report

    def commit(self, path: Path) -> int:
        """Gives the complete file its checksums and its name; when it returns, both are on the disk.

        Returns:
            The checksum of its header.

        Raises:
            SystemRefused: the system refuses
        """
        self._unmap()
        checksum = _seal_file(self._partial)
        try:
            self._partial.replace(path)
            sync_folder(path.parent)
        except OSError as e:
            raise SystemRefused(e.errno, f"{path}: cannot be put in its place: {e.strerror}") from e
        return checksum

    def discard(self) -> None:
        """Removes the file."""
        with contextlib.suppress(OSError):
            self._partial.unlink()
        self.close()

    def close(self) -> None:
        """Ends the download; what has arrived stays, unless it was committed or discarded."""
        self._unmap()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


def _table(payload: int) -> int:
    """Returns the length of the table of checksums for so many bytes."""
    return _TABLE + 8 * -(-payload // _BLOCK)
