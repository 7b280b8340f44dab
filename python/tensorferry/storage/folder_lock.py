"""The lock of a checkpoint's folder, under which its index is replaced."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from .._fork import ForkSafeLock
from .._reentry import CallMark
from ..errors import SystemRefused
from .objects.place import ObjectPlace
from .places import AnyPlace

#: Seconds for which others may keep a folder locked, which a commit does for a moment.
_LOCK_S = 60.0
#: Seconds between two tries to lock a folder, at first and at most.
_SOON, _LATE = 0.001, 0.1

#: Held between the second reading of an index and the rename: there may be file systems without any locks.
_committing = ForkSafeLock()
#: A signal handler that commits in the middle of a commit would wait for the lock of its own thread.
_in_commit = CallMark("the commit of a checkpoint")


@contextlib.contextmanager
def alone_in(folder: AnyPlace) -> Iterator[None]:
    """While the block runs, no other thread or process of this machine replaces an index in ``folder``.

    In a store, nothing is locked; where the file system has no locks, threads of this process alone are kept out.

    Raises:
        InvalidArgument: the calling thread is in such a block already, of whichever folder
        SystemRefused: another process keeps the folder locked, or it cannot be opened
    """
    if isinstance(folder, ObjectPlace):
        # A store has no locks: its writes are conditional instead.
        with _in_commit.held():
            yield
        return
    with _in_commit.held(), _locked(folder), _committing.held():
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder (``flock``) while the block runs."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise SystemRefused(e.errno, f"the folder {folder} cannot be opened: {e.strerror}") from e
    try:
        is_locked = lock(opened, fcntl.LOCK_EX, f"the folder {folder}", "it commits a checkpoint")
        try:
            yield
        finally:
            # A child that was forked meanwhile has the descriptor, too, and closing it here would leave it locked.
            if is_locked:
                fcntl.flock(opened, fcntl.LOCK_UN)
    finally:
        os.close(opened)


def lock(opened: int, how: int, name: str, purpose: str) -> bool:
    """Waits until it has locked an opened file or folder; false where the file system has no locks.

    Args:
        opened: its descriptor
        how: ``fcntl.LOCK_EX`` or ``fcntl.LOCK_SH``
        name: how a message names it
        purpose: for what others lock it, in a message

    Raises:
        SystemRefused: another process keeps it locked
    """
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
