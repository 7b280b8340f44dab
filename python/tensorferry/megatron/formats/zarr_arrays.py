"""Arrays of Zarr version 2 in a folder, read and written by the box.

megatron-core wrote each tensor as one such array until 0.15: without compression, in C order, one file for each chunk,
which was the shard of a rank. These chunks are read and written here directly, because the ``zarr`` and ``tensorstore``
packages load a whole chunk to return a part of it. Compressed chunks, which other tools write, are decoded whole, some
of them by one of these packages.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...storage.slices import contiguous_strides
from ...storage.whole_files import open_at_once
from ..release import COMMON_STATE_FNAME, CONFIG_FNAME, CheckpointingException
from .zarr_chunks import ANNOUNCED, INFLATE, decompressed, read_box, write_box

ARRAY = ".zarray"
#: The dtypes that those releases could write, by their names in an array's metadata.
DTYPES = {
    "|b1": torch.bool,
    "|u1": torch.uint8,
    "|i1": torch.int8,
    "<i2": torch.int16,
    "<i4": torch.int32,
    "<i8": torch.int64,
    "<f2": torch.float16,
    "<f4": torch.float32,
    "<f8": torch.float64,
    "<c8": torch.complex64,
    "<c16": torch.complex128,
    # Not a name of Zarr's: the tensorstore package gave numpy this dtype.
    "bfloat16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: An array's metadata is smaller than this.
_MOST_METADATA = 1 << 20
_MOST, _DIMENSIONS = 2**60, 64
#: A shard lies in at most so many chunks.
_MOST_PIECES = 1 << 20


class PieceOfChunk(NamedTuple):
    """The part of a box that lies in one chunk.

    Attributes:
        chunk: the chunk's number in each dimension
        start: where the part begins in the chunk
        at: where it begins in the box
        sizes: how far it reaches
    """

    chunk: tuple[int, ...]
    start: tuple[int, ...]
    at: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, box: Tensor) -> Tensor:
        """Returns the view of this part of a tensor that has the shape of the box."""
        return box[tuple(slice(a, a + n) for a, n in zip(self.at, self.sizes, strict=True))] if self.at else box


@dataclass(frozen=True)
class ZarrArray:
    """What the metadata of an array says.

    Attributes:
        path: the array's folder
        key: its name in the checkpoint
        shape: the shape of the array
        chunks: the shape of a chunk; those at the end of a dimension have it as well, even if they reach beyond it
        dtype: the element type
        compressor: how chunks are compressed, or ``None``
        order: ``C`` or ``F``, the order of elements in a chunk
        separator: what stands between the numbers in a chunk's name
        fill: the value of elements in chunks that are missing; ``None`` if they have no value
    """

    path: Path
    key: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: torch.dtype
    compressor: dict[str, Any] | None = None
    order: str = "C"
    separator: str = "."
    fill: Any = None

    @property
    def chunk_bytes(self) -> int:
        """The length of an uncompressed chunk."""
        return math.prod(self.chunks) * int(self.dtype.itemsize)

    def chunk_path(self, chunk: Sequence[int]) -> Path:
        """Returns the file of a chunk."""
        return self.path / (self.separator.join(map(str, chunk)) or "0")

    def pieces(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[PieceOfChunk]:
        """Yields the parts of a box, chunk by chunk.

        Raises:
            CheckpointingException: they are more than any shard of Megatron's has
        """
        if not math.prod(sizes):
            return
        axes = zip(offsets, sizes, self.chunks, strict=True)
        numbers = [range(a // c, (a + n - 1) // c + 1) for a, n, c in axes]
        if math.prod(map(len, numbers)) > _MOST_PIECES:
            raise CheckpointingException(
                f"{self.path}: its chunks of {list(self.chunks)} elements are too small to be shards of a tensor of "
                f"{list(self.shape)}: this is not a checkpoint of Megatron's"
            )
        for chunk in itertools.product(*numbers):
            low = [max(a, i * c) for a, i, c in zip(offsets, chunk, self.chunks, strict=True)]
            high = [min(a + n, (i + 1) * c) for a, n, i, c in zip(offsets, sizes, chunk, self.chunks, strict=True)]
            yield PieceOfChunk(
                chunk,
                tuple(a - i * c for a, i, c in zip(low, chunk, self.chunks, strict=True)),
                tuple(a - b for a, b in zip(low, offsets, strict=True)),
                tuple(b - a for a, b in zip(low, high, strict=True)),
            )

    def check_chunk(self, chunk: Sequence[int]) -> bool:
        """Whether a chunk is there.

        Raises:
            CheckpointingException: it is missing and has no fill value, or its file is not a regular one, cannot be
                examined, or, if it is not compressed, has another length than a chunk
        """
        try:
            status = self.chunk_path(chunk).stat()
        except FileNotFoundError:
            if self.fill is None:
                raise self._missing_chunk(chunk) from None
            return False
        except OSError as e:
            raise CheckpointingException(f"{self.chunk_path(chunk)} cannot be read: {e}") from e
        self._check_file(chunk, status)
        return True

    def _missing_chunk(self, chunk: Sequence[int]) -> CheckpointingException:
        return CheckpointingException(
            f"{self.path} is incomplete: its chunk {self.chunk_path(chunk).name} is missing, and it has no fill value. "
            "Restore the file, or load another checkpoint"
        )

    def _check_file(self, chunk: Sequence[int], status: os.stat_result) -> None:
        """Refuses the file of a chunk that is no regular file or does not have the length of a chunk."""
        path = self.chunk_path(chunk)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointingException(f"{path} is not a regular file: this is not a checkpoint of Megatron's")
        if self.compressor is None and status.st_size != self.chunk_bytes:
            raise CheckpointingException(
                f"{path} is damaged: it has {status.st_size} bytes, and a chunk of {list(self.chunks)} elements of "
                f"{self.dtype} has {self.chunk_bytes}. Restore the file, or load another checkpoint"
            )

    def read(self, piece: PieceOfChunk, target: Tensor) -> int:
        """Reads a piece into ``target``, which has its shape; values are cast to its dtype.

        Elements are written directly into host memory of the array's dtype if they lie in runs of some length, and
        otherwise pass through a window of ``WINDOW`` bytes.

        Returns:
            How many bytes were read, of a compressed chunk its whole content; 0 if the chunk is missing and ``target``
            got the fill value.

        Raises:
            CheckpointingException: the chunk is missing, damaged or cannot be read
            SystemRefused: this process cannot have memory for a compressed chunk
        """
        if not self.check_chunk(piece.chunk):
            target.fill_(self.fill)
            return 0
        if self.compressor is not None:
            whole = decompressed(self, piece.chunk)
            target.copy_(whole[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.sizes, strict=True))])
            return self.chunk_bytes
        path = self.chunk_path(piece.chunk)
        try:
            # Without waiting for the other end of what only looks like a file.
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self._check_file(piece.chunk, os.fstat(file))
                strides = self.strides()
                start = sum(a * stride for a, stride in zip(piece.start, strides, strict=True))
                return read_box(file, path, start, list(piece.sizes), strides, self.dtype, target)
            finally:
                os.close(file)
        except OSError as e:
            raise CheckpointingException(f"{path} cannot be read: {e}") from e

    def strides(self) -> list[int]:
        """Returns the bytes from one element of a chunk to the next in each dimension."""
        if self.order == "C":
            return contiguous_strides(list(self.chunks), self.dtype.itemsize)
        return contiguous_strides(list(self.chunks[::-1]), self.dtype.itemsize)[::-1]

    def create(self) -> None:
        """Makes the array's folder and writes its metadata, as the ``zarr`` package did for those releases.

        Raises:
            CheckpointingException: there is such an array, or it cannot be written
        """
        fields = {
            "chunks": list(self.chunks),
            "compressor": None,
            "dtype": _NAMES[self.dtype],
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(self.shape),
            "zarr_format": 2,
        }
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / ARRAY).open("x") as file:
                json.dump(fields, file, indent=4, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError as e:
            raise CheckpointingException(f"Array {self.path} already exists: save into a folder of its own") from e
        except OSError as e:
            raise CheckpointingException(f"{self.path} cannot be written: {e}") from e

    def write(self, piece: PieceOfChunk, source: Tensor) -> None:
        """Writes ``source``, which has the piece's shape and the array's dtype, into its chunk, and syncs the file.

        Other ranks may write other parts of the same chunk at the same time.

        Raises:
            CheckpointingException: the system refuses, for example because the disk is full
        """
        path = self.chunk_path(piece.chunk)
        strides = self.strides()
        start = sum(a * stride for a, stride in zip(piece.start, strides, strict=True))
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                if os.fstat(file).st_size < self.chunk_bytes:
                    os.ftruncate(file, self.chunk_bytes)
                write_box(file, start, strides, source)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as e:
            raise CheckpointingException(f"{path} cannot be written: {e}") from e


def path_of(folder: Path, key: str) -> Path:
    """Returns the path of the array or object ``key`` in a checkpoint.

    Raises:
        CheckpointingException: the key would lead out of the folder, or to a file that every checkpoint has
    """
    parts = key.split("/") if isinstance(key, str) else [""]
    if "\0" in parts[-1] or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise CheckpointingException(f"{key!r} cannot be the key of a tensor or object: it leads out of {folder}")
    if parts[0] in (COMMON_STATE_FNAME, CONFIG_FNAME):
        raise CheckpointingException(f"{key!r} cannot be the key of a tensor or object: {parts[0]} is another file")
    return folder / key


def new_path_of(folder: Path, key: str) -> Path:
    """Returns the path at which the array or object ``key`` is to be written.

    Raises:
        CheckpointingException: as for :func:`path_of`; or there is a link on the way, which may lead out of the folder
    """
    path = path_of(folder, key)
    for level in (path, *path.parents):
        if level == folder:
            return path
        if level.is_symlink():
            break
    raise CheckpointingException(f"{level} is a link, so {key!r} is not written there: save into another folder")


def open_array(folder: Path, key: str) -> ZarrArray:
    """Reads and checks the metadata of the array ``key``.

    Raises:
        CheckpointingException: there is no such array, or its metadata cannot be used
    """
    path = path_of(folder, key)
    try:
        with open_at_once(path / ARRAY) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointingException(f"{path / ARRAY} is not a regular file")
            text = file.read(_MOST_METADATA + 1)
    except (FileNotFoundError, NotADirectoryError) as e:
        if (path / "zarr.json").exists():
            raise CheckpointingException(
                f"{path} is an array of Zarr version 3, which Megatron never wrote: write it again as version 2"
            ) from e
        raise CheckpointingException(
            f"Array {path} not found: the checkpoint has no tensor {key!r}. Load without it (strict=), or compare the "
            "keys with those of load_tensors_metadata"
        ) from e
    except OSError as e:
        raise CheckpointingException(f"{path / ARRAY} cannot be read: {e}") from e
    try:
        if len(text) > _MOST_METADATA:
            raise ValueError(f"it has more than {_MOST_METADATA} bytes")
        return _parsed(path, key, json.loads(text))
    except (ValueError, KeyError, TypeError, OverflowError, RuntimeError) as e:
        raise CheckpointingException(
            f"{path / ARRAY} is not the metadata of an array that Megatron wrote ({type(e).__name__}: {str(e)[:300]})"
        ) from e


def _parsed(path: Path, key: str, fields: dict[str, Any]) -> ZarrArray:
    """Returns the array that the JSON ``fields`` of its metadata describe.

    Raises:
        ValueError: they cannot be used
        KeyError, TypeError, OverflowError, RuntimeError: one is missing, or of another kind
    """
    if fields["zarr_format"] != 2:
        raise ValueError(f"zarr_format is {str(fields['zarr_format'])[:20]}, not 2")
    shape, chunks = (_checked_sizes(name, fields[name]) for name in ("shape", "chunks"))
    if len(shape) != len(chunks):
        raise ValueError(f"shape {list(shape)} and chunks {list(chunks)} differ in the number of dimensions")
    if any(n and not c for n, c in zip(shape, chunks, strict=True)):
        raise ValueError(f"chunks are {list(chunks)}")
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"dtype {str(fields['dtype'])[:100]!r} is none of {', '.join(DTYPES)}")
    for sizes in (shape, chunks):
        if math.prod(max(n, 1) for n in sizes) * dtype.itemsize >= _MOST:
            raise ValueError(f"{list(sizes)} is too large for a tensor")
    if fields.get("filters"):
        raise ValueError("its chunks pass through filters, which are not supported: write it again without them")
    compressor, known = fields["compressor"], (*INFLATE, *ANNOUNCED)
    if compressor is not None and (not isinstance(compressor, dict) or compressor.get("id") not in known):
        raise ValueError(f"compressor {str(compressor)[:80]} is none of {list(known)}: write it again without one")
    if fields["order"] not in ("C", "F"):
        raise ValueError(f"order is {str(fields['order'])[:20]}")
    separator = fields.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise ValueError(f"dimension_separator is {str(separator)[:20]}")
    fill = _fill_value(fields["fill_value"], dtype)
    return ZarrArray(path, key, shape, chunks, dtype, compressor, fields["order"], separator, fill)


def _checked_sizes(name: str, numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or len(numbers) > _DIMENSIONS:
        raise ValueError(f"{name} is {str(numbers)[:100]}")
    if not all(type(n) is int and 0 <= n < _MOST for n in numbers):
        raise ValueError(f"{name} is {str(numbers)[:100]}")
    return tuple(numbers)


def _fill_value(value: Any, dtype: torch.dtype) -> Any:
    """Returns the value of missing elements that metadata have as ``value``; ``None`` if they have none."""
    if isinstance(value, str) and (dtype.is_floating_point or dtype.is_complex):
        value = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value, value)
    if value is not None and not isinstance(value, (bool, int, float)):
        raise ValueError(f"fill_value is {str(value)[:100]}")
    if value is not None:
        torch.full((), value, dtype=dtype)  # Raises for a number that the dtype does not have.
    return value
