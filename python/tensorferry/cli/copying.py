"""Copies of checkpoints between folders and object stores: the same files, byte for byte, and the index last."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .._native import _file_damage
from ..dcp import marker
from ..errors import CorruptCheckpoint, IncompleteCheckpoint, InvalidArgument, SourceChanged
from ..storage import commits
from ..storage.folder import INDEX
from ..storage.objects.commit import put_new
from ..storage.objects.download import download_file
from ..storage.objects.place import ObjectPlace
from ..storage.objects.upload import upload_file
from ..storage.pending import pending
from ..storage.places import AnyPlace
from ..storage.whole_files import is_file, listed, sync_folder
from .places import CheckpointKind, Place

logger = logging.getLogger("tensorferry")

#: What is one file and not a folder.
_FILES = (CheckpointKind.CONTAINER, CheckpointKind.ARCHIVE)


def copy(place: Place, target: AnyPlace, *, verify: bool = True) -> int:
    """Copies a checkpoint to where nothing is; returns how many bytes it has.

    Args:
        place: the checkpoint
        target: a new file or folder, or a place in a store where nothing is
        verify: compare what was read with its checksums, where it has some

    Raises:
        InvalidArgument: something is there already, or neither is in a store
        TensorferryError: it cannot be read or written, or is damaged
    """
    source = place.path
    if isinstance(source, Path) and isinstance(target, Path):
        raise InvalidArgument("this copies between folders and object stores: of two folders, use cp")
    if isinstance(source, ObjectPlace) and isinstance(target, ObjectPlace):
        with local(place) as here:
            return copy(here, target, verify=verify)
    if isinstance(target, Path):
        with pending(target, folder=place.kind not in _FILES) as partial:
            return _download(place, partial, verify=verify)
    assert isinstance(source, Path)
    return _upload(place, target, verify=verify)


@contextlib.contextmanager
def local(place: Place, *, verify: bool = True) -> Iterator[Place]:
    """Yields a copy of a checkpoint in a temporary folder for as long as the block runs; a local one itself."""
    if not isinstance(place.path, ObjectPlace):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="tensorferry-") as folder:
        copied = Path(folder) / (place.path.name or "checkpoint")
        if place.kind not in _FILES:
            copied.mkdir()
        _download(place, copied, verify=verify)
        yield Place(place.kind, str(copied))


def _files_of(place: Place) -> list[str]:
    """Returns the names of a checkpoint's files in its folder, the index last."""
    folder = place.path
    if place.layout in (CheckpointKind.CHECKPOINT, CheckpointKind.DISTRIBUTED) and is_file(folder / INDEX):
        names = list(commits.files_of(folder / INDEX).files)
        there = set(listed(folder))
        if missing := [name for name in names if name not in there]:
            raise IncompleteCheckpoint(f"{folder} is incomplete: {', '.join(missing)} is missing")
        more = [name for name in (marker.NAME, "metadata.json", "common.pt") if name in there]
        return [*names, *more, INDEX]
    names = [name for name in listed(folder) if is_file(folder / name)]
    indexes = [name for name in names if name in (marker.NAME, "model.safetensors.index.json")]
    return [*(name for name in names if name not in indexes), *indexes]


def _download(place: Place, target: Path, *, verify: bool) -> int:
    source = place.path
    assert isinstance(source, ObjectPlace)
    if place.kind in _FILES:
        return _download_file(source, target, verify=verify)
    total = 0
    for name in _files_of(place):
        total += _download_file(source / name, target / name, verify=verify)
    sync_folder(target)
    return total


def _download_file(source: ObjectPlace, target: Path, *, verify: bool) -> int:
    nbytes = download_file(source, target)
    if verify and target.suffix == ".safetensors":
        _check(target, source)
    return nbytes


def _upload(place: Place, target: ObjectPlace, *, verify: bool) -> int:
    source = place.path
    assert isinstance(source, Path)
    refuse_taken(target)
    if place.kind in _FILES:
        if verify and place.kind is CheckpointKind.CONTAINER:
            _check(source, source)
        return _upload_file(target, source)
    names = _files_of(place)
    total = 0
    try:
        for name in names[:-1]:
            if verify and name.endswith(".safetensors"):
                _check(source / name, source / name)
            total += _upload_file(target / name, source / name)
    except BaseException:
        # They stay: a second copy of the same checkpoint to the same place may be under way.
        logger.warning("%s: this copy was not completed: remove what it has left there before another one", target)
        raise
    data = (source / names[-1]).read_bytes()
    with _refusing(target):
        put_new(target / names[-1], data)
    return total + len(data)


def _upload_file(target: ObjectPlace, source: Path) -> int:
    """Uploads a file to where nothing is; returns its length."""
    with _refusing(target):
        return upload_file(target, source)


@contextlib.contextmanager
def _refusing(target: ObjectPlace) -> Iterator[None]:
    """Says of an object that was not there before that something is there."""
    try:
        yield
    except SourceChanged as e:
        raise _taken(target) from e


def refuse_taken(target: AnyPlace) -> None:
    """Refuses a place in a store where anything is: an object, or objects below it; of other places it knows nothing.

    Raises:
        InvalidArgument: something is there
        TensorferryError: the store does not answer, or refuses
    """
    if isinstance(target, ObjectPlace) and ((target.key and target.is_file()) or target.is_dir()):
        raise _taken(target)


def _check(path: Path, name: AnyPlace) -> None:
    if damaged := _file_damage(path):
        raise CorruptCheckpoint(f"{name} is damaged at {len(damaged)} places: see tensorferry verify")


def _taken(target: AnyPlace) -> InvalidArgument:
    return InvalidArgument(f"{target}: something is there already: choose another place, or remove it")
