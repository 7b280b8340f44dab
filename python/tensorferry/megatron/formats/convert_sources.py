"""The formats that ``convert.py`` reads: ``zarr``, ``torch_dist`` and ``tensorferry``.

All pickles in them are read with the allow-list.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import _create_file_view

from ...dcp import index
from ...dcp.index import ELEMENTS
from ...errors import ProtocolError, UnsafePickle
from ...memory.tensors import DTYPE_NAMES, address, byte_strides, scratch
from ...pickles.allowlist import Allowed
from ...pickles.torch_archives import unpickled
from ...pickles.unpickler import pickle_module, unpickler
from ...storage.folder import INDEX
from ...storage.slices import SliceTuple, contiguous_strides, runs
from ...storage.source import FolderSource
from ...storage.whole_files import INDEX_BYTES
from .. import common, shards
from ..release import COMMON, CheckpointingException, ShardedObject
from ..shards import Box
from ..zarr import arrays_of, load_object, objects_of
from .zarr_arrays import read_box

ZARR = "zarr"
_TORCH_INDEX = ".metadata"
#: The common state among the objects of a checkpoint of backend ``torch_dist``, in releases since 0.19.
_COMMON_OBJECT = ShardedObject(COMMON, None, (1,), (0,)).unique_key
_OLD_DATA = "nd_reformulated_orig_global_shape"


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


class Source(Protocol):
    """A checkpoint that is read. It is a context manager, which closes its files."""

    def __enter__(self) -> Source: ...
    def __exit__(self, *_: object) -> None: ...

    def tensors(self) -> list[Stored]:
        """Returns the tensors."""

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


class _OfIndex:
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
        """Returns the tensors."""
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
            key
            for key, about in known.items()
            if not isinstance(about, TensorStorageMetadata) and key != _COMMON_OBJECT
        ]

    def _chunk(self, key: str, number: int) -> tuple[Any, Box]:
        """Returns where a chunk is stored, and the chunk."""
        chunk = self._chunks[key][number]
        found = self._metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
        if found is None:
            raise CheckpointingException(f"{key}: the index does not say where its chunk at {chunk.offsets} is")
        return found, Box(tuple(chunk.offsets), tuple(chunk.sizes))


class FerrySource(_OfIndex):
    """A checkpoint of backend ``tensorferry``.

    Args:
        folder: the folder
        allowed: the globals that objects may name

    Raises:
        TensorferryError: the index cannot be read
    """

    def __init__(self, folder: Path, allowed: Allowed) -> None:
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
            TensorferryError: it does not match its checksum, or cannot be read
        """
        ref, chunk = self._chunk(key, number)
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


class _Head:
    """Torch's reader of an archive that ``torch.save`` has written, without the elements of its tensor.

    Args:
        view: the archive, as a file
        length: its length

    Attributes:
        start: where the elements begin in the archive; -1 before that is known
    """

    def __init__(self, view: Any, length: int) -> None:
        self._reader = torch._C.PyTorchFileReader(view)
        self._length = length
        self.start = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def get_storage_from_record(self, name: str, nbytes: int, dtype: Any) -> Any:
        """Returns memory in the elements' place, to which nothing is written and which therefore takes no pages."""
        del dtype
        if self.start >= 0:
            raise ProtocolError("it has several storages")
        self.start = self._reader.get_record_offset(name)
        if not 0 <= nbytes <= self._length - self.start:
            raise ProtocolError("its storage is not inside of it")
        return torch.empty(nbytes, dtype=torch.uint8)


def _stand_in(name: str, base: type) -> type:
    """Returns a class for instances that a pickle says are of a class that releases until 0.15 had."""
    return type(name, (base,), {"__module__": "megatron.core.dist_checkpointing.strategies.torch"})


#: The classes that ``.metadata`` may name besides those of torch's module of metadata.
_CLASSES = (
    _StorageInfo,
    SavePlan,
    WriteItem,
    WriteItemType,
    TensorWriteData,
    _stand_in("MCoreMetadata", Metadata),
    _stand_in("MCoreSavePlan", SavePlan),
)


class TorchDistSource(_OfIndex):
    """A checkpoint of backend ``torch_dist``.

    Args:
        folder: the folder
        allowed: the globals that objects may name

    Raises:
        CheckpointingException: the index cannot be read, or tensors are stored in a way that no release reads any more
    """

    def __init__(self, folder: Path, allowed: Allowed) -> None:
        super().__init__()
        self._folder, self._allowed = folder, allowed
        known = [one for one in vars(dcp_metadata).values() if getattr(one, "__module__", "") == dcp_metadata.__name__]
        classes = [one for one in known if isinstance(one, type)]
        listed = Allowed([*classes, *_CLASSES], allowed.trusts)
        path = folder / _TORCH_INDEX
        try:
            found = unpickler(listed, lambda _: _TORCH_INDEX)(io.BytesIO(common.read_whole(path, INDEX_BYTES))).load()
        except FileNotFoundError as e:
            raise CheckpointingException(f"{folder} is incomplete: it has no {_TORCH_INDEX}") from e
        except UnsafePickle as e:
            raise CheckpointingException(f"{path}: {e}") from e
        except Exception as e:  # A damaged pickle can raise anything.
            raise CheckpointingException(f"{path} cannot be read ({type(e).__name__}: {e})") from e
        if not isinstance(found, Metadata):
            raise CheckpointingException(f"{path} is not the index of a checkpoint")
        # Written anew as this package writes it, which checks all of it.
        try:
            stored = {at: _ref(at, info) for at, info in found.storage_data.items()}
            bare = Metadata(found.state_dict_metadata)
            self._metadata = index.decode(index.encode(bare, stored), str(path), allowed)
        except (AttributeError, TypeError, ValueError, KeyError) as e:
            raise CheckpointingException(f"{path} cannot be read ({type(e).__name__}: {e})") from e
        self._infos = found.storage_data
        old = getattr(found, "mcore_data", None) or {}
        flat = sorted(key for key, about in old.items() if isinstance(about, dict) and about.get(_OLD_DATA))
        if flat:
            raise CheckpointingException(
                f"{folder} has flattened shards ({', '.join(flat[:3])}), which releases since 0.16 do not read: load "
                "it with release 0.15, and save it with the optimizer's format 'fully_reshardable'"
            )

    def _entry(self, at: MetadataIndex) -> tuple[Path, int, int]:
        """Returns file, offset and length of an entry."""
        info = self._infos[at]
        name, offset, length = info.relative_path, info.offset, info.length
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise CheckpointingException(f"{self._folder}: its index names a file outside of it, {name!r}")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointingException(f"{self._folder}: {at.fqn} is compressed, which Megatron does not do")
        return self._folder / name, offset, length

    def _open(self, at: MetadataIndex) -> tuple[Any, Path, int, int]:
        """Opens the file of an entry, and checks that the entry is inside of it."""
        path, offset, length = self._entry(at)
        try:
            file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), closefd=True)
        except OSError as e:
            raise CheckpointingException(
                f"{path} cannot be read: {e}. Restore the file, or convert another checkpoint"
            ) from e
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or offset + length > about.st_size:
            file.close()
            raise CheckpointingException(
                f"{path} is damaged: {at.fqn} should end at byte {offset + length} of it, and it has {about.st_size}. "
                "Restore the file, or convert another checkpoint"
            )
        return file, path, offset, length

    def value(self, name: str) -> Any:
        """Returns an object, which Megatron has packed into a list of its own."""
        file, path, offset, length = self._open(MetadataIndex(name))
        with contextlib.closing(file):
            found = unpickled(os.pread(file.fileno(), length, offset), name, self._allowed)
        if not isinstance(found, list) or len(found) != 1:
            raise CheckpointingException(f"{path}: {name} is not an object that Megatron has saved")
        return found[0]

    def common(self) -> bytes | None:
        """Returns ``common.pt``, or what releases since 0.19 write in its place."""
        if MetadataIndex(_COMMON_OBJECT) not in self._infos:
            return common.read(self._folder)
        return common.encoded(self.value(_COMMON_OBJECT))

    def read(self, key: str, number: int, box: Box, target: torch.Tensor) -> None:
        """Reads a part of a chunk.

        Raises:
            CheckpointingException: it is missing, damaged or cannot be read
        """
        _, chunk = self._chunk(key, number)
        file, path, offset, length = self._open(MetadataIndex(key, torch.Size(chunk.offsets)))
        with contextlib.closing(file):
            head = _Head(_create_file_view(file, offset, length), length)
            module = pickle_module(self._allowed, lambda _: key)
            try:
                if not head.has_record("data.pkl") or head.has_record("constants.pkl"):
                    raise ProtocolError("torch.save did not write it")
                whole: Any = torch.serialization._load(head, "cpu", module, encoding="utf-8")
            except UnsafePickle as e:
                raise CheckpointingException(f"{path}: {e}") from e
            except Exception as e:
                raise CheckpointingException(f"{path}: {key} cannot be read ({type(e).__name__}: {e})") from e
            is_stored = type(whole) is torch.Tensor and whole.layout is torch.strided and head.start >= 0
            if not is_stored or tuple(whole.shape) != chunk.sizes or whole.dtype != target.dtype:
                raise CheckpointingException(
                    f"{path} is damaged: the index says {target.dtype} {list(chunk.sizes)} of {key}, and it holds "
                    "another tensor"
                )
            if whole.is_conj() or whole.is_neg():
                raise CheckpointingException(f"{path}: {key} is stored conjugated, which Megatron does not do")
            if not box.numel:
                return
            strides = byte_strides(whole)
            inside = [a - b for a, b in zip(box.offsets, chunk.offsets, strict=True)]
            start = offset + head.start + whole.storage_offset() * whole.element_size()
            start += sum(a * stride for a, stride in zip(inside, strides, strict=True))
            read_box(file.fileno(), path, start, list(box.sizes), strides, target.dtype, target)


def _ref(at: MetadataIndex, info: Any) -> index.EntryRef:
    """Returns where an entry is, in the form of this package's own index."""
    if not all(type(number) is int and number >= 0 for number in (info.offset, info.length)):
        raise ValueError(f"the entry of {at.fqn} has no valid place")
    name = json.dumps([info.relative_path, info.offset])
    return index.EntryRef(info.relative_path, name, "U8", info.length, index.OBJECT)


#: The sources by the backend that ``metadata.json`` names.
SOURCES: dict[str, Any] = {ZARR: ZarrSource, "torch_dist": TorchDistSource, "tensorferry": FerrySource}
