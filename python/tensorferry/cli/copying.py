"""Copies of checkpoints between folders and object stores: the same files, byte for byte, and the index last."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .._native import _file_header
from .._validate import brief
from ..dcp import marker
from ..errors import CorruptCheckpoint, IncompleteCheckpoint, InvalidArgument, SystemRefused
from ..storage import commits
from ..storage.folder import INDEX
from ..storage.objects.download import download_file
from ..storage.objects.place import ObjectPlace
from ..storage.pending import pending
from ..storage.places import AnyPlace
from ..storage.settled import read_settled
from ..storage.stores import store_of
from ..storage.whole_files import is_file, listed, subfolders
from .copies import Check, download_folder, read_index, refuse_taken, unchecked, upload_folder, upload_new
from .intact import require_undamaged
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
        SourceChanged: a save has replaced the checkpoint meanwhile
        TensorferryError: it cannot be read or written, or is damaged
    """
    source = place.path
    if isinstance(source, Path) and isinstance(target, Path):
        raise InvalidArgument("this copies between folders and object stores: of two folders, use cp")
    if isinstance(source, ObjectPlace) and isinstance(target, ObjectPlace):
        with local(place, verify=verify) as here:
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
        SourceChanged: a save has replaced it meanwhile
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


@dataclass(frozen=True)
class _Files:
    """The files of a checkpoint.

    Attributes:
        names: their names in its folder, the index last
        headers: the checksum of the header of each file that the index names, where it says them
        index: the content of the index, if there is one
    """

    names: list[str]
    headers: dict[str, int]
    index: bytes | None

    def check(self, path: Path, name: AnyPlace) -> None:
        """Refuses a file that is damaged, or not the one that the index names: a :data:`Check`."""
        if path.suffix != ".safetensors":
            return
        header = self.headers.get(path.name)
        if header is not None and _file_header(path) != header:
            raise CorruptCheckpoint(f"{name}: it is not the file that the index names")
        require_undamaged(path, name=name)


def _files_of(place: Place) -> _Files:
    """Returns the files of a checkpoint.

    Where no index of this package lists them, they are all files that lie directly in the folder.

    Raises:
        IncompleteCheckpoint: a file is missing
        InvalidArgument: it is a checkpoint of Megatron with folders in it
        TensorferryError: the folder or its index cannot be read
    """
    folder = place.path
    if place.layout in (CheckpointKind.CHECKPOINT, CheckpointKind.DISTRIBUTED) and is_file(folder / INDEX):
        index = read_index(folder / INDEX)
        # If a save replaces it just now, the index that is copied is not the one that is there at the end.
        names = commits.files_of(folder / INDEX).files
        there = set(listed(folder))
        if missing := [name for name in names if name not in there]:
            raise IncompleteCheckpoint(f"{folder} is incomplete: {', '.join(missing)} is missing")
        more = [name for name in (marker.NAME, "metadata.json", "common.pt") if name in there]
        return _Files([*names, *more, INDEX], names, index)
    indexes = [name for name in (marker.NAME, "model.safetensors.index.json") if is_file(folder / name)]
    if place.kind is CheckpointKind.MEGATRON and not indexes and (below := subfolders(folder)):
        # Of the backend zarr, arrays are folders.
        raise InvalidArgument(
            f"{folder} has folders in it ({brief(below[0])} for one), and this copies files alone: copy it by other "
            "means"
        )
    theirs = read_index(folder / indexes[-1]) if indexes else None
    files = [name for name in listed(folder) if name not in indexes and is_file(folder / name)]
    return _Files([*files, *indexes], {}, theirs)


def _copy_folder(place: Place, copy: Callable[[list[str], Check, bytes | None], int], *, verify: bool) -> int:
    """Copies the files of a checkpoint by ``copy``, which is given their names, a check and the index."""

    def copied() -> int:
        files = _files_of(place)
        return copy(files.names, files.check if verify else unchecked, files.index)

    return read_settled(copied, place.path, attempts=1)


def _download(place: Place, target: Path, *, verify: bool) -> int:
    source = place.path
    assert isinstance(source, ObjectPlace)
    if place.kind in _FILES:
        _require_room(source, source.stat().st_size, target)
        nbytes = download_file(source, target)
        if verify:
            require_undamaged(target, archive=place.kind is CheckpointKind.ARCHIVE, name=source)
        return nbytes

    def downloaded(names: list[str], check: Check, index: bytes | None) -> int:
        there = store_of(source).entries()
        _require_room(source, sum(there[name].st_size for name in names if name in there), target)
        return download_folder(source, target, names, check, index)

    return _copy_folder(place, downloaded, verify=verify)


def _require_room(source: ObjectPlace, nbytes: int, target: Path) -> None:
    """Refuses a copy for which the disk has no room, before the first byte of it.

    Raises:
        SystemRefused: it has none
    """
    free = shutil.disk_usage(target.parent).free
    if nbytes > free:
        raise SystemRefused(
            errno.ENOSPC,
            f"{source} has {nbytes} bytes, and {target.parent} has room for {free}: free some, or choose another "
            "folder (TMPDIR names the one for temporary copies)",
        )


def _upload(place: Place, target: ObjectPlace, *, verify: bool) -> int:
    source = place.path
    assert isinstance(source, Path)
    if place.kind not in _FILES:
        return _copy_folder(place, lambda *files: upload_folder(source, target, *files), verify=verify)
    refuse_taken(target, file=True)
    if verify:
        require_undamaged(source, archive=place.kind is CheckpointKind.ARCHIVE)
    return upload_new(target, source)
