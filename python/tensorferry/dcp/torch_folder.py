"""Checkpoints that torch's own writer has saved: its index as ``Metadata``, and its files as a source of entries.

torch's reader unpickles the index, and its planners unpickle objects, without any limits. Here both are read with the
allow-list (``pickles/allowlist.py``): a folder can only make the load fail.
"""

from __future__ import annotations

import ctypes
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .._gc import gc_paused
from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InvalidArgument,
    ProtocolError,
    SystemRefused,
    TensorferryError,
)
from ..pickles.allowlist import Allowed
from ..pickles.unpickler import unpickler_class
from ..storage import boxes
from ..storage.names import checked_plain
from ..storage.objects.place import ObjectPlace
from ..storage.places import AnyPlace
from ..storage.slices import SliceTuple, nbytes_of
from ..storage.source import Parts, Progress, digest_of
from ..storage.whole_files import INDEX_BYTES, is_file, read_whole
from .index import HAS_STRIDES, OBJECT, PICKLED_TENSOR, EntryRef, described, has_safe_paths

logger = logging.getLogger("tensorferry")

#: The entries are opaque bytes, whatever is pickled in them.
_BYTES = "U8"


class _Record:
    """Stands for a class of torch's index while it is unpickled, with the same attributes and no code of its own.

    So the index of another torch version can be read, whatever its classes have become, and a pickle can change
    nothing that exists in this process.
    """


class _Properties(_Record):
    """Stands for ``TensorProperties``, which pickles itself as a tuple."""

    def __setstate__(self, state: Any) -> None:
        """Keeps dtype, strides and whether a gradient was required; the rest is deprecated in torch."""
        self.dtype, _, self.requires_grad, *rest = state
        # The last but two, which torch had before it had strides.
        self.strides = rest[2] if len(rest) > 2 else None


def _stand_ins() -> list[Any]:
    """Returns the stand-ins for the globals that an index of torch's names, each under the name of the global."""
    found: list[Any] = []

    def stand(cls: Any, module: str, name: str) -> None:
        cls.__module__, cls.__qualname__ = module, name
        found.append(cls)

    metadata = "torch.distributed.checkpoint.metadata"
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "StorageMeta",
    ):
        stand(type(name, (_Record,), {}), metadata, name)
    stand(type("TensorProperties", (_Properties,), {}), metadata, "TensorProperties")
    stand(type("_StorageInfo", (_Record,), {}), "torch.distributed.checkpoint.filesystem", "_StorageInfo")
    # Layouts, memory formats and the path of the folder at that time are not used.
    stand(lambda _: None, "torch.serialization", "_get_layout")
    stand(lambda _: None, metadata, "_MEM_FORMAT_ENCODING")
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"):
        stand(lambda *_: None, "pathlib", name)
    return found


_STAND_INS = _stand_ins()


def with_stand_ins(safe_globals: tuple[Any, ...], trust: bool) -> Allowed:
    """Returns the allow-list for an index of torch's: the default one, the user's ``safe_globals``, the stand-ins."""
    return Allowed([*safe_globals, *_STAND_INS], trust)


@gc_paused()
def decode(data: bytes, where: str, allowed: Allowed) -> Metadata:
    """Decodes the index that torch's own writer has pickled.

    Args:
        data: the content of ``.metadata``
        where: how messages name it
        allowed: the result of :func:`with_stand_ins`

    Returns:
        The metadata; its ``storage_data`` maps each chunk and object to an :class:`EntryRef`, whose
        entry's name is the offset in the file.

    Raises:
        ProtocolError: ``data`` is not such an index, contradicts itself, or has paths that must not be followed
        UnsafePickle: it names something that is not allowed
        InvalidArgument: the files were transformed by extensions of torch's writer
    """
    try:
        try:
            found = unpickler_class(allowed, lambda _: where)(io.BytesIO(data)).load()
        except ProtocolError as e:  # It does not know the file.
            raise ProtocolError(f"{where}: {e}") from e
        state = {_string(fqn): _checked_metadata(fqn, value) for fqn, value in found.state_dict_metadata.items()}
        refs: dict[MetadataIndex, EntryRef] = {}
        for key, info in found.storage_data.items():
            fqn, offset = _string(key.fqn), getattr(key, "offset", None)
            stored = state.get(fqn)
            place = MetadataIndex(fqn, None if offset is None else _checked_sizes(offset))
            dtype = stored.properties.dtype if isinstance(stored, TensorStorageMetadata) else None
            refs[place] = _ref(info, dtype, where)
        about = getattr(found, "storage_meta", None)
        save_id, version = getattr(about, "save_id", None), getattr(found, "version", None)
        planner = getattr(found, "planner_data", None)
        if not allowed.trusts and not has_safe_paths(planner, state):
            raise ProtocolError(
                f"{where}: the planner's data in it has an invalid path into a nested state: pass trust_pickle=True to "
                "the reader if you trust the job that saved it"
            )
    except TensorferryError:
        raise
    except Exception as e:  # A pickle of another structure can raise anything.
        raise ProtocolError(f"{where} cannot be read ({type(e).__name__}: {str(e)[:300]})") from e
    metadata = Metadata(state, planner_data=planner, storage_data=refs)
    if hasattr(metadata, "version"):
        metadata.version = version if isinstance(version, str) else None
    return described(metadata, save_id=save_id if isinstance(save_id, str) else None)


def _string(text: Any) -> str:
    if type(text) is not str:
        raise TypeError(f"it has a {type(text).__name__} where a string was expected")
    return text


def _checked_metadata(fqn: str, value: Any) -> BytesStorageMetadata | TensorStorageMetadata:
    """Returns torch's metadata of a tensor or an object, from the stand-in ``value`` that the index has for it."""
    if not hasattr(value, "chunks"):
        return BytesStorageMetadata()
    size, chunks = _checked_sizes(value.size), []
    for part in value.chunks:
        chunk = ChunkStorageMetadata(offsets=_checked_sizes(part.offsets), sizes=_checked_sizes(part.sizes))
        if not all(o + n <= dim for o, n, dim in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ValueError(f"{fqn} of {list(size)} has a chunk of {list(chunk.sizes)} at {list(chunk.offsets)}")
        chunks.append(chunk)
    dtype = value.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{fqn} has no dtype")
    properties = TensorProperties(dtype=dtype, requires_grad=bool(value.properties.requires_grad is True))
    if HAS_STRIDES and (strides := getattr(value.properties, "strides", None)) is not None:
        properties.strides = tuple(map(boxes.checked_size, strides))
        if len(properties.strides) != len(size):
            raise ValueError("a tensor in it has other strides than dimensions")
    return TensorStorageMetadata(properties=properties, size=size, chunks=chunks)


def _checked_sizes(numbers: Any) -> torch.Size:
    """Returns a shape, or the offsets of a chunk; raises as :func:`boxes.checked_sizes`."""
    return torch.Size(boxes.checked_sizes(numbers))


def _ref(info: Any, dtype: torch.dtype | None, where: str) -> EntryRef:
    """Returns where an entry is stored, from torch's ``_StorageInfo`` of it; ``dtype`` is a tensor's."""
    if getattr(info, "transform_descriptors", None):
        raise InvalidArgument(
            f"{where}: extensions of torch's writer have transformed the files, and only torch's FileSystemReader can "
            "read them"
        )
    name = checked_plain(info.relative_path, where)
    offset, length = map(boxes.checked_size, (info.offset, info.length))
    kind = OBJECT if dtype is None else PICKLED_TENSOR
    return EntryRef(name, offset, _BYTES, length, kind, dtype and (dtype, ()))


class TorchFolderSource:
    """A folder that torch's own writer has saved into.

    Args:
        index: the path of its index

    Attributes:
        digest: identifies the index that was read
    """

    def __init__(self, index: AnyPlace) -> None:
        self._index = index
        self.digest = ""

    def read_index(self) -> bytes:
        """Reads the index, as torch has pickled it.

        Raises:
            ProtocolError: it is longer than any index
            SystemRefused: it cannot be read
            TensorferryError: the store does not answer in time, or refuses
        """
        try:
            data = read_whole(self._index, INDEX_BYTES)
        except TensorferryError:
            raise
        except OSError as e:
            raise SystemRefused(f"{self._index} cannot be read: {e}") from e
        self.digest = digest_of(data)
        logger.info(
            "%s holds a checkpoint of torch's own writer: it is read whole chunks at a time, without checksums",
            self._index.parent,
        )
        return data

    def read(self, slices: Mapping[str, list[SliceTuple]], progress: Progress | None = None) -> Mapping[str, int]:
        """Reads whole entries of the files to their memory addresses.

        Args:
            slices: one slice for each entry, which is all of it, by file name
            progress: as for :meth:`Source.read`, called after each file

        Returns:
            ``bytes`` of files that were read, and of these ``wanted``, which are all.

        Raises:
            IncompleteCheckpoint: a file is gone
            CorruptCheckpoint: a file is shorter than the index says
            SystemRefused: a file cannot be read
            TensorferryError: the store does not answer in time, or refuses
            Exception: what ``progress`` raises
        """
        read = 0
        parts = None if progress is None else Parts(progress, sum(map(nbytes_of, slices.values())))
        for name, entries in slices.items():
            path = self._index.parent / name
            check_file(path)
            if isinstance(path, ObjectPlace):
                opened = path.opened()
                for entry, _, nbytes, _, _, _, _ in entries:
                    if int(entry) + nbytes > opened.nbytes:
                        raise _cut_off(path, int(entry) + nbytes - opened.nbytes)
                    read += nbytes
                opened.read_all([(int(entry), address, nbytes) for entry, _, nbytes, _, _, address, _ in entries])
                if parts is not None:
                    parts.next(nbytes_of(entries))(1, 1)
                continue
            try:
                with path.open("rb", buffering=0) as file:
                    for entry, _, nbytes, _, _, address, _ in entries:
                        _read_into(file, int(entry), (ctypes.c_char * nbytes).from_address(address), path)
                        read += nbytes
            except OSError as e:
                raise SystemRefused(f"{path} cannot be read: {e}") from e
            if parts is not None:
                parts.next(nbytes_of(entries))(1, 1)
        return {"bytes": read, "wanted": read}


def check_file(path: AnyPlace, nbytes: int = 0) -> None:
    """Checks that a file that an index names is there, and has at least ``nbytes`` bytes.

    Raises:
        IncompleteCheckpoint: there is no such file
        CorruptCheckpoint: it is shorter
        SystemRefused: the system does not say how long it is
        TensorferryError: the store does not answer in time, or refuses
    """
    if not is_file(path):
        raise IncompleteCheckpoint(
            f"{path.parent} holds an incomplete checkpoint: its index names {path.name}, and there is no such file. "
            "Load another checkpoint, or restore the file"
        )
    if not nbytes:
        return
    try:
        has = path.stat().st_size
    except OSError as e:
        if isinstance(e, TensorferryError):
            raise
        raise SystemRefused(e.errno, f"{path} cannot be read: {e.strerror}") from e
    if has < nbytes:
        raise _cut_off(path, nbytes - has)


def _read_into(file: io.FileIO, offset: int, to: Any, path: Path) -> None:
    """Fills the buffer ``to`` with the bytes of a file from ``offset`` on."""
    left = memoryview(to).cast("B")
    file.seek(offset)
    while left:
        count = file.readinto(left)
        if not count:
            raise _cut_off(path, len(left))
        left = left[count:]


def _cut_off(path: AnyPlace, missing: int) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path} is cut off: its checkpoint's index names {missing} more bytes in it")
