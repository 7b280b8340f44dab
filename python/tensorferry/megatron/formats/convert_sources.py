"""The formats that ``convert.py`` reads: ``zarr`` and ``tensorferry``; ``convert_torch_dist.py`` has ``torch_dist``.

All pickles in them are read with the allow-list.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ...dcp import index
from ...dcp.index import ELEMENTS
from ...errors import ProtocolError
from ...memory.tensors import DTYPE_NAMES, address, byte_strides, scratch
from ...pickles.allowlist import Allowed
from ...pickles.torch_archives import unpickled
from ...storage.boxes import Box
from ...storage.folder import INDEX
from ...storage.places import AnyPlace
from ...storage.slices import SliceTuple, contiguous_strides, runs
from ...storage.source import FolderSource
from .. import common, shards
from ..release import COMMON, CheckpointingException, ShardedObject
from .zarr_folders import arrays_of, load_object, objects_of

ZARR = "zarr"
#: The common state among the objects of a checkpoint of backend ``torch_dist``, in releases since 0.19.
COMMON_OBJECT = ShardedObject(COMMON, None, (1,), (0,)).unique_key


class Stored(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        key: its key
        dtype: its dtype
        shape: its shape
        chunks: the parts in which it is stored
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Box]


class ConversionSource(Protocol):
    """A checkpoint that is read. It is a context manager, which closes its files.

    Reading raises ``CheckpointingException`` or a ``TensorferryError`` for what is missing or damaged, or may not be
    unpickled.
    """

    def __enter__(self) -> ConversionSource: ...
    def __exit__(self, *_: object) -> None: ...

    def tensors(self) -> list[Stored]:
        """Returns the tensors; called before :meth:`read`."""

    def objects(self) -> list[str]:
        """Returns the unique keys of the objects."""

    def value(self, name: str) -> Any:
        """Returns an object."""

    def common(self) -> bytes | None:
        """Returns the common state, as ``torch.save`` writes it; ``None`` if there is none."""

    def read(self, key: str, number: int, box: Box, target: torch.Tensor) -> None:
        """Reads ``box``, which lies in the stored chunk ``number``, into ``target``, which is contiguous.

        Several threads call it.
        """


class ZarrSource:
    """A checkpoint of backend ``zarr``.

    Args:
        folder: the folder
        allowed: the globals that objects may name
        fill_missing: missing chunks have their array's fill value, if it has one

    Raises:
        CheckpointingException: it cannot be read
    """

    def __init__(self, folder: Path, allowed: Allowed, fill_missing: bool) -> None:
        self._folder, self._allowed, self._fill = folder, allowed, fill_missing
        self._arrays = {array.key: array for array in arrays_of(folder)}
        self._objects = {leaf.unique_key: leaf for leaf, _ in objects_of(folder)}

    def __enter__(self) -> ZarrSource:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tensors(self) -> list[Stored]:
        """Returns the tensors, each as one chunk: the arrays' own chunks do not matter for what follows."""
        return [
            Stored(array.key, array.dtype, array.shape, [Box((0,) * len(array.shape), array.shape)])
            for array in self._arrays.values()
        ]

    def objects(self) -> list[str]:
        """Returns the unique keys of the objects."""
        return list(self._objects)

    def value(self, name: str) -> Any:
        """Returns an object."""
        return load_object(self._folder, self._objects[name], self._allowed)

    def common(self) -> bytes | None:
        """Returns ``common.pt``."""
        return common.read(self._folder)

    def read(self, key: str, number: int, box: Box, target: torch.Tensor) -> None:
        """Reads a part of an array.

        Raises:
            CheckpointingException: a chunk is missing, damaged or cannot be read
            SystemRefused: this process cannot have memory for a compressed chunk
        """
        del number
        array = self._arrays[key]
        for piece in array.pieces(*box):
            if not self._fill and not array.check_chunk(piece.chunk):
                raise CheckpointingException(
                    f"{array.path} is incomplete: its chunk {array.chunk_path(piece.chunk).name} is missing. If the "
                    f"checkpoint was written by a tool that leaves out chunks that hold only {array.fill!r}, pass "
                    "fill_missing=True (--fill-missing)"
                )
            array.read(piece, piece.of(target))


class SourceWithIndex:
    """What sources with an index in the form of torch's ``Metadata`` share."""

    _metadata: Metadata
    _allowed: Allowed

    def __init__(self) -> None:
        self._chunks: dict[str, list[Any]] = {}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tensors(self) -> list[Stored]:
        """Returns the tensors, and notes their chunks, by whose numbers :meth:`stored_chunk` finds them.

        Raises:
            CheckpointingException: the chunks of a tensor do not make it up
        """
        found = []
        for key, about in self._metadata.state_dict_metadata.items():
            if isinstance(about, TensorStorageMetadata) and key != COMMON:
                shape = tuple(about.size)
                boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in about.chunks]
                shards.check_cover(key, shape, boxes, "the files of the checkpoint")
                self._chunks[key] = about.chunks
                found.append(Stored(key, about.properties.dtype, shape, boxes))
        return found

    def objects(self) -> list[str]:
        """Returns the unique keys of the objects."""
        known = self._metadata.state_dict_metadata
        return [
            key for key, about in known.items() if not isinstance(about, TensorStorageMetadata) and key != COMMON_OBJECT
        ]

    def stored_chunk(self, key: str, number: int) -> tuple[Any, Box]:
        """Returns where a chunk is stored, and the chunk.

        Raises:
            CheckpointingException: the index does not say where
        """
        chunk = self._chunks[key][number]
        found = self._metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
        if found is None:
            raise CheckpointingException(f"{key}: the index does not say where its chunk at {chunk.offsets} is")
        return found, Box(tuple(chunk.offsets), tuple(chunk.sizes))


class FerrySource(SourceWithIndex):
    """A checkpoint of backend ``tensorferry``.

    Args:
        folder: the folder, or the place in a store
        allowed: the globals that objects may name

    Raises:
        TensorferryError: the index cannot be read
    """

    def __init__(self, folder: AnyPlace, allowed: Allowed) -> None:
        super().__init__()
        self._folder, self._allowed = folder, allowed
        self._source = FolderSource(folder / INDEX, 1)
        self._metadata = index.decode(self._source.read_index(), str(folder), allowed)

    def value(self, name: str) -> Any:
        """Returns an object."""
        ref = self._metadata.storage_data[MetadataIndex(name)]
        memory = scratch(ref.nbytes)
        slices: list[SliceTuple] = [(ref.entry, ref.dtype, ref.nbytes, 0, ref.nbytes, address(memory), [])]
        self._source.read({ref.container: slices} if ref.nbytes else {})
        return unpickled(memory.numpy().tobytes(), name, self._allowed)

    def common(self) -> bytes | None:
        """Returns the common state: the copy inside the checkpoint, or else ``common.pt``."""
        about = self._metadata.state_dict_metadata.get(COMMON)
        if not isinstance(about, TensorStorageMetadata) or about.properties.dtype != torch.uint8:
            return common.read(self._folder)
        self._chunks[COMMON] = about.chunks
        memory = scratch(math.prod(about.size))
        for number, chunk in enumerate(about.chunks):
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            self.read(COMMON, number, box, memory[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]])
        return bytes(memory.numpy())

    def read(self, key: str, number: int, box: Box, target: torch.Tensor) -> None:
        """Reads a part of a chunk, verified.

        Raises:
            CheckpointingException: it is not stored as the elements of a tensor
            TensorferryError: it does not match its checksum, or cannot be read
        """
        ref, chunk = self.stored_chunk(key, number)
        dtype, shape = target.dtype, list(chunk.sizes)
        strides = contiguous_strides(shape, dtype.itemsize)
        if ref.kind != ELEMENTS or ref.dtype != DTYPE_NAMES.get(dtype, "U8"):
            raise CheckpointingException(f"{key} is not stored as the elements of a tensor: it cannot be converted")
        if ref.nbytes != math.prod(shape) * dtype.itemsize:
            raise ProtocolError(f"{key}: the index says {dtype} {shape}, but its entry has {ref.nbytes} bytes")
        if not box.numel:
            return
        start = sum((a - b) * stride for a, b, stride in zip(box.offsets, chunk.offsets, strides, strict=True))
        run, repeats = runs(list(box.sizes), strides, byte_strides(target), dtype.itemsize)
        slices = [(ref.entry, ref.dtype, ref.nbytes, start, run, address(target), repeats)]
        self._source.read({ref.container: slices})
