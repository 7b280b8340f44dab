"""Which files of a folder its index names, and which of the others nobody needs any more.

A folder may have several writers: saves of one job that overlap, two jobs that were given the same path, a coordinator
that was thought dead. Three rules keep what they leave whole, without a lock that all of them would have to know:

- Every file a save writes has a name that nobody else chooses.
- A save removes files that the index named which it has replaced. No save that is still at work has files among them.
- Other files are removed only if their writer is dead. Writers keep their files locked (``flock``) until their save is
  over. A lock that is free says so where it was taken on this machine, which is why names tell the machine; of files
  from other machines, which may share no locks with this one, only those that nobody has touched for a day are removed.
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
    r"|index(-rank\d{5,})?\.safetensors(\.(?P<partial>[0-9a-f]{20}))?)(\.partial)?"
)
_RANDOM_DIGITS = 12
#: A file that was written to so lately may belong to a writer that is about to lock it.
_GRACE_S = 60.0
#: After so long without a write, the writer of a file is dead, wherever it ran.
_ABANDONED_S = 24 * 3600.0
#: Files that are locked at a time.
_BATCH = 64


@dataclass(frozen=True)
class Commit:
    """What an index says of its files.

    Attributes:
        files: names of the files, and the checksum of the header of each; ``None`` where the index is of a version that
            did not note it
        began: when the save began, in nanoseconds since the epoch by the clock of who coordinated it
    """

    files: dict[str, int | None]
    began: int = 0

    def encode(self) -> bytes:
        """As it stands in the index."""
        files = {name: f"{header or 0:016x}" for name, header in self.files.items()}
        return json.dumps({"began": self.began, "files": files}, separators=(",", ":")).encode()


def read(path: Path) -> tuple[bytes, Commit]:
    """The index in the file ``path``, still encoded, and what it says of its files. The file is opened once.

    Raises:
        ProtocolError: it is no index
        CorruptCheckpoint: it does not match its checksums
        SystemRefused: it cannot be read
    """
    text, files = _file_entries(path, [INDEX, INDEX_FILES])
    if text is None:
        raise ProtocolError(f"{path} is no index: it has no entry {INDEX!r}")
    return text, _decode(path, text, files)


def _decode(path: Path, text: bytes, files: bytes | None) -> Commit:
    try:
        if files is None:
            return Commit(dict.fromkeys(map(str, json.loads(text)["sources"])))
        told: Any = json.loads(files)
        named = {str(name): int(header, 16) for name, header in told["files"].items()}
        if not all(0 <= header < 1 << 64 for header in named.values()):
            raise ValueError("a checksum has 64 bits")
        return Commit(dict(named), int(told["began"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ProtocolError(f"{path}: its index cannot be read ({type(e).__name__}: {e})") from e


def files_of(path: Path) -> Commit:
    """What the index ``path`` says of its files.

    Only files of ranks are in it, whatever the index says: what it names may be removed.

    Raises:
        TensorferryError: it cannot be read
    """
    # Of an index of many tensors, this is the small part.
    (files,) = _file_entries(path, [INDEX_FILES])
    found = read(path)[1] if files is None else _decode(path, b"", files)
    ranks = (name for name in found.files if (match := _OURS.fullmatch(name)) and match["rank"])
    return Commit({name: found.files[name] for name in ranks}, found.began)


def committed(path: Path) -> Commit | None:
    """As :func:`files_of`, ``None`` if there is no index. One that is broken names no files."""
    if not path.is_file():
        return None
    try:
        return files_of(path)
    except TensorferryError as e:
        logger.warning("the checkpoint that is replaced cannot be read, and its files are left where they are: %s", e)
        return Commit({})


@functools.cache
def _machine() -> str:
    """The running kernel, which is who knows of locks: 8 hexadecimal digits."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = secrets.token_bytes(16)
    return hashlib.sha256(boot).hexdigest()[:8]


def new_id() -> str:
    """What sets the names of one writer's files apart: 20 hexadecimal digits, which begin with the machine's."""
    return _machine() + secrets.token_hex(_RANDOM_DIGITS // 2)


def is_ours(name: str) -> bool:
    """Whether a file of this name was written by a save of this package, or is the beginning of one that was."""
    return _OURS.fullmatch(name) is not None


@contextlib.contextmanager
def holding(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """Keeps files of this machine from being removed as somebody's leftovers, whose writer may be dead already.

    Raises:
        IncompleteCheckpoint: one of the files is gone
    """
    with contextlib.ExitStack() as stack:
        for name in sorted(names):
            found = _OURS.fullmatch(name)
            if found and (found["id"] or "").startswith(_machine()):
                with contextlib.suppress(OSError):
                    file = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                    stack.callback(os.close, file)
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        for name in sorted(names):
            if not (folder / name).is_file():
                raise IncompleteCheckpoint(f"{folder}: {name}, which this save has written, was removed by somebody")
        yield


def remove(folder: Path, names: Iterable[str]) -> None:
    """Removes files that nobody needs; what cannot be removed is logged."""
    for name in names:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as e:
            # The checkpoint is there all the same.
            logger.warning("cannot remove %s, which is of no use any more: %s", folder / name, e)


def remove_leftovers(
    folder: Path, now: float, rank: int | None, kept: set[str], needed: Callable[[], set[str]]
) -> None:
    """Removes what saves have left whose writers are dead.

    Args:
        folder: where
        now: the time by the clock of the file system
        rank: only what this rank has written, where ranks save without each other
        kept: files that are of use
        needed: gives the files that are of use by now, though nobody writes to them
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
                # Only with the locks: who has let go of them may have written its index just before.
                spared = needed()
            except TensorferryError as e:
                logger.warning("what killed saves have left in %s stays there: %s", folder, e)
                return
            remove(folder, [name for name in dead if name not in spared])


def _may_be_left(name: str, rank: int | None) -> bool:
    found = _OURS.fullmatch(name)
    if found is None or (name.startswith("index") and not name.endswith(".partial")):
        return False
    return rank is None or name.startswith((f"rank{rank:05d}-", f"index-rank{rank:05d}."))


def _is_dead(path: Path, now: float, stack: contextlib.ExitStack) -> bool:
    """Whether nobody writes to the file any more; it is locked then, until the end of ``stack``."""
    found = _OURS.fullmatch(path.name)
    assert found is not None
    try:
        about = path.lstat()
        age = now - about.st_mtime
        if not stat.S_ISREG(about.st_mode) or age < _GRACE_S:
            return False
        # For writing: NFS gives a lock like this to nobody else.
        file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    stack.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return e.errno not in (errno.EWOULDBLOCK, errno.EACCES) and age > _ABANDONED_S
    return (found["id"] or found["partial"] or "").startswith(_machine()) or age > _ABANDONED_S
