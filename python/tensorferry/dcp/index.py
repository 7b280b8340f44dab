"""The index of a distributed checkpoint: torch's ``Metadata`` as JSON.

It is not a pickle, because a pickled ``Metadata`` of one torch version cannot be read by another, and the jobs on both
sides need not run the same one. docs/reference/format.md has the grammar.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
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

from .._gc import gc_paused
from ..errors import InvalidArgument, ProtocolError, TensorferryError
from ..pickles.allowlist import Allowed
from ..pickles.unpickler import unpickler_class
from ..storage import boxes
from ..storage.boxes import Box, why_not_whole
from ..storage.slices import contiguous_strides

VERSION = 1
#: The version that torch's own writer gives its checkpoints.
_TORCHS_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")
#: What this torch tells about tensors and checkpoints.
_HAS_STRIDES = any(field.name == "strides" for field in fields(TensorProperties))
_ABOUT = frozenset(field.name for field in fields(StorageMeta))

#: The kinds of entries: the elements of a tensor; an object, or a tensor, as ``torch.save`` writes it.
ELEMENTS, OBJECT, PICKLED_TENSOR = "t", "b", "p"
#: A value that has no entry of its own, since its source builds it out of several; no index has this kind.
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
        entry: the name of the entry in that container
        dtype: the entry's element type, by its name in a container
        nbytes: the entry's length in bytes
        kind: one of ``ELEMENTS``, ``OBJECT``, ``PICKLED_TENSOR``, ``BUILT``
        header: during a save, the checksum of the file's header; otherwise ``None``
        tensor: during a save, dtype and shape of the tensor that was written; otherwise, and for objects, ``None``
        layout: where the elements are in an entry that they do not fill in their order: the offset of the first byte,
            and the strides in elements
    """

    container: str
    entry: str
    dtype: str
    nbytes: int
    kind: str
    header: int | None = None
    tensor: tuple[str, Sequence[int]] | None = None
    layout: tuple[int, tuple[int, ...]] | None = None


def check_whole(metadata: Metadata) -> None:
    """Checks that the chunks of each tensor make it up.

    Raises:
        InvalidArgument: those of one do not; its key and the reason are named
    """
    for fqn, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata) and (why := why_incomplete(stored)) is not None:
            raise InvalidArgument(f"{fqn} cannot be a part of a checkpoint: {why}")


def why_incomplete(stored: TensorStorageMetadata) -> str | None:
    """Returns why the chunks of a tensor do not have each of its elements exactly once; ``None`` if they do."""
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
    return why_not_whole(stored.size, boxes, [f"chunk {number}" for number in range(len(boxes))])


@gc_paused()
def encode(metadata: Metadata, stored: dict[MetadataIndex, EntryRef]) -> bytes:
    """Encodes ``metadata``; ``stored`` maps each of its chunks and objects to the entry that holds it.

    The dtype of a tensor is that of what was written, whatever the planner says: one that caches plans may say what a
    tensor was in an earlier save.

    Raises:
        InvalidArgument: the planner's metadata and what the ranks have written contradict each other; a tensor was
            written in several dtypes; or a key is not a string
        Exception: what pickling the planner's data raises
    """
    containers = sorted({ref.container for ref in stored.values()})
    number = {container: i for i, container in enumerate(containers)}

    # By tuples, because torch's own keys are compared and hashed in Python.
    by_key = {(index.fqn, index.offset): ref for index, ref in stored.items()}

    def written(fqn: str, offset: Any = None) -> list[Any]:
        ref = by_key.get((fqn, offset))
        if ref is None:
            raise InvalidArgument(
                f"the planner's metadata names {MetadataIndex(fqn, offset)}, which no rank has written"
            )
        return [number[ref.container], ref.entry, ref.dtype, ref.nbytes, ref.kind]

    if forgotten := {fqn for fqn, _ in by_key} - metadata.state_dict_metadata.keys():
        raise InvalidArgument(
            f"{min(map(str, forgotten))} was written, and the planner's metadata does not describe it"
        )

    state: dict[str, list[Any]] = {}
    strides: dict[str, Any] = {}
    for fqn, value in metadata.state_dict_metadata.items():
        if not isinstance(fqn, str):
            raise InvalidArgument(f"the keys of a state_dict must be strings, not {fqn!r}")
        if isinstance(value, BytesStorageMetadata):
            state[fqn] = ["b", written(fqn)]
            continue
        chunks = [[*map(list, (c.offsets, c.sizes)), written(fqn, c.offsets)] for c in value.chunks]
        properties = value.properties
        dtype = _dtype_of(fqn, value, [by_key[fqn, chunk.offsets] for chunk in value.chunks])
        state[fqn] = ["t", dtype, list(value.size), bool(properties.requires_grad), chunks]
        if _HAS_STRIDES and properties.strides != tuple(contiguous_strides([*value.size], 1)):
            strides[fqn] = properties.strides
    index = {"version": VERSION, "sources": containers, "state": state, "planner": _planner_data(metadata.planner_data)}
    # Both are new, and readers of earlier versions leave them alone.
    if _HAS_STRIDES:
        index["strides"] = strides
    if save_id := getattr(metadata.storage_meta, "save_id", None):
        index["save"] = str(save_id)
    return json.dumps(index, separators=(",", ":")).encode()


def _dtype_of(fqn: str, about: TensorStorageMetadata, refs: list[EntryRef]) -> str:
    """Returns the dtype in which the tensor ``fqn`` was written, after comparing the rest with what ``about`` says.

    Raises:
        InvalidArgument: they contradict each other
    """
    dtypes = sorted({ref.tensor[0] for ref in refs if ref.tensor is not None})
    if len(dtypes) > 1:
        raise InvalidArgument(f"{fqn}: its parts have different dtypes ({', '.join(dtypes)}): save it in one")
    for ref, chunk in zip(refs, about.chunks, strict=True):
        shape = chunk.sizes if ref.tensor is None else tuple(ref.tensor[1])
        if shape != chunk.sizes or ref.kind == OBJECT:
            what = "an object" if ref.kind == OBJECT else f"a tensor of {list(shape)}"
            raise InvalidArgument(
                f"{fqn}: the planner's metadata says that the part at {list(chunk.offsets)} is a tensor of "
                f"{list(chunk.sizes)}, and what was written is {what}"
            )
    return dtypes[0] if dtypes else dtype_name(about.properties.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in an index."""
    return str(dtype).removeprefix("torch.")


def _planner_data(data: Any) -> Any:
    """Encodes a planner's data: the paths of a flattened state as lists, anything else as a pickle in base64."""
    if data is None:
        return None
    if isinstance(data, dict) and _are_paths(data):
        return {"paths": {fqn: list(path) for fqn, path in data.items()}}
    return {"pickle": base64.b64encode(pickle.dumps(data, 4)).decode()}


def _are_paths(data: dict[Any, Any]) -> bool:
    """Whether ``data`` holds the paths of a flattened state, by key."""
    return all(
        isinstance(fqn, str)
        and isinstance(path, tuple)
        and all(type(key) is str or (type(key) is int and key >= 0) for key in path)
        for fqn, path in data.items()
    ) and _can_be_walked(list(data.values()))


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


@gc_paused()
def decode(text: bytes, where: str, allowed: Allowed) -> Metadata:
    """Decodes an index to the ``Metadata`` for torch's planners.

    Args:
        text: the result of :func:`encode`
        where: how messages name the index
        allowed: the globals that a planner's pickled data may name

    Returns:
        The metadata; its ``storage_data`` maps each chunk and object to its :class:`EntryRef`.

    Raises:
        ProtocolError: ``text`` is not an index, is of another version, or contradicts itself
        UnsafePickle: the planner's data names something that is not allowed
        FetchTimeout: the deadline of ``allowed``, if it has one, passed while the planner's data was unpickled
    """
    try:
        index = json.loads(text)
        version = index["version"]
        if version != VERSION:
            raise ProtocolError(
                f"{where}: its index has version {str(version)[:20]}, not {VERSION}: upgrade the older side"
            )
        # Of the tensors that are not contiguous; an index of an earlier version says nothing about strides.
        strides: dict[str, Any] | None = index.get("strides")
        if not isinstance(strides, dict | None):
            raise ValueError("it has no strides")
        refs = _EntryRefs([_checked_string(source) for source in index["sources"]])
        state: dict[str, Any] = {}
        for fqn, stored in index["state"].items():
            if stored[0] == "b":
                state[_checked_string(fqn)] = BytesStorageMetadata()
                refs.add(MetadataIndex(fqn), stored[1])
                continue
            kind, dtype, size, requires_grad, chunks = stored
            if kind != "t":
                raise ValueError(f"{fqn} has an unknown kind")
            size = checked_sizes(size)
            listed = []
            for offsets, sizes, ref in chunks:
                # Most chunks are a whole tensor, whose shape was checked.
                whole = sizes == stored[2]
                chunk = ChunkStorageMetadata(
                    offsets=checked_sizes(offsets), sizes=size if whole else checked_sizes(sizes)
                )
                if not whole or any(chunk.offsets) or len(chunk.offsets) != len(size):
                    check_inside(fqn, chunk, size)
                listed.append(chunk)
                refs.add(MetadataIndex(fqn, chunk.offsets), ref)
            properties = TensorProperties(dtype=_dtype(dtype), requires_grad=bool(requires_grad))
            if strides is not None:
                set_strides(properties, size, strides[fqn] if fqn in strides else contiguous_strides([*size], 1))
            state[_checked_string(fqn)] = TensorStorageMetadata(properties=properties, size=size, chunks=listed)
        planner = _read_planner_data(index["planner"], state, where, allowed)
        save_id = index.get("save")
    except TensorferryError:
        raise
    except Exception as e:  # JSON of another structure can raise anything.
        raise ProtocolError(f"{where}: its index cannot be read ({type(e).__name__}: {str(e)[:300]})") from e
    return described(stamp(Metadata(state, planner_data=planner, storage_data=refs.known)), save_id=save_id)


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


def set_strides(properties: TensorProperties, size: torch.Size, strides: Any) -> None:
    """Sets the strides of a tensor in its ``properties``, in versions of torch that record them; ``None`` if unknown.

    Raises:
        ValueError: they are not as many as the dimensions, or one cannot be a stride
    """
    if not _HAS_STRIDES or strides is None:
        return
    checked = tuple(map(boxes.checked_size, strides))
    if len(checked) != len(size):
        raise ValueError("a tensor in it has other strides than dimensions")
    properties.strides = checked


def checked_sizes(numbers: Any) -> torch.Size:
    """Returns a shape, or the offsets of a chunk; raises as :func:`boxes.checked_sizes`."""
    return torch.Size(boxes.checked_sizes(numbers))


def check_inside(fqn: str, chunk: ChunkStorageMetadata, size: torch.Size) -> None:
    """Checks that a chunk of the tensor ``fqn`` lies within its shape ``size``.

    Raises:
        ValueError: it does not
    """
    if not all(o + n <= dim for o, n, dim in zip(chunk.offsets, chunk.sizes, size, strict=True)):
        raise ValueError(f"{fqn} of {list(size)} has a chunk of {list(chunk.sizes)} at {list(chunk.offsets)}")


def _checked_string(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"it has a {type(text).__name__} where a string was expected")
    text.encode()
    return text


def _dtype(name: Any) -> torch.dtype:
    dtype = _DTYPES.get(_checked_string(name))
    if dtype is None:
        raise ProtocolError(f"this torch has no dtype {name[:100]!r}")
    return dtype


class _EntryRefs:
    """Collects where chunks and objects are stored, and checks that each has an entry of its own."""

    def __init__(self, containers: list[str]) -> None:
        self.known: dict[MetadataIndex, EntryRef] = {}
        self._containers = containers
        self._taken: set[tuple[int, str]] = set()

    def add(self, index: MetadataIndex, stored: list[Any]) -> None:
        """Adds where ``index``, a chunk or an object, is stored, as the encoded index says it."""
        container, entry, dtype, nbytes, kind = stored
        if kind not in (ELEMENTS, OBJECT, PICKLED_TENSOR):
            raise ValueError(f"the entry of {index.fqn} has an unknown kind")
        key = (boxes.checked_size(container), _checked_string(entry))
        ref = EntryRef(self._containers[container], entry, _checked_string(dtype), boxes.checked_size(nbytes), kind)
        if key in self._taken or self.known.setdefault(index, ref) is not ref:
            raise ValueError(f"{index.fqn} occurs twice, or its entry belongs to another item as well")
        self._taken.add(key)


def _read_planner_data(stored: Any, keys: Iterable[str], where: str, allowed: Allowed) -> Any:
    """Decodes what :func:`_planner_data` encoded; refuses paths with which torch would build a huge state."""
    match stored:
        case None:
            return None
        case {"paths": dict(paths)} if all(isinstance(path, list) for path in paths.values()):
            decoded = {_checked_string(fqn): tuple(path) for fqn, path in paths.items()}
            if not _are_paths(decoded):
                raise ProtocolError(f"{where}: its index has an invalid path into a nested state")
            return decoded
        case {"pickle": str(text)}:
            try:
                data = base64.b64decode(text)
            except ValueError as e:
                raise ProtocolError(f"{where}: the planner's data in its index cannot be read ({e})") from e
            kept = unpickler_class(allowed, lambda _: "the planner's data")(io.BytesIO(data)).load()
            if not allowed.trusts and not has_safe_paths(kept, keys):
                raise ProtocolError(
                    f"{where}: the planner's data in its index has an invalid path into a nested state: pass "
                    "trust_pickle=True to the reader if you trust the job that saved it"
                )
            return kept
    raise ProtocolError(
        f"{where}: the planner's data in its index cannot be read: a newer tensorferry may have written it"
    )
