"""Checkpoints of backend ``torch_dist``, which ``convert.py`` reads.

All pickles in them are read with the allow-list.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import _create_file_view

from ...dcp import index
from ...errors import ProtocolError, UnsafePickle
from ...memory.tensors import byte_strides
from ...pickles.allowlist import Allowed
from ...pickles.torch_archives import unpickled
from ...pickles.unpickler import pickle_module, unpickler_class
from ...storage.boxes import Box
from ...storage.whole_files import INDEX_BYTES, open_at_once
from .. import common
from ..release import CheckpointingException
from .convert_sources import COMMON_OBJECT, SourceWithIndex
from .zarr_chunks import read_box

_TORCH_INDEX = ".metadata"
_OLD_DATA = "nd_reformulated_orig_global_shape"


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
        """Notes in ``start`` where the elements are; returns memory that stands in for them and takes no pages.

        Raises:
            ProtocolError: it is the second storage of the archive, or not inside of it
        """
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


class TorchDistSource(SourceWithIndex):
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
            data = common.read_whole(path, INDEX_BYTES)
            found = unpickler_class(listed, lambda _: _TORCH_INDEX)(io.BytesIO(data)).load()
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
            file = open_at_once(path, buffering=0)
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
        # Buffered, it reads until it has all: the system gives at most 2 GiB at once.
        with io.BufferedReader(file) as whole:
            whole.seek(offset)
            found = unpickled(whole.read(length), name, self._allowed)
        if not isinstance(found, list) or len(found) != 1:
            raise CheckpointingException(f"{path}: {name} is not an object that Megatron has saved")
        return found[0]

    def common(self) -> bytes | None:
        """Returns ``common.pt``, or what releases since 0.19 write in its place."""
        if MetadataIndex(COMMON_OBJECT) not in self._infos:
            return common.read(self._folder)
        return common.encoded(self.value(COMMON_OBJECT))

    def read(self, key: str, number: int, box: Box, target: torch.Tensor) -> None:
        """Reads a part of a chunk.

        Raises:
            CheckpointingException: it is missing, damaged or cannot be read
        """
        _, chunk = self.stored_chunk(key, number)
        file, path, offset, length = self._open(MetadataIndex(key, torch.Size(chunk.offsets)))
        with contextlib.closing(file):
            module = pickle_module(self._allowed, lambda _: key)
            try:
                head = _Head(_create_file_view(file, offset, length), length)
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
    kind = index.OBJECT if at.offset is None else index.PICKLED_TENSOR
    return index.EntryRef(info.relative_path, name, "U8", info.length, kind)
