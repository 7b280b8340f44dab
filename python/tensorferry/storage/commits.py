"""The files of a checkpoint folder: which of them its index names, and which of the others can be removed.

A folder may have several writers: saves of one job that overlap, two jobs that were given the same path, a coordinator
that was thought to be dead. Three rules keep every committed checkpoint whole, without a lock that all writers would
have to share:

- Every file that a save writes has a unique name.
- A save removes the files that the index it replaced had named. None of them belongs to a save that still runs.
- Other files are removed only if their writer is dead. Writers keep their files locked (``flock``) until their save is
  over. If the writer ran on this machine, a free lock proves that it is dead; file names therefore contain the
  machine's id. Other machines may not share locks with this one: their files are removed only after a day without a
  write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._native import _file_entries
from ..errors import IncompleteCheckpoint, ProtocolError, TensorferryError
from .reserved import INDEX, INDEX_FILES

logger = logging.getLogger("tensorferry")

#: Files that may belong to a save that was killed.
_OURS = re.compile(
    r"(rank(?P<rank>\d{5,})-(?P<id>[0-9a-f]{12,20})\.safetensors"
    r"|index(-rank\d{5,})?\.safetensors(\.(?P<partial>[0-9a-f]{20}))?)(\.partial|\.failed)?"
    r"|\.metadata\.(?P<marker>[0-9a-f]{20})\.partial"
)
_RANDOM_DIGITS = 12
#: Seconds since the last write within which a writer may still be about to lock its file.
_GRACE_S = 60.0
#: Seconds without a write after which the writer of a file counts as dead, wherever it ran.
_ABANDONED_S = 24 * 3600.0
#: How many files are locked at a time.
_BATCH = 64
#: Whether a clock that has gone back was reported.
_warned_of_clock = False


@dataclass(frozen=True)
class Commit:
    """What an index records about its files.

    Attributes:
        files: the name of each file, mapped to the checksum of its header; ``None`` if the index was written by a
            version that did not record checksums
        began: when the save began, in nanoseconds since the epoch, by the coordinator's clock
    """

    files: dict[str, int | None]
    began: int = 0

    def encode(self) -> bytes:
        """Returns the bytes of the index's entry ``INDEX_FILES``."""
        files = {name: f"{header or 0:016x}" for name, header in self.files.items()}
        return json.dumps({"began": self.began, "files": files}, separators=(",", ":")).encode()


def is_file(path: Path) -> bool:
    """Whether ``path`` is a file; ``Path.is_file`` raises where a folder must not be entered, and this does not."""
    return os.path.isfile(path)


def begin_after(known: Iterable[int]) -> int:
    """Returns when a new save begins, in nanoseconds since the epoch: later than every save that is known to it.

    Args:
        known: when earlier saves began, those that the new one may replace or stand beside
    """
    global _warned_of_clock
    now, newest = time.time_ns(), max(known, default=0)
    if newest < now:
        return now
    if not _warned_of_clock:
        _warned_of_clock = True
        logger.warning(
            "the clock of this machine is %.1f s behind the beginning of an earlier save: it has gone back",
            (newest - now) / 1e9,
        )
    return newest + 1


def read(path: Path) -> tuple[bytes, Commit]:
    """Reads the index file ``path``; returns the index, still encoded, and its commit. The file is opened once.

    Raises:
        ProtocolError: the file is not an index
        CorruptCheckpoint: the file does not match its checksums
        SystemRefused: the file cannot be read
    """
    text, files = _file_entries(path, [INDEX, INDEX_FILES])
    if text is None:
        raise ProtocolError(f"{path} is not an index: it has no entry {INDEX!r}")
    return text, _decode(path, text, files)


def _decode(path: Path, text: bytes, files: bytes | None) -> Commit:
    try:
        if files is None:
            return Commit(dict.fromkeys(map(str, json.loads(text)["sources"])))
        fields: Any = json.loads(files)
        named = {str(name): int(header, 16) for name, header in fields["files"].items()}
        if not all(0 <= header < 1 << 64 for header in named.values()):
            raise ValueError("a checksum does not have 64 bits")
        return Commit(dict(named), int(fields["began"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ProtocolError(f"{path}: its index cannot be read ({type(e).__name__}: {e})") from e


def files_of(path: Path) -> Commit:
    """Returns the commit of the index ``path``.

    It holds only files with the names of rank files, whatever the index says, since its files may be removed.

    Raises:
        TensorferryError: the index cannot be read
    """
    # In an index of many tensors, this entry is the small one.
    (files,) = _file_entries(path, [INDEX_FILES])
    return _of_ranks(read(path)[1] if files is None else _decode(path, b"", files))


def decode(path: Path, files: bytes | None) -> Commit:
    """Returns the commit in the entry ``INDEX_FILES`` of the index ``path``, as :func:`files_of` does.

    Raises:
        ProtocolError: there is no such entry, or it is not valid
    """
    if files is None:
        raise ProtocolError(f"{path}: its index cannot be read (it has no entry {INDEX_FILES!r})")
    return _of_ranks(_decode(path, b"", files))


def _of_ranks(found: Commit) -> Commit:
    ranks = (name for name in found.files if (match := _OURS.fullmatch(name)) and match["rank"])
    return Commit({name: found.files[name] for name in ranks}, found.began)


def committed(path: Path) -> Commit | None:
    """Like :func:`files_of`, but returns ``None`` if there is no index, and no files if it cannot be read."""
    if not is_file(path):
        return None
    try:
        return files_of(path)
    except TensorferryError as e:
        logger.warning(
            "the index of the checkpoint that is replaced cannot be read, so its files are not removed: %s", e
        )
        return Commit({})


@functools.cache
def machine() -> str:
    """Returns 8 hexadecimal digits that identify the running kernel, which is what holds the locks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = secrets.token_bytes(16)
    return hashlib.sha256(boot).hexdigest()[:8]


def new_id() -> str:
    """Returns a new unique id for the file names of one save: the machine's 8 hexadecimal digits and 12 random ones."""
    return machine() + secrets.token_hex(_RANDOM_DIGITS // 2)


def is_ours(name: str) -> bool:
    """Whether a file of this name was written by a save of this package, completely or in part."""
    return _OURS.fullmatch(name) is not None


@contextlib.contextmanager
def holding(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """While the block runs, keeps other saves from removing these files, even if their writer is dead already.

    It locks those of the files that were written on this machine.

    Args:
        folder: the folder of the files
        names: their names

    Raises:
        IncompleteCheckpoint: one of the files is gone
    """
    with contextlib.ExitStack() as stack:
        for name in sorted(names):
            found = _OURS.fullmatch(name)
            if found and (found["id"] or "").startswith(machine()):
                with contextlib.suppress(OSError):
                    file = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                    stack.callback(os.close, file)
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        for name in sorted(names):
            if not is_file(folder / name):
                raise IncompleteCheckpoint(
                    f"{folder}: {name}, which this save has written, was removed by another process"
                )
        yield


def remove(folder: Path, names: Iterable[str]) -> None:
    """Removes files that are no longer needed; logs those that cannot be removed."""
    for name in names:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as e:
            # Only a warning: the new checkpoint is complete all the same.
            logger.warning("cannot remove %s, which is no longer needed: %s", folder / name, e)


def remove_leftovers(
    folder: Path, now: float, rank: int | None, kept: set[str], needed: Callable[[], set[str]]
) -> None:
    """Removes the files that killed saves have left.

    Args:
        folder: the checkpoint folder
        now: the current time in seconds, by the clock of the file system
        rank: removes files of this rank only, where ranks save without a coordinator; ``None`` removes those of all
        kept: names of files that are not removed
        needed: returns the names of the files that the current index names; called with the candidates locked
    """
    try:
        entries = sorted(os.listdir(folder))
    except OSError as e:
        logger.warning("cannot look for leftovers in %s: %s", folder, e)
        return
    left = [name for name in entries if name not in kept and _may_be_left(name, rank)]
    for first in range(0, len(left), _BATCH):
        with contextlib.ExitStack() as stack:
            dead = [name for name in left[first : first + _BATCH] if _is_dead(folder / name, now, stack)]
            if not dead:
                continue
            try:
                # Read only after locking: a writer that has released its locks may have written its index just before.
                spared = needed()
            except TensorferryError as e:
                logger.warning("the files that killed saves have left in %s are not removed: %s", folder, e)
                return
            remove(folder, [name for name in dead if name not in spared])


def remove_replaced(index: Path, before: Commit | None, files: set[str], rank: int | None) -> None:
    """Removes the files that a new index has replaced, and those that killed saves have left.

    Args:
        index: the new index
        before: the commit of the index that it has replaced
        files: the files that it names
        rank: as for :func:`remove_leftovers`
    """
    folder = index.parent
    remove(folder, [] if before is None else [name for name in before.files if name not in files])
    try:
        now = index.stat().st_mtime
    except OSError:
        return
    remove_leftovers(folder, now, rank, files, lambda: set(files_of(index).files))


def _may_be_left(name: str, rank: int | None) -> bool:
    found = _OURS.fullmatch(name)
    if found is None or (name.startswith("index") and not name.endswith(".partial")):
        return False
    return rank is None or name.startswith((f"rank{rank:05d}-", f"index-rank{rank:05d}."))


def _is_dead(path: Path, now: float, stack: contextlib.ExitStack) -> bool:
    """Whether the file's writer is dead. The file stays locked until ``stack`` is closed."""
    found = _OURS.fullmatch(path.name)
    assert found is not None
    try:
        about = path.lstat()
        age = now - about.st_mtime
        if not stat.S_ISREG(about.st_mode) or age < _GRACE_S:
            return False
        # Opened for writing, because NFS grants an exclusive lock only then.
        file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    stack.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return e.errno not in (errno.EWOULDBLOCK, errno.EACCES) and age > _ABANDONED_S
    writer = found["id"] or found["partial"] or found["marker"] or ""
    return writer.startswith(machine()) or age > _ABANDONED_S
