"""The index of a distributed checkpoint, as the native module writes and reads it, and as torch's ``Metadata``.

Objects are made for what somebody asks for. docs/reference/format.md has the layout.
"""

from __future__ import annotations

import io
import json
import pickle
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData
from torch.distributed.checkpoint.storage import WriteResult

from .._gc import gc_paused
from .._native import Index
from ..errors import InvalidArgument, ProtocolError
from ..memory.tensors import DTYPE_NAMES
from ..pickles.allowlist import Allowed
from ..pickles.unpickler import unpickler_class
from ..storage.slices import contiguous_strides

#: The version that torch's own writer gives its checkpoints.
_TORCHS_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")
#: What this torch tells about tensors and checkpoints.
HAS_STRIDES = any(field.name == "strides" for field in fields(TensorProperties))
#: The fields of ``Metadata`` that an index tells, and the others.
_TOLD, _REST = ("state_dict_metadata", "planner_data", "storage_data"), ("storage_meta", "version")
_ABOUT = frozenset(field.name for field in fields(StorageMeta))

#: The kinds of entries: the elements of a tensor; an object, or a tensor, as ``torch.save`` writes it.
ELEMENTS, OBJECT, PICKLED_TENSOR = "t", "b", "p"
#: A value that has no entry of its own, since its source builds it out of several.
BUILT = "v"

#: A nested state has at most ``_DEEPEST`` levels, and its lists have at most ``_SLOTS`` elements in all, or
#: ``_SLOTS_PER_PATH`` for each path if that is more.
_DEEPEST, _SLOTS, _SLOTS_PER_PATH = 256, 1 << 20, 16
#: Types of values that torch does not take for a path. As keys in a path, only integers are indices of a list.
_NOT_WALKED = (str, int, bool, type(None), torch.dtype)
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


class EntryRef(NamedTuple):
    """Where a chunk or an object is stored.

    Attributes:
        container: the name of a file, or of a peer's container (``storage/peers.py``)
        entry: the number of the entry in the header of that container, or its name
        dtype: the entry's element type, by its name in a container
        nbytes: the entry's length in bytes
        kind: one of ``ELEMENTS``, ``OBJECT``, ``PICKLED_TENSOR``, ``BUILT``
        tensor: dtype and shape of the chunk; ``None`` for objects
        layout: where the elements are in an entry that they do not fill in their order: the offset of the first byte,
            and the strides in elements
    """

    container: str
    entry: int | str
    dtype: str
    nbytes: int
    kind: str
    tensor: tuple[torch.dtype, Sequence[int]] | None = None
    layout: tuple[int, tuple[int, ...]] | None = None


class RankPart(NamedTuple):
    """What a rank has written: its one ``WriteResult``.

    Attributes:
        container: as in :class:`EntryRef`; empty if it has nothing
        header: the checksum of the file's header; ``None`` if it is no file
        encoded: the rank's own ``Index``, compressed
    """

    container: str
    header: int | None
    encoded: bytes

    def results(self, nbytes: int) -> list[WriteResult]:
        """Returns what ``write_data`` hands to torch; ``nbytes`` is the length of the container."""
        return [WriteResult(MetadataIndex(self.container), nbytes, self)]


def parts_of(results: Iterable[Sequence[WriteResult]]) -> list[RankPart]:
    """Returns what each rank has written, from the results of all ranks."""
    nothing = RankPart("", None, zlib.compress(Index().encode()))
    return [of_rank[0].storage_data if of_rank else nothing for of_rank in results]


@gc_paused()
def encode(metadata: Metadata, parts: Sequence[RankPart], containers: Sequence[str]) -> bytes:
    """Encodes the index of a save.

    The dtype of a tensor is that of what was written, whatever the planner says: one that caches plans may say what a
    tensor was in an earlier save.

    Args:
        metadata: the planner's
        parts: what each rank has written; what one rank saves alone may be its part of tensors
        containers: all containers, in the order in which readers list them

    Raises:
        InvalidArgument: the planner's metadata and what the ranks have written contradict each other; the parts of a
            tensor do not make it up; or a key is not a string
        Exception: what pickling the planner's data raises
    """
    numbers = {container: number for number, container in enumerate(containers)}
    files = [numbers.get(part.container, 0) for part in parts]
    return _planned(metadata).written([zlib.decompress(part.encoded) for part in parts], files, len(parts) > 1).encode()


def _planned(metadata: Metadata) -> Index:
    """Returns the index that a planner has planned; the entries are not in it."""
    if isinstance(metadata, StoredMetadata):
        return metadata.index
    index, known, noted = Index(), metadata.state_dict_metadata, metadata.planner_data
    is_of_paths = isinstance(noted, dict) and noted.keys() <= known.keys() and all(map(_is_path, noted.values()))
    paths = noted if is_of_paths else {}
    if noted is not None and not paths:
        index.planner = pickle.dumps(noted, 4)
    for fqn, value in known.items():
        path = json.dumps(paths[fqn], separators=(",", ":")) if fqn in paths else ""
        if isinstance(value, BytesStorageMetadata):
            index.add(checked_key(fqn), None, (), path=path)
            index.add_chunk((), (), 0, 0, OBJECT)
            continue
        add_tensor(index, fqn, value.properties, value.size, path, True)
        for chunk in value.chunks:
            index.add_chunk(chunk.offsets, chunk.sizes, 0, 0, ELEMENTS)
    return index


def add_tensor(
    index: Index, fqn: str, properties: TensorProperties, size: Sequence[int], path: str, spread: bool
) -> None:
    """Adds a key with a tensor to an index; the arguments are as for ``Index.add``."""
    strides = (properties.strides or ()) if HAS_STRIDES else ()
    index.add(
        checked_key(fqn),
        dtype_name(properties.dtype),
        size,
        path=path,
        requires_grad=bool(properties.requires_grad),
        strides=None if strides == tuple(contiguous_strides([*size], 1)) else strides,
        spread=spread,
    )


def checked_key(fqn: Any) -> str:
    """Returns a key of a state after checking that it is text.

    Raises:
        InvalidArgument: it is not
    """
    if not isinstance(fqn, str):
        raise InvalidArgument(f"the keys of a state_dict must be strings, not {fqn!r}")
    return fqn


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in an index."""
    return str(dtype).removeprefix("torch.")


def _is_path(path: Any) -> bool:
    """Whether ``path`` is one in a flattened state, as torch's own planner notes it."""
    return type(path) is tuple and all(type(key) in (str, int) for key in path)


def _can_be_walked(paths: list[Sequence[Any]]) -> bool:
    """Whether the nested state that torch builds from ``paths`` is not much larger than the paths themselves.

    torch creates a list as long as the largest index in it requires. In an honest state, lists have about as
    many elements as there are paths.
    """
    numbers: dict[tuple[int, Any], int] = {}
    lengths: dict[int, int] = {}
    for path in paths:
        if len(path) > _DEEPEST:
            return False
        at = 0
        for depth, key in enumerate(path):
            if depth and isinstance(key, int) and key >= lengths.get(at, 0):
                lengths[at] = key + 1
            at = numbers.setdefault((at, key), len(numbers) + 1)
    return sum(lengths.values()) <= max(_SLOTS, _SLOTS_PER_PATH * len(paths))


def has_safe_paths(data: Any, keys: Iterable[str]) -> bool:
    """Whether torch can use a planner's data safely: it takes the data of ``keys`` for paths into a nested state."""
    if not isinstance(data, Mapping):
        return True
    paths: list[list[Any]] = []
    for kept in (data[key] for key in keys if key in data):
        if type(kept) in (dict, OrderedDict):
            # torch looks up 0, 1, ... and -1 in it, in whatever order they stand here.
            paths.append([None, *kept.values()])
        elif isinstance(kept, (tuple, list, bytes)):
            paths.append(list(kept))
        elif type(kept) not in (*_NOT_WALKED, float):
            return False
    # torch takes everything that compares like a number for the index of a list.
    if not all(type(key) in _NOT_WALKED or isinstance(key, (tuple, list, dict, bytes)) for p in paths for key in p):
        return False
    return _can_be_walked([[key if type(key) in (int, str) else None for key in path] for path in paths])


def decode(data: bytes, where: str, allowed: Allowed, containers: Sequence[str]) -> StoredMetadata:
    """Decodes an index to the ``Metadata`` for torch's planners.

    Args:
        data: the result of :func:`encode`
        where: how messages name the index
        allowed: the globals that a planner's pickled data may name
        containers: the containers, in the order in which the index numbers them

    Returns:
        The metadata; its ``storage_data`` maps each chunk and object to its :class:`EntryRef`. Its ``planner_data``
        raises ``ProtocolError`` or ``UnsafePickle`` if it must not be used.

    Raises:
        ProtocolError: ``data`` is not an index, is of another version, or contradicts itself
    """
    try:
        index = Index.decode(data, len(containers))
    except ProtocolError as e:
        raise ProtocolError(f"{where}: its index cannot be read: {e}") from e
    metadata = StoredMetadata.of(index, where, allowed, containers)
    stamp(metadata)
    return metadata


class StoredMetadata(Metadata):  # type: ignore[misc]  # mypy does not follow torch
    """torch's ``Metadata`` of a checkpoint or a plan, whose fields are made when somebody asks for them.

    Attributes:
        index: the index that it shows
    """

    index: Index

    @classmethod
    def of(
        cls,
        index: Index,
        where: str,
        allowed: Allowed,
        containers: Sequence[str] | None = None,
        unusual: Mapping[str, TensorWriteData] | None = None,
    ) -> StoredMetadata:
        """Returns the metadata of an index.

        Args:
            index: the index
            where: as for :func:`decode`
            allowed: likewise
            containers: likewise; ``None`` for a plan, of which nothing is stored
            unusual: for tensors of which the index does not tell all, what a planner says of them
        """
        metadata = object.__new__(cls)
        metadata.index, metadata._where, metadata._allowed, metadata._containers = index, where, allowed, containers
        metadata._unusual = unusual or {}
        return metadata

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field. Where the index tells it, this becomes torch's own class, as torch's writer pickles it."""
        if name in _TOLD:
            told = {field: getattr(self, field) for field in _TOLD if "index" in vars(self)} | {name: value}
            told["state_dict_metadata"] = _in_torchs_classes(told["state_dict_metadata"])
            self.__dict__ = {field: kept for field, kept in vars(self).items() if field in _REST} | told
            self.__class__ = Metadata
        else:
            super().__setattr__(name, value)

    @cached_property
    def state_dict_metadata(self) -> Mapping[str, Any]:
        """What torch says of each key."""
        known = {}
        for key, data in self._unusual.items():
            number = self.index.find(key)
            known[key] = StoredTensor.of(self.index, number or 0, data.properties, data.size)
        return _Items(self.index, known)

    @cached_property
    def storage_data(self) -> Mapping[MetadataIndex, EntryRef] | None:
        """Where each chunk and object is stored; ``None`` in a plan."""
        return None if self._containers is None else _Places(self.index, self._containers)

    @cached_property
    def planner_data(self) -> Any:
        """The paths of a flattened state, or what else a planner has noted.

        Raises:
            ProtocolError: torch must not follow the paths, or the data cannot be read
            UnsafePickle: it names something that is not allowed
            FetchTimeout: the deadline of the allow-list, if it has one, has passed
        """
        index, kept = self.index, None
        if noted := index.planner:
            kept = unpickler_class(self._allowed, lambda _: "the planner's data")(io.BytesIO(noted)).load()
        try:
            if not noted:
                paths = zip(index.keys, index.paths, strict=True)
                kept = {key: tuple(json.loads(path)) for key, path in paths if path} or None
            is_safe = self._allowed.trusts or has_safe_paths(kept, index.keys)
        except (ValueError, TypeError, RecursionError):
            is_safe = False
        if not is_safe:
            raise ProtocolError(
                f"{self._where}: the planner's data in its index has an invalid path into a nested state: pass "
                "trust_pickle=True to the reader if you trust the job that saved it"
            )
        return kept

    def __reduce__(self) -> Any:
        """Returns the parts of torch's own ``Metadata``; of a plan, which torch sends to all ranks, the index."""
        rest = {field: vars(self)[field] for field in _REST if field in vars(self)}
        if self._containers is None:
            return StoredMetadata.unpacked, (zlib.compress(self.index.encode(), 1), self._unusual), rest
        stored = dict(self.storage_data or {})
        return Metadata, (_in_torchs_classes(self.state_dict_metadata), self.planner_data, stored), rest

    @classmethod
    def unpacked(cls, packed: bytes, unusual: Mapping[str, TensorWriteData]) -> StoredMetadata:
        """Returns the metadata of this job's own plan, from its index."""
        return cls.of(Index.decode(zlib.decompress(packed), 1), "the plan", Allowed((), True), unusual=unusual)


class _Items(Mapping[str, Any]):
    """What torch says of each key of an index."""

    def __init__(self, index: Index, known: dict[str, Any]) -> None:
        self._index, self._known = index, known

    def __getitem__(self, key: str) -> Any:
        value = self._known.get(key)
        if value is None:
            number = self._index.find(key)
            if number is None:
                raise KeyError(key)
            value = self._known[key] = described_item(self._index, number)
        return value

    def __contains__(self, key: object) -> bool:
        return self._index.find(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.keys)

    def __len__(self) -> int:
        return len(self._index)


def described_item(index: Index, number: int) -> BytesStorageMetadata | StoredTensor:
    """Returns torch's description of a key."""
    _, _, dtype, shape, requires_grad, strides, _ = index.item(number)
    if dtype is None:
        return BytesStorageMetadata()
    properties = TensorProperties(dtype=_dtype(dtype), requires_grad=requires_grad)
    if strides is None:
        strides = tuple(contiguous_strides([*shape], 1))
    if HAS_STRIDES and len(strides) == len(shape):
        properties.strides = strides
    return StoredTensor.of(index, number, properties, torch.Size(shape))


class StoredTensor(TensorStorageMetadata):  # type: ignore[misc]  # mypy does not follow torch
    """torch's description of a tensor, whose chunks are made when somebody asks for them."""

    @classmethod
    def of(cls, index: Index, number: int, properties: TensorProperties, size: torch.Size) -> StoredTensor:
        """Returns the description of the tensor with this number in an index."""
        tensor = cls.__new__(cls)
        tensor.properties, tensor.size, tensor._index, tensor._number = properties, size, index, number
        return tensor

    @cached_property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The chunks."""
        with gc_paused():
            chunks = self._index.chunks(self._number)
            return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in chunks]

    def chunks_for(self, wanted: Iterable[ChunkStorageMetadata]) -> list[ChunkStorageMetadata]:
        """Returns the chunks that have elements of ``wanted``.

        Raises:
            ProtocolError: they do not have each of them once
        """
        found: dict[tuple[int, ...], ChunkStorageMetadata] = {}
        for box in wanted:
            for offsets, sizes, *_ in self._index.overlaps(self._number, box.offsets, box.sizes, 0):
                found[offsets] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        return [*found.values()]

    def __reduce__(self) -> Any:
        """Returns the parts of torch's own description."""
        return TensorStorageMetadata, (self.properties, self.size, self.chunks)


def _in_torchs_classes(items: Mapping[str, Any]) -> dict[str, Any]:
    """Returns descriptions of keys as torch itself makes them."""
    return {
        key: TensorStorageMetadata(one.properties, one.size, one.chunks) if isinstance(one, StoredTensor) else one
        for key, one in items.items()
    }


class _Places(Mapping[MetadataIndex, EntryRef]):
    """Where each chunk and object of an index is stored."""

    def __init__(self, index: Index, containers: Sequence[str]) -> None:
        self._index, self._containers = index, containers

    def __getitem__(self, at: MetadataIndex) -> EntryRef:
        number = self._index.find(at.fqn)
        chunk = None if number is None else self._index.chunk_at(number, at.offset or ())
        if number is None or chunk is None:
            raise KeyError(at)
        _, sizes, file, entry, nbytes, kind, layout = chunk
        name = self._index.item(number)[2]
        dtype = None if name is None else _dtype(name)
        stored = DTYPE_NAMES.get(dtype, "U8") if kind == ELEMENTS and dtype else "U8"
        return EntryRef(self._containers[file], entry, stored, nbytes, kind, dtype and (dtype, sizes), layout)

    def __iter__(self) -> Iterator[MetadataIndex]:
        for number, key in enumerate(self._index.keys):
            is_tensor = self._index.item(number)[2] is not None
            for offsets, *_ in self._index.chunks(number):
                yield MetadataIndex(key, offsets if is_tensor else None)

    def __len__(self) -> int:
        return sum(len(self._index.chunks(number)) for number in range(len(self._index)))


def described(metadata: Metadata, checkpoint_id: Any = None, save_id: Any = None) -> Metadata:
    """Adds to the metadata of a checkpoint what torch's own reader tells of it: which one it is.

    Args:
        metadata: the metadata, which is changed
        checkpoint_id: the checkpoint
        save_id: the save that wrote it; by default the one that is in the metadata already
    """
    known = {"checkpoint_id": checkpoint_id, "save_id": save_id or getattr(metadata.storage_meta, "save_id", None)}
    known["load_id"] = str(uuid.uuid4())
    metadata.storage_meta = StorageMeta(**{name: value for name, value in known.items() if name in _ABOUT})
    return metadata


def stamp(metadata: Metadata) -> Metadata:
    """Gives the metadata of a checkpoint the version that torch's own writer gives to its own."""
    if hasattr(metadata, "version"):
        metadata.version = _TORCHS_VERSION
    return metadata


def _dtype(name: str) -> torch.dtype:
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise ProtocolError(f"this torch has no dtype {name[:100]!r}")
    return dtype
