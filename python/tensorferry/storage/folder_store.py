"""The folder of a checkpoint, as a backend of ``stores.py``: files, their locks, and renames."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from .._native import _check_machine_has
from .._reentry import CallLock
from ..errors import IncompleteCheckpoint, ProtocolError, SystemRefused
from .container import Container
from .names import machine, new_id, parts_of_name, writer_of

logger = logging.getLogger("tensorferry")

#: Seconds for which others may keep a folder or a file locked, which they do for a moment.
_LOCK_S = 60.0
#: Seconds between two tries to lock it, at first and at most.
_SOON, _LATE = 0.001, 0.1
#: Seconds since the last write within which a writer may still be about to lock its file.
_GRACE_S = 60.0
#: How many files are locked at a time.
_BATCH = 64

#: Held between the second reading of an index and the rename: there may be file systems without any locks. A signal
#: handler that commits in the middle of a commit is refused.
_committing = CallLock("the commit of a checkpoint", fork_safe=True)


class FolderStore:
    """A folder."""

    #: Whether a write may be made although it has failed.
    may_be_late = False
    #: Whether an index is replaced on a condition, instead of under a lock.
    compares = False
    absent = None
    #: Seconds between two looks into it, at first and at most.
    pauses = 0.005, 0.25

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entries(self, *beginnings: str) -> dict[str, os.stat_result]:
        """Returns all that is in it; its names need no server that is asked for few of them."""
        del beginnings
        found = {}
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found[entry.name] = entry.stat(follow_symlinks=False)
        except OSError as e:
            raise SystemRefused(e.errno, f"the folder {self.folder} cannot be listed: {e.strerror}") from e
        return found

    def subfolders(self) -> list[str]:
        """Returns the names of the folders in it; links to folders are among them."""
        try:
            return [name for name in os.listdir(self.folder) if os.path.isdir(self.folder / name)]
        except OSError as e:
            raise SystemRefused(e.errno, f"the folder {self.folder} cannot be listed: {e.strerror}") from e

    def stat(self, name: str) -> os.stat_result | None:
        """Returns what the system says of a file."""
        path = self.folder / name
        try:
            about = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise SystemRefused(e.errno, f"{path} cannot be examined: {e.strerror}") from e
        return about if stat.S_ISREG(about.st_mode) else None

    def open(self, name: str) -> tuple[Path | None, None]:
        """Returns the path of a file, which needs no version: whoever replaces it has the folder locked."""
        return (None if self.stat(name) is None else self.folder / name), None

    def read(self, name: str, most: int | None) -> bytes:
        """Returns the content of a file."""
        path = self.folder / name
        with open_at_once(path) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ProtocolError(f"{path} is not a regular file")
            if most is None or about.st_size <= most:
                _check_machine_has(about.st_size, str(path))
                # One more, should it grow meanwhile.
                data = file.read(about.st_size + 1)
                if len(data) == about.st_size:
                    return data
                how = "grew" if len(data) > about.st_size else "was cut off"
                raise ProtocolError(f"{path} {how} while it was read")
        raise ProtocolError(f"{path} has {about.st_size} bytes, and such a file has at most {most}: it is damaged")

    def write(
        self, name: str, data: bytes, partial: str, *, synced: bool = True, modified_ns: int | None = None
    ) -> None:
        """Writes a file under another name, and renames it."""
        path = self.folder / partial
        path.unlink(missing_ok=True)
        try:
            # Exclusively: what a link of that name leads to is not written.
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                if modified_ns is not None:
                    os.utime(path, ns=(modified_ns, modified_ns))
                if synced:
                    os.fsync(file.fileno())
            path.replace(self.folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, as many as it can; a link is removed, and what it leads to stays."""
        refused: OSError | None = None
        for name in names:
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as e:
                refused = SystemRefused(e.errno, f"{self.folder / name}: cannot be removed: {e.strerror}")
        if refused is not None:
            raise refused

    @contextlib.contextmanager
    def holding(self, names: Iterable[str]) -> Iterator[Mapping[str, os.stat_result]]:
        """Locks files that were written on this machine; of one that is about to be removed, waits whether it goes."""
        with contextlib.ExitStack() as stack:
            for name in sorted(names):
                found = parts_of_name(name)
                if found and (found["id"] or "").startswith(machine()):
                    _hold(self.folder / name, stack)
            for name in sorted(names):
                if self.stat(name) is None:
                    raise IncompleteCheckpoint(
                        f"{self.folder}: {name}, which this save has written, was removed by another process"
                    )
            yield self.entries()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder (``flock``); where the file system has no locks, threads of this process are kept out."""
        _committing.check()
        with self._locked(), _committing.held():
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            opened = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise SystemRefused(e.errno, f"the folder {self.folder} cannot be opened: {e.strerror}") from e
        try:
            is_locked = _lock(opened, fcntl.LOCK_EX, f"the folder {self.folder}", "it commits a checkpoint")
            try:
                yield
            finally:
                # A child that was forked meanwhile has the descriptor, too, and closing it here would leave it locked.
                if is_locked:
                    fcntl.flock(opened, fcntl.LOCK_UN)
        finally:
            os.close(opened)

    @contextlib.contextmanager
    def new_index(self, name: str, content: Container) -> Iterator[Callable[[Any], float]]:
        """Writes the index under another name; it is renamed under the lock."""
        index, partial = self.folder / name, self.folder / f"{name}.{new_id()}.partial"
        # While this object lives, the file is locked.
        written = content.write(partial, partial=partial, threads=1)

        def put(version: object) -> float:
            del version
            try:
                now = partial.stat().st_mtime
                os.rename(partial, index)
            except OSError as e:
                raise SystemRefused(e.errno, f"{index}: cannot be put in its place: {e.strerror}") from e
            return now

        try:
            yield put
        finally:
            del written
            with contextlib.suppress(OSError):
                partial.unlink()

    def remove_dead(
        self,
        names: Mapping[str, object],
        now: float,
        abandoned: float,
        needed: Callable[[], set[str]],
    ) -> None:
        """Removes files whose writers are dead, as their locks prove."""
        left = sorted(names)
        for first in range(0, len(left), _BATCH):
            with contextlib.ExitStack() as stack:
                batch = left[first : first + _BATCH]
                dead = [name for name in batch if _is_dead(self.folder / name, now, abandoned, stack)]
                if dead:
                    # Read only after locking: a writer that has let go may have written its index just before.
                    spared = needed()
                    self.remove([name for name in dead if name not in spared])

    def create(self) -> bool:
        """Creates the folder and its missing parents, and syncs their entries to the disk."""
        missing = []
        what = "created"
        try:
            for level in (self.folder, *self.folder.parents):
                if level.is_dir():
                    break
                missing.append(level)
            self.folder.mkdir(parents=True, exist_ok=True)
            what = "synchronised"
            for level in reversed(missing):
                FolderStore(level.parent).sync()
        except OSError as e:
            raise SystemRefused(e.errno, f"the folder {self.folder} cannot be {what}: {e.strerror}") from e
        return bool(missing)

    def sync(self) -> None:
        """Syncs the entries of the folder to the disk, where the file system can sync folders at all."""
        opened = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        except OSError as e:
            # Some file systems of FUSE and of other machines have no such thing.
            if e.errno != errno.EINVAL:
                raise
        finally:
            os.close(opened)

    def remove_if_empty(self) -> None:
        """Removes the folder if nothing is in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def open_at_once(path: str | os.PathLike[str], buffering: int = -1) -> IO[bytes]:
    """Opens a file to be read, as ``open`` does, without waiting for the other end of a pipe in its place.

    Raises:
        OSError: it cannot be opened, or is a folder
    """
    return open(path, "rb", buffering, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def _lock(opened: int, how: int, name: str, purpose: str) -> bool:
    """Waits until it has locked an opened file or folder; false where the file system has no locks."""
    end, pause = time.monotonic() + _LOCK_S, _SOON
    while True:
        try:
            fcntl.flock(opened, how | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return False
        else:
            return True
        if time.monotonic() > end:
            raise SystemRefused(
                errno.EWOULDBLOCK,
                f"another process has kept {name} locked for {_LOCK_S:g} s, as it does for a moment when {purpose}: it "
                "may be stopped. End it, and save again",
            )
        time.sleep(pause)
        pause = min(pause * 1.5, _LATE)


def _hold(path: Path, stack: contextlib.ExitStack) -> None:
    """Locks a file until ``stack`` is closed; one that is gone, or a link, which nobody takes for left, is not."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ELOOP):
            return
        raise SystemRefused(e.errno, f"{path} cannot be opened: {e.strerror}") from e
    stack.callback(os.close, file)
    _lock(file, fcntl.LOCK_SH, str(path), "it removes what killed saves have left")


def _is_dead(path: Path, now: float, abandoned: float, stack: contextlib.ExitStack) -> bool:
    """Whether the file's writer is dead. The file stays locked until ``stack`` is closed."""
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
        return e.errno not in (errno.EWOULDBLOCK, errno.EACCES) and age > abandoned
    return writer_of(path.name).startswith(machine()) or age > abandoned
