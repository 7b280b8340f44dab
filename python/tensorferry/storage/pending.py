"""Outputs that are being written: their names until they are complete, and the step that gives them their own.

Every verb that writes a new file or folder goes through this module; ``pull`` has its own name for what is incomplete
(``download.py``) and shares the last step. Four rules keep what belongs to others:

- Until it is complete, an output lies in a folder of its own, ``.NAME.<id>.partial`` beside its final name, which only
  ``mkdir`` makes. ``<id>`` is that of ``names.new_id``: the machine's 8 hexadecimal digits and 12 random ones.
- The process that made the folder keeps it locked (``flock``) for as long as it lives.
- What a killed process has left is removed only if its name has this machine's id, it is a folder of this user, and its
  lock is free. Nothing else is ever removed.
- The last step is a rename that replaces nothing. What has appeared under the final name meanwhile stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from .._native import _rename_new
from ..errors import InvalidArgument, SystemRefused, TensorferryError
from .names import machine, new_id
from .places import refuse_url
from .whole_files import sync_folder

#: The longest name of an output that its pending folder's name repeats, in bytes; of longer ones it has a digest.
_LONGEST_NAME = 200
_ID = r"(?P<id>[0-9a-f]{20})"
#: How often another name is tried when a process that looks for leftovers has taken the new folder.
_ATTEMPTS = 16
#: What the system says where the file system has no rename that replaces nothing, or no links.
_NO_SUCH_RENAME = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP})


@contextlib.contextmanager
def pending(output: Path, *, folder: bool) -> Iterator[Path]:
    """Yields the path under which ``output`` is written: a folder that is there, or a file that is not there yet.

    It gets its own name when the block ends without an error, and is removed otherwise. The entries of a folder and the
    name are synced then; the block itself syncs the files that it writes.

    Args:
        output: the final name; nothing may be there, but for a ``folder`` an empty folder
        folder: whether the output is a folder

    Raises:
        InvalidArgument: something is there, before or after; another process is writing the same output; or it is a URL
        SystemRefused: it cannot be written, or the block raises an ``OSError`` that is none of this package's
    """
    refuse_url(output, "the output")
    # "." and "x/.." have no name of their own; they exist, so their real name is no other place.
    output = output if output.name not in ("", "..") else Path(os.path.realpath(output))
    with _typed_errors(output):
        empty = _check_free(output, folder)
        _remove_leftovers(output)
        held = _Held(output)
        try:
            # A folder within the locked one: what commits into it locks it itself.
            content = held.path / output.name
            if folder:
                content.mkdir()
            yield content
            if folder:
                sync_folder(content)
            _rename_to_final(content, output, empty)
            sync_folder(output.parent)
        finally:
            held.close()


def rename_new(path: Path, target: Path) -> None:
    """Renames a file or folder to ``target``, where nothing may be: whatever is there stays.

    Where the file system has no such rename, a file gets its name by a link or, without links, takes the place of an
    empty one that this process has made; and a folder takes the place of an empty one that ``mkdir`` has made.

    Raises:
        FileExistsError: something is there
        OSError: the system refuses
    """
    number = _rename_new(path, target)
    if number == 0:
        return
    if number not in _NO_SUCH_RENAME:
        raise OSError(number, os.strerror(number), os.fspath(target))
    if path.is_dir() and not path.is_symlink():
        target.mkdir()
        try:
            path.rename(target)
        except OSError as e:
            with contextlib.suppress(OSError):
                target.rmdir()
            if e.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target)) from e
            raise
        return
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError as e:
        if e.errno not in _NO_LINKS:
            raise
        # Only this process makes the file that is replaced then.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        path.replace(target)
        return
    path.unlink()


class _Held:
    """A new folder beside ``output`` with a name of its own, locked until it is closed; then it is removed.

    Raises:
        OSError: it cannot be made
    """

    def __init__(self, output: Path) -> None:
        for _ in range(_ATTEMPTS):
            self.path = output.with_name(f".{stem(output)}.{new_id()}.partial")
            self.path.mkdir()
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            if self._lock():
                return
            os.close(self._fd)
        raise OSError(errno.EAGAIN, "another process removes what this one makes")

    def _lock(self) -> bool:
        """Whether the folder is this process's: one that looks for leftovers may have taken it first."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            # A file system without locks, on which nothing that is left is ever removed.
            return True
        return _is_at(self._fd, self.path)

    def close(self) -> None:
        """Removes what is left under the name, and gives the lock back."""
        if _is_at(self._fd, self.path):
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def stem(output: Path) -> str:
    """Returns how the names of what is not complete yet begin: with the name of the output, or a digest of it."""
    name = os.fsencode(output.name)
    return output.name if len(name) <= _LONGEST_NAME else hashlib.blake2b(name, digest_size=16).hexdigest()


@contextlib.contextmanager
def _typed_errors(output: Path) -> Iterator[None]:
    """Raises an ``OSError`` of the block as ``SystemRefused``, which names the output."""
    try:
        yield
    except OSError as e:
        if isinstance(e, TensorferryError):
            raise
        raise SystemRefused(e.errno, f"{output}: cannot be written: {e.strerror or e}") from e


def _check_free(output: Path, folder: bool) -> os.stat_result | None:
    """Returns the status of the empty folder that the output is to replace; ``None`` if nothing has the name.

    Raises:
        InvalidArgument: something else has the name
    """
    try:
        status = output.lstat()
    except FileNotFoundError:
        return None
    if folder and output.is_dir() and not output.is_symlink() and not any(output.iterdir()):
        return status
    raise InvalidArgument(f"{output} exists already: choose another name")


def _rename_to_final(content: Path, output: Path, empty: os.stat_result | None) -> None:
    """Gives the complete ``content`` its final name, where at most the empty folder with status ``empty`` may be."""
    try:
        if empty is not None and _is_same(output, empty):
            # This rename, too, replaces nothing but a folder that is empty.
            os.rename(content, output)
        else:
            rename_new(content, output)
    except OSError as e:
        if e.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise InvalidArgument(
            f"{output} has appeared while it was being written, and stays as it is; what was written is removed: "
            "choose another name"
        ) from None


def _is_same(path: Path, about: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), about)
    except OSError:
        return False


def _is_at(fd: int, path: Path) -> bool:
    return _is_same(path, os.fstat(fd))


def _remove_leftovers(output: Path) -> None:
    """Removes what killed processes have left of ``output``.

    Raises:
        InvalidArgument: a process is writing it
    """
    ours = re.compile(re.escape(f".{stem(output)}.") + _ID + r"\.partial")
    try:
        names = os.listdir(output.parent)
    except PermissionError:
        # A folder that may be written to and not be listed.
        return
    for name in names:
        found = ours.fullmatch(name)
        if found is not None and found["id"].startswith(machine()):
            _remove_if_dead(output.parent / name, output)


def _remove_if_dead(left: Path, output: Path) -> None:
    """Removes the pending folder ``left`` of ``output`` if the process that made it is dead, or raises if it lives."""
    try:
        fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_uid == os.geteuid() and _is_at(fd, left):
            shutil.rmtree(left, ignore_errors=True)
    except BlockingIOError:
        raise InvalidArgument(f"another process is writing {output}: wait for it, or choose another name") from None
    except OSError:
        # A file system without locks: nobody knows whether its writer is at work.
        return
    finally:
        os.close(fd)
