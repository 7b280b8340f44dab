"""A container file that a receive fills: the bytes of a source go from the network straight into its pages.

While it is incomplete, the file has another name, which belongs to this file, this step and this layout of tensors
(:func:`partial_of`), and one process at a time has it locked. A later download of the same finds it, and has the engine
compare what is there with the source's digests, so that only what is missing is fetched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

from .._native import FilePages, Remote, Report, Stored, _seal_file
from ..errors import InvalidArgument, ProtocolError, SystemRefused, TensorferryError
from ..storage.pending import rename_new, stem
from ..storage.reserved import DIGESTS
from ..storage.whole_files import open_at_once, sync_folder

#: The payload of a file begins at a multiple of this.
_PAGE = 4096
#: A checksum of 8 bytes for each block of so many, and what else is in their table.
_BLOCK, _TABLE = 512, 48
#: The key of ``__metadata__`` by which no two files of a folder have the same header.
_FILE = "tensorferry.file"
#: The key of ``__metadata__`` that only downloads have, with the step.
PULLED = "tensorferry.pulled"
_UNIQUE = re.compile(rb'"tensorferry\.file":"([0-9a-f]{32})"')
_DIGITS = r"[0-9a-f]{16}"
#: Bytes at the beginning of a file in which its ``__metadata__`` is looked for.
_HEAD = 1 << 16
#: No header is longer.
_LONGEST_HEADER = 100_000_000


def partial_of(path: Path, remote: Remote, step: int) -> Path:
    """Returns the name of ``path`` while it is incomplete: the same for the same step and layout of tensors."""
    columns = [remote.names, remote.dtypes, remote.shapes, remote.starts, remote.sizes, remote.about]
    text = json.dumps([step, *columns]).encode()
    digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    return path.with_name(f".{stem(path)}.pull-{digest}.partial")


def was_pulled(path: Path) -> bool:
    """Whether the file at ``path`` is what a download has written."""
    try:
        return any(key == PULLED for key, _ in Stored.open(path, checksums=False).about)
    except TensorferryError:
        return False


class Download:
    """A file in which a source's container comes to lie, with checksums of its own.

    Args:
        remote: the source, opened
        partial: the name of the file while it is incomplete
        step: the step that is fetched
        unique: whether its header gets a random entry, as those of all files in a checkpoint's folder have

    Attributes:
        partial: the name while it is incomplete
        resumed: whether the file was there already

    Raises:
        InvalidArgument: another process is downloading into the same file, or has just completed or replaced it; or it
            has another name, or is a pipe or a device
        ProtocolError: the source serves an entry with the name that the checksums have in a file
        SystemRefused: the file cannot be made, for example because the disk is full
    """

    def __init__(self, remote: Remote, partial: Path, *, step: int = 0, unique: bool = False) -> None:
        self._remote, self.partial, self._step = remote, partial, step
        self._pages: FilePages | None = None
        self._fd = -1
        if DIGESTS in remote.names:
            raise ProtocolError(f"the source serves an entry {DIGESTS}, which only files have")
        payload = max((start + size for start, size in zip(remote.starts, remote.sizes, strict=True)), default=0)
        try:
            self._open(partial)
            self._lock(partial)
            header = self._header(payload, self._token() if unique else None)
            total = len(header) + payload + _table(payload)
            self.resumed = self._has(header, total)
            if not self.resumed:
                self._begin(header, total)
            self._start = len(header)
            self._pages = FilePages.fill(partial, total)
            if not os.path.samestat(os.fstat(self._pages.fileno()), os.fstat(self._fd)):
                raise InvalidArgument(f"another process has just replaced {partial}: download again")
        except BaseException as e:
            self.close()
            if not isinstance(e, OSError) or isinstance(e, TensorferryError):
                raise
            raise SystemRefused(e.errno, f"{partial}: cannot be written: {e.strerror}") from e

    def _open(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            self._fd = os.open(path, flags)

    def _lock(self, path: Path) -> None:
        """Locks the incomplete file, and checks that it is still at ``path``, plain and without a second name."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidArgument(
                f"another process is downloading into {path}: wait for it, or choose another name"
            ) from None
        except OSError as e:
            # A file system without locks.
            if e.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        status = os.fstat(self._fd)
        if not os.path.samestat(status, os.lstat(path)):
            raise InvalidArgument(f"another process has just completed {path}: download again")
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise InvalidArgument(
                f"{path} is no plain file, or has another name, under which its content would change as well: "
                "remove it, or choose another name"
            )

    def _token(self) -> str:
        """Returns the random entry of the header: that of the file, if it is one that was begun."""
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        found = _UNIQUE.search(os.pread(self._fd, min(length, _LONGEST_HEADER), 8))
        return found[1].decode() if found else secrets.token_hex(16)

    def _header(self, payload: int, token: str | None) -> bytes:
        remote = self._remote
        about = {key: value for key, value in remote.about if key not in (_FILE, PULLED)}
        about |= {PULLED: str(self._step)}
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
        """Starts the file anew: takes the disk space of all ``total`` bytes, and writes the header."""
        os.ftruncate(self._fd, 0)
        # Room for all of it is taken now: a write to a page for which the disk has none would end the process.
        try:
            os.posix_fallocate(self._fd, 0, total)
        except OSError as e:
            self._remove()
            raise OSError(e.errno, f"there is no room for its {total} bytes ({e.strerror})") from e
        self._write(header)

    def _write(self, header: bytes) -> None:
        written = 0
        while written < len(header):
            written += os.pwrite(self._fd, header[written:], written)

    def fetch(self) -> Report:
        """Fetches and verifies what is missing. After an exception the file stays, for another attempt.

        Raises:
            TensorferryError: as for ``HTTPTransport.recv_checkpoint``
            SystemRefused: another process has shortened the file
        """
        assert self._pages is not None
        base = self._pages.address + self._start
        try:
            _, report = self._remote.fetch([base + start for start in self._remote.starts], resume=self.resumed)
        except TensorferryError:
            # Which says more than an error of the connection whose bytes had no place.
            self.check()
            raise
        self.check()
        return report

    def check(self) -> None:
        """Raises if what was fetched has not reached the file.

        Raises:
            SystemRefused: another process has shortened it
        """
        if self._pages is not None and not self._pages.is_unchanged:
            raise SystemRefused(errno.EIO, f"{self.partial} was shortened by another process while it was filled")

    def commit(self, path: Path, replaced: os.stat_result | None = None) -> int:
        """Gives the complete file its checksums and its name; when it returns, both are on the disk.

        The file stays locked until :meth:`close`. Nothing more can be fetched, not even after an error.

        Args:
            path: the name
            replaced: the file that may be replaced, as ``lstat`` describes it; any other one stays

        Returns:
            The checksum of its header.

        Raises:
            InvalidArgument: another file has the name; what was fetched stays, too
            SystemRefused: the system refuses, or another process has changed the file
        """
        self.check()
        self._pages = None
        try:
            # By its descriptor: the name may lead elsewhere by now.
            checksum = _seal_file(f"/proc/self/fd/{self._fd}")
        except (SystemRefused, InvalidArgument) as e:
            number = e.errno if isinstance(e, SystemRefused) else errno.EIO
            raise SystemRefused(number, f"{self.partial} was changed by another process, or cannot be read: {e}") from e
        try:
            if not os.path.samestat(os.fstat(self._fd), os.lstat(self.partial)):
                raise SystemRefused(errno.EIO, f"{self.partial} was replaced by another process")
            if replaced is not None and _is_as(path, replaced):
                self.partial.replace(path)
            else:
                rename_new(self.partial, path)
            sync_folder(path.parent)
        except FileExistsError:
            raise InvalidArgument(
                f"{path} has appeared or changed while it was fetched, and stays as it is: move it away, and the same "
                f"command goes on from {self.partial}, which is complete"
            ) from None
        except OSError as e:
            if isinstance(e, TensorferryError):
                raise
            raise SystemRefused(e.errno, f"{path}: cannot be put in its place: {e.strerror}") from e
        return checksum

    def discard(self) -> None:
        """Removes the file, unless another one has its name by now, and ends the download."""
        self._remove()
        self.close()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), os.lstat(self.partial)):
                self.partial.unlink()

    def close(self) -> None:
        """Ends the download; what has arrived stays, unless it was committed or discarded."""
        self._pages = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def remove_others(path: Path) -> None:
    """Removes what interrupted downloads of other steps into ``path`` have left, now that it is complete.

    Files that another process has locked, of other users or without the mark of a download stay.
    """
    ours = re.compile(re.escape(f".{stem(path)}.pull-") + _DIGITS + r"\.partial")
    with contextlib.suppress(OSError):
        for left in [path.with_name(name) for name in os.listdir(path.parent) if ours.fullmatch(name)]:
            with contextlib.suppress(OSError), open_at_once(left) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                about = left.lstat()
                is_mine = about.st_uid == os.geteuid() and os.path.samestat(about, os.fstat(file.fileno()))
                if is_mine and f'"{PULLED}"'.encode() in file.read(_HEAD):
                    left.unlink()


def _is_as(path: Path, before: os.stat_result) -> bool:
    try:
        now = os.lstat(path)
    except OSError:
        return False
    return all(getattr(now, name) == getattr(before, name) for name in ("st_dev", "st_ino", "st_size", "st_mtime_ns"))


def _table(payload: int) -> int:
    """Returns the length of the table of checksums for so many bytes."""
    return _TABLE + 8 * -(-payload // _BLOCK)
