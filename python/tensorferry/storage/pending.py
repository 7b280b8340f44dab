"""Outputs that are being written: their names until they are complete, and the step that gives them their own.

Every verb that writes a new file or folder goes through this module; ``pull`` has its own name for what is incomplete
(``download.py``) and shares the last step. Four rules keep what belongs to others:

- Until it is complete, an output lies in a folder of its own, ``.NAME.<machine>.partial`` beside its final name.
- The process that writes keeps that folder locked (``flock``) for as long as it lives.
- What a killed process of this machine has left there is removed by the next one that writes the same output, if it is
  this user's and its lock is free. Nothing else is ever removed.
- The last step is a rename that replaces nothing. What has appeared under the final name meanwhile stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .._native import _rename_new
from ..errors import InvalidArgument, SystemRefused, TensorferryError
from .names import machine
from .places import refuse_url
from .whole_files import sync_folder

#: The longest name of an output that its pending folder's name repeats, in bytes; of longer ones it has a digest.
_LONGEST_NAME = 200
#: What the system says where the file system has no rename that replaces nothing.
_NO_SUCH_RENAME = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


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
        place = output.with_name(f".{stem(output)}.{machine()}.partial")
        fd = _claim(place, output)
        try:
            # A folder within the locked one: what commits into it locks it itself.
            content = place / output.name
            if folder:
                content.mkdir()
            yield content
            if folder:
                sync_folder(content)
            _rename_to_final(content, output, empty)
            sync_folder(output.parent)
        finally:
            if _is_at(fd, place):
                shutil.rmtree(place, ignore_errors=True)
            os.close(fd)


def rename_new(path: Path, target: Path) -> None:
    """Renames a file or folder to ``target``, where nothing may be: whatever is there stays.

    Where the file system has no such rename, what is renamed takes the place of an empty file or folder that only this
    process has made.

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
    else:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    path.replace(target)


def _claim(place: Path, output: Path) -> int:
    """Makes the folder in which an output is written, or takes over that of a dead process; returns its descriptor.

    Raises:
        InvalidArgument: another process is writing, or may be
        OSError: it cannot be made
    """
    is_new = True
    try:
        place.mkdir()
    except FileExistsError:
        is_new = False
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        is_locked = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidArgument(f"another process is writing {output}: wait for it, or choose another name") from None
        except OSError:
            is_locked = False  # by a file system without locks
        if not _is_at(fd, place):
            raise InvalidArgument(f"another process has just been writing {output}: look for it, or try again")
        if not is_new:
            if not is_locked or os.fstat(fd).st_uid != os.geteuid():
                raise InvalidArgument(f"{place} is another process's: remove it if none is writing {output}")
            for left in place.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        return fd
    except BaseException:
        os.close(fd)
        raise


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
