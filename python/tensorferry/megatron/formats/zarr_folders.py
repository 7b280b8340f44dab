"""What a folder of Zarr arrays holds, as Megatron wrote it: the arrays, and the files of its objects."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...errors import TensorferryError
from ...pickles.allowlist import Allowed
from ...pickles.torch_archives import unpickled
from ...storage.whole_files import sync_folder, write_whole
from .. import common
from ..formats.zarr_arrays import ARRAY, ZarrArray, new_path_of, open_array, path_of
from ..release import COMMON, CheckpointingException
from ..shards import object_of


def arrays_of(folder: Path) -> Iterator[ZarrArray]:
    """Yields the arrays of a checkpoint, those of a folder in the order of their names. Links are followed.

    Folders whose names end with ``.sync`` are left out.

    Raises:
        CheckpointingException: the metadata of one of them cannot be used, a link leads nowhere or back to a folder
            above it, or a folder cannot be read: an array there would be left out
    """
    for above, names, _ in _walk(folder):
        for name in names.copy():
            if (above / name / ARRAY).exists():
                names.remove(name)
                yield open_array(folder, (above / name).relative_to(folder).as_posix())


def _walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yields folders of a checkpoint, each with the names of its folders and files; raises as :func:`arrays_of` does.

    The caller takes out the names of folders that are not walked. Those that end with ``.sync`` are left out.
    """
    for above, names, others in os.walk(folder, onerror=_unreadable, followlinks=True):
        names.sort()
        for name in (*names, *others):
            _check_link(Path(above) / name)
        names[:] = [name for name in names if Path(name).suffix != ".sync"]
        yield Path(above), names, others


def _unreadable(error: OSError) -> None:
    raise CheckpointingException(f"{error.filename} cannot be read: {error.strerror}") from error


def _check_link(path: Path) -> None:
    """Refuses links behind which a part of the checkpoint cannot be found."""
    if path.is_symlink():
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError) as e:  # Some versions of Python raise the latter for a loop.
            raise CheckpointingException(f"{path} is a link that leads nowhere: restore what it led to") from e
        if path.parent.resolve().is_relative_to(target):
            raise CheckpointingException(f"{path} is a link to a folder in which it lies itself: remove it")


def objects_of(folder: Path) -> list[tuple[Any, Path]]:
    """Returns the objects of a checkpoint as ``ShardedObject`` without data, each with its file.

    Raises:
        CheckpointingException: a file has no name of an object; or as for :func:`arrays_of`
    """
    objects = []
    for above, _, files in _walk(folder):
        key = above.relative_to(folder).as_posix()
        paths = [above / name for name in sorted(files) if fnmatchcase(name, "shard_*.pt") and above != folder]
        leaves = [(object_of(f"{key}/{path.stem}"), path) for path in paths]
        # Early releases left the last number of the shape out of the name.
        last = max((leaf.global_offset[-1] for leaf, _ in leaves), default=0)
        for leaf, path in leaves:
            if leaf.global_shape[-1] < 0:
                leaf.global_shape = (*leaf.global_shape[:-1], last + 1)
            objects.append((leaf, path))
    return objects


def load_object(folder: Path, leaf: Any, allowed: Allowed) -> Any:
    """Returns the value of an object.

    Args:
        folder: the checkpoint
        leaf: the ``ShardedObject``
        allowed: the globals that its pickle may name

    Raises:
        CheckpointingException: it is not there, cannot be read, is damaged or may not be unpickled
    """
    path = path_of(folder, f"{leaf.unique_key}.pt")
    # Early releases left the last number of the shape out of the name.
    early = path_of(folder, f"{os.path.splitext(leaf.unique_key)[0]}.pt")
    try:
        return unpickled(
            common.read_whole(path if path.exists() or not early.exists() else early), leaf.unique_key, allowed
        )
    except FileNotFoundError as e:
        raise CheckpointingException(
            f"Object shard {path} not found: the checkpoint has no object {leaf.unique_key!r}. Objects cannot be "
            "resharded: load with as many ranks as it was saved with, or without this key (strict=)"
        ) from e
    except TensorferryError as e:
        raise CheckpointingException(f"{path}: {e}") from e


def save_object(folder: Path, leaf: Any) -> None:
    """Writes an object into the file that Megatron reads it from; one that is there is replaced.

    Raises:
        CheckpointingException: its key leads out of the folder, or through a link, or the system refuses
        OSError, TensorferryError: as for :func:`common.write`, if it is the common state
    """
    if leaf.key == COMMON:
        # Releases since 0.19 pass the common state as an object.
        common.write(folder, common.encoded(leaf.data))
        return
    path = new_path_of(folder, f"{leaf.unique_key}.pt")
    data = common.encoded(leaf.data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data, path.with_name(f"{path.name}.{secrets.token_hex(6)}.partial"))
        sync_folder(path.parent)
    except OSError as e:
        raise CheckpointingException(f"{path} cannot be written: {e}") from e
