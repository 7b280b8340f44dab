"""Copies of files and whole checkpoints between folders and object stores: byte for byte, the index last."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from ..errors import InvalidArgument, SourceChanged, SystemRefused, TensorferryError
from ..storage.objects.bucket import put_new
from ..storage.objects.download import download_file
from ..storage.objects.place import ObjectPlace
from ..storage.objects.upload import upload_file
from ..storage.places import AnyPlace
from ..storage.whole_files import read_whole, sync_folder, write_whole

logger = logging.getLogger("tensorferry")


#: Takes a file, and what messages call it; raises if it may not be copied.
Check: TypeAlias = Callable[[Path, AnyPlace], None]


def unchecked(path: Path, name: AnyPlace) -> None:
    """Checks nothing: a :data:`Check`."""
    del path, name


def refuse_taken(target: AnyPlace, *, file: bool) -> None:
    """Refuses a place in a store where anything is: an object, or objects below it; of other places it knows nothing.

    Args:
        target: the place
        file: whether one object is to be written there: then it must not be the bucket itself

    Raises:
        InvalidArgument: something is there, or it is a bucket
        TensorferryError: the store does not answer, or refuses
    """
    if file:
        _require_name(target)
    if isinstance(target, ObjectPlace) and ((target.key and target.is_file()) or target.is_dir()):
        raise _taken(target)


@contextlib.contextmanager
def scratch_folder(target: AnyPlace, *, file: bool) -> Iterator[Path]:
    """Yields a folder for temporary files, in which what is then copied to ``target`` is made; removes it at the end.

    The copy refuses such places as well; here they are refused before the work.

    Raises:
        InvalidArgument, TensorferryError: as for :func:`refuse_taken`
        OSError: the folder cannot be made
    """
    refuse_taken(target, file=file)
    with tempfile.TemporaryDirectory(prefix="tensorferry-") as folder:
        yield Path(folder)


def upload_new(target: ObjectPlace, source: Path) -> int:
    """Uploads a file to where nothing is, as :func:`upload_file` does; returns its length.

    Raises:
        InvalidArgument: something is there, or it is a bucket
        TensorferryError: the file cannot be read, or the store does not answer, or refuses
    """
    _require_name(target)
    with _refusing(target):
        return upload_file(target, source)


def read_index(path: AnyPlace) -> bytes:
    """Returns the content of an index, which is read before the files that it names are listed and copied.

    Raises:
        SystemRefused: it cannot be read
        TensorferryError: the store does not answer, or refuses
    """
    try:
        return read_whole(path, None)
    except TensorferryError:
        raise
    except OSError as e:
        raise SystemRefused(e.errno, f"{path} cannot be read: {e.strerror}") from e


def upload_folder(
    source: Path, target: ObjectPlace, names: Sequence[str], check: Check = unchecked, index: bytes | None = None
) -> int:
    """Uploads files of a folder to where nothing is; returns how many bytes they have.

    What a copy that fails has uploaded stays there.

    Args:
        source: the folder
        target: where to
        names: the names of the files; the last one makes the copy a checkpoint, and is written last
        check: called with each file but the last one before it is uploaded; what it raises ends the copy
        index: what :func:`read_index` has read of the last one, which must still be the same then

    Raises:
        InvalidArgument: something is there
        SourceChanged: the index is another one by now
        TensorferryError: a file cannot be read, or the store does not answer, or refuses
    """
    refuse_taken(target, file=False)
    total = 0
    try:
        for name in names[:-1]:
            check(source / name, source / name)
            total += upload_new(target / name, source / name)
        data = _last(source / names[-1], index)
    except BaseException:
        # They stay: a second copy of the same checkpoint to the same place may be under way.
        logger.warning("%s: this copy was not completed: remove what it has left there before another one", target)
        raise
    with _refusing(target):
        put_new(target / names[-1], data)
    return total + len(data)


def download_folder(
    source: ObjectPlace, target: Path, names: Sequence[str], check: Check = unchecked, index: bytes | None = None
) -> int:
    """Downloads objects into a folder; returns how many bytes they have.

    What a copy that fails has downloaded stays there, the incomplete file included.

    Args:
        source: where they are
        target: the folder, in which no file has one of the names
        names: their names, in the order in which they are downloaded
        check: called with each file once it is there; what it raises ends the copy
        index: what :func:`read_index` has read of the last one, which must still be the same then

    Raises:
        SourceChanged: the index is another one by now
        TensorferryError: an object cannot be read, or a file not be written
    """
    total = 0
    for name in names if index is None else names[:-1]:
        total += download_file(source / name, target / name)
        check(target / name, source / name)
    if index is not None:
        total += _write_last(target / names[-1], _last(source / names[-1], index))
        check(target / names[-1], source / names[-1])
    sync_folder(target)
    return total


def _last(path: AnyPlace, index: bytes | None) -> bytes:
    """Returns the content of the file that is copied last; of an index, that which was read first.

    The files that were copied are those of this index only if no save has put another one in its place.
    """
    data = read_index(path)
    if index is not None and data != index:
        raise SourceChanged(f"{path.parent}: a save has replaced the checkpoint while it was being copied: try again")
    return data


def _write_last(path: Path, data: bytes) -> int:
    """Writes a new file, whose bytes are on the disk then; returns its length."""
    try:
        write_whole(path, data, path.with_name(f"{path.name}.partial"))
    except OSError as e:
        raise SystemRefused(e.errno, f"{path}: cannot be written: {e.strerror}") from e
    return len(data)


def _require_name(target: AnyPlace) -> None:
    if isinstance(target, ObjectPlace) and not target.key:
        raise InvalidArgument(f"{target} is a bucket: name the object to write, as in {target}/state.safetensors")


@contextlib.contextmanager
def _refusing(target: ObjectPlace) -> Iterator[None]:
    """Says of an object that was not there before that something is there."""
    try:
        yield
    except SourceChanged as e:
        raise _taken(target) from e


def _taken(target: AnyPlace) -> InvalidArgument:
    return InvalidArgument(f"{target}: something is there already: choose another place, or remove it")
