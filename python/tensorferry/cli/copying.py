"""Copies of checkpoints between folders and object stores: the same files, byte for byte, and the index last."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .._native import _file_damage
from ..dcp import marker
from ..errors import CorruptCheckpoint, IncompleteCheckpoint, InvalidArgument
from ..storage import commits
from ..storage.copies import download_folder, refuse_taken, unchecked, upload_folder, upload_new
from ..storage.folder import INDEX
from ..storage.objects.download import download_file
from ..storage.objects.place import ObjectPlace
from ..storage.pending import pending
from ..storage.places import AnyPlace
from ..storage.whole_files import is_file, listed
from .places import CheckpointKind, Place

#: What is one file and not a folder.
_FILES = (CheckpointKind.CONTAINER, CheckpointKind.ARCHIVE)


def copy(place: Place, target: AnyPlace, *, verify: bool = True) -> int:
    """Copies a checkpoint to where nothing is; returns how many bytes it has.

    What a copy that fails has written to a store stays there; in a folder, nothing stays.

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
    """Yields a copy of a checkpoint in a temporary folder for as long as the block runs; a local one itself.

    Args:
        place: the checkpoint
        verify: compare what was copied with its checksums, where it has some

    Raises:
        TensorferryError: it is incomplete or damaged, or cannot be read or copied
    """
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
    """Returns the names of a checkpoint's files in its folder, the index last.

    Where no index of this package lists them, they are all files that lie directly in the folder.

    Raises:
        IncompleteCheckpoint: a file is missing
        TensorferryError: the folder or its index cannot be read
    """
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
    check = _check_container if verify else unchecked
    if place.kind not in _FILES:
        return download_folder(source, target, _files_of(place), check)
    nbytes = download_file(source, target)
    check(target, source)
    return nbytes


def _upload(place: Place, target: ObjectPlace, *, verify: bool) -> int:
    source = place.path
    assert isinstance(source, Path)
    if place.kind not in _FILES:
        return upload_folder(source, target, _files_of(place), _check_container if verify else unchecked)
    refuse_taken(target, file=True)
    if verify and place.kind is CheckpointKind.CONTAINER:
        _check(source, source)
    return upload_new(target, source)


def _check_container(path: Path, name: AnyPlace) -> None:
    if path.suffix == ".safetensors":
        _check(path, name)


def _check(path: Path, name: AnyPlace) -> None:
    if damaged := _file_damage(path):
        raise CorruptCheckpoint(f"{name} is damaged at {len(damaged)} places: see tensorferry verify")
