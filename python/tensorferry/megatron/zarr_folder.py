"""Folders of backend ``zarr``, which megatron-core had until 0.15: one array of Zarr version 2 for each tensor.

The ``tensorstore`` package reads and writes the arrays. ``common.pt`` holds the common state and
``KEY/shard_OFFSET_SHAPE.pt`` the objects, as ``torch.save`` writes them.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..errors import TensorferryError
from ..pickles.allowlist import Allowed
from ..pickles.torch_archives import unpickled
from ..storage.boxes import Box
from ..storage.whole_files import sync_folder, write_whole
from . import common
from .release import COMMON, COMMON_STATE_FNAME, CONFIG_FNAME, CheckpointingException
from .shards import object_of

ARRAY = ".zarray"
#: The dtypes that those releases could write, by tensorstore's names, each with its name in an array's metadata.
DTYPES = {
    "bool": "|b1",
    "uint8": "|u1",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
    "bfloat16": "bfloat16",
}


class ZarrArray:
    """An array of a checkpoint.

    Args:
        folder: the checkpoint
        key: the tensor
        writes: whether it is written to
        new: the shapes of the array and of its chunks, and its dtype, if it is to be made

    Raises:
        CheckpointingException: there is no such array, or there is one already that is to be made, it is not one of
            Megatron's, or tensorstore is not installed
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        *,
        writes: bool = False,
        new: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None = None,
    ) -> None:
        self.path = path_of(folder, key, is_new=writes)
        self.key = key
        spec: dict[str, Any] = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(self.path)},
            "fill_missing_data_reads": False,
        }
        options: dict[str, Any] = {"open": True, "read": True, "write": writes}
        if new is not None:
            shape, chunks, dtype = new
            spec["metadata"] = {
                "zarr_format": 2,
                "shape": shape,
                "chunks": [max(n, 1) for n in chunks],
                "dtype": DTYPES[_name(dtype)],
                "compressor": None,
                "filters": None,
                "fill_value": None,
                "order": "C",
            }
            options = {"create": True, "write": True}
            if (self.path / ARRAY).exists():
                raise CheckpointingException(f"Array {self.path} already exists: save into a folder of its own")
        elif not (self.path / ARRAY).exists():
            raise CheckpointingException(
                f"Array {self.path} not found: the checkpoint has no tensor {key!r}. Load without it (strict=), or "
                "compare the keys with those of load_tensors_metadata"
            )
        self._check_files()
        try:
            self._array = import_module("tensorstore").open(spec, **options).result()
        except ImportError as e:
            raise CheckpointingException(
                f"{folder} is of backend 'zarr', which needs a package: pip install 'tensorferry[megatron-zarr]'"
            ) from e
        except (ValueError, OSError) as e:
            raise self._error("is not an array that Megatron wrote", e) from e
        if self._array.dtype.name not in DTYPES:
            raise CheckpointingException(f"{self.path} is of {self._array.dtype.name}, which Megatron did not save")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self._array.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        found: torch.dtype = getattr(torch, self._array.dtype.name)
        return found

    @property
    def chunks(self) -> list[Box]:
        """The parts in which it is stored."""
        sizes = self._array.chunk_layout.read_chunk.shape
        counts = [max(1, -(-n // size)) for n, size in zip(self.shape, sizes, strict=True)]
        found = []
        for number in range(math.prod(counts)):
            offsets: list[int] = []
            for count, size in zip(reversed(counts), reversed(sizes), strict=True):
                number, at = divmod(number, count)
                offsets.insert(0, at * size)
            ends = [min(a + size, n) for a, size, n in zip(offsets, sizes, self.shape, strict=True)]
            found.append(Box(tuple(offsets), tuple(b - a for a, b in zip(offsets, ends, strict=True))))
        return found

    def check(self, box: Box) -> None:
        """Checks that all chunks of a part are there, without reading them.

        Raises:
            CheckpointingException: one is missing; Megatron wrote all of them
        """
        if box.numel and not self._at(box).storage_statistics(query_fully_stored=True).result().fully_stored:
            raise CheckpointingException(
                f"{self.path} is incomplete: a chunk of {box} is missing. Restore the file, or load another checkpoint"
            )

    def read(self, box: Box) -> torch.Tensor:
        """Reads a part.

        Raises:
            CheckpointingException: it is missing, damaged or cannot be read
        """
        try:
            found = self._at(box).read(order="C").result()
        except (ValueError, OSError) as e:
            raise self._error("is damaged", e) from e
        raw = torch.from_numpy(found.reshape(-1).view("u1"))
        return raw.view(self.dtype).reshape(box.sizes)

    def write(self, box: Box, data: torch.Tensor) -> None:
        """Writes a part, to the disk. Other processes may write other parts of the same chunks at the same time.

        Raises:
            CheckpointingException: the system refuses
        """
        raw = data.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        try:
            self._at(box).write(raw.view(self._array.dtype.numpy_dtype).reshape(box.sizes)).result()
        except (ValueError, OSError) as e:
            raise self._error("cannot be written", e) from e

    def _at(self, box: Box) -> Any:
        return self._array[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]

    def _check_files(self) -> None:
        """Refuses an array with a pipe or device among its files: whoever opens it may wait for ever."""
        for above, _, names in os.walk(self.path):
            for name in names:
                if not (Path(above) / name).is_file():
                    raise CheckpointingException(f"{above}/{name} is not a regular file: restore it")

    def _error(self, what: str, error: Exception) -> CheckpointingException:
        text = str(error).partition(" [")[0]
        return CheckpointingException(f"{self.path} {what} ({text[:500]}). Restore it, or load another checkpoint")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def can_save(dtype: torch.dtype) -> bool:
    """Whether those releases had a dtype."""
    return _name(dtype) in DTYPES


def path_of(folder: Path, key: str, *, is_new: bool = False) -> Path:
    """Returns the path of the array or object ``key`` in a checkpoint; ``is_new`` says that it will be written to.

    Raises:
        CheckpointingException: the key would lead out of the folder, by a link if it is written to, or to a file that
            every checkpoint has
    """
    parts = key.split("/") if isinstance(key, str) else [""]
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise CheckpointingException(f"{key!r} cannot be the key of a tensor or object: it leads out of {folder}")
    if parts[0] in (COMMON_STATE_FNAME, CONFIG_FNAME):
        raise CheckpointingException(f"{key!r} cannot be the key of a tensor or object: {parts[0]} is another file")
    path = folder / key
    if is_new and path.resolve() != folder.resolve() / key:
        raise CheckpointingException(f"{key!r} is not written to {path}, by a link: save into another folder")
    return path


def arrays_of(folder: Path) -> Iterator[ZarrArray]:
    """Yields the arrays of a checkpoint.

    Raises:
        CheckpointingException: one of them cannot be used, or a part of the folder is behind a link, or cannot be read
    """
    for above, names, _ in _walk(folder):
        for name in names.copy():
            if (above / name / ARRAY).exists():
                names.remove(name)
                yield ZarrArray(folder, (above / name).relative_to(folder).as_posix())


def objects_of(folder: Path) -> dict[str, Any]:
    """Returns the objects of a checkpoint as ``ShardedObject`` without data, by their unique keys.

    Raises:
        CheckpointingException: a file has no name of an object; or as for :func:`arrays_of`
    """
    found = {}
    for above, _, files in _walk(folder):
        key = above.relative_to(folder).as_posix()
        names = [name for name in sorted(files) if fnmatchcase(name, "shard_*.pt") and above != folder]
        leaves = [object_of(f"{key}/{name.removesuffix('.pt')}") for name in names]
        # Early releases left the last number of the shape out of the name.
        last = max((leaf.global_offset[-1] for leaf in leaves), default=0)
        for leaf in leaves:
            if leaf.global_shape[-1] < 0:
                leaf.global_shape = (*leaf.global_shape[:-1], last + 1)
            found[leaf.unique_key] = leaf
    return found


def _walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yields folders of a checkpoint, each with the names of its folders and files, but for a writer's locks.

    The caller takes out the names of folders that are not walked.
    """

    def refuse(error: OSError) -> None:
        raise CheckpointingException(f"{error.filename} cannot be read: {error.strerror}") from error

    for text, names, others in os.walk(folder, onerror=refuse):
        above = Path(text)
        for name in (*names, *others):
            if (above / name).is_symlink():
                raise CheckpointingException(f"{above / name} is a link: copy the checkpoint with what it leads to")
        names[:] = sorted(name for name in names if Path(name).suffix != ".sync")
        yield above, names, others


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
        CheckpointingException: its key leads out of the folder, or the system refuses
        OSError, TensorferryError: as for :func:`common.write`, if it is the common state
    """
    if leaf.key == COMMON:
        # Releases since 0.19 pass the common state as an object.
        common.write(folder, common.encoded(leaf.data))
        return
    path = path_of(folder, f"{leaf.unique_key}.pt", is_new=True)
    data = common.encoded(leaf.data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data, path.with_name(f"{path.name}.{secrets.token_hex(6)}.partial"))
        sync_folder(path.parent)
    except OSError as e:
        raise CheckpointingException(f"{path} cannot be written: {e}") from e
