"""The index of a checkpoint: what torch calls ``Metadata``, in an encoding of our own.

A pickled ``Metadata`` of one torch version cannot be read by another, and a job that is fetched from need not run the
same one. docs/format.md has the grammar.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from dataclasses import dataclass
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

from ..allowlist import Allowed
from ..errors import InvalidArgument, ProtocolError
from ..unpickling import unpickler

VERSION = 1
#: The entry the index stands in.
ENTRY = "__tensorferry__/dcp"

#: How an entry holds what the planner gave: elements of a tensor, or what ``torch.save`` made of an object or a tensor.
ELEMENTS, OBJECT, PICKLED_TENSOR = "t", "b", "p"


@dataclass(frozen=True)
class Place:
    """Where a chunk or an object is.

    Attributes:
        source: a file's name, or step and URL of a publication
        entry: the name of the entry in that container
        dtype: the entry's element type, by its name in a container
        nbytes: the entry's length
        kind: one of ``ELEMENTS``, ``OBJECT``, ``PICKLED_TENSOR``
        header: the checksum of the header of the file, while it is being saved
    """

    source: str
    entry: str
    dtype: str
    nbytes: int
    kind: str
    header: int | None = None


def encode(metadata: Metadata, places: dict[MetadataIndex, Place]) -> bytes:
    """The index of ``metadata`` whose chunks and objects are at ``places``.

    Raises:
        InvalidArgument: the planner's metadata speaks of something that was not written, or its keys are no strings
    """
    sources = sorted({place.source for place in places.values()})
    number = {source: i for i, source in enumerate(sources)}

    def written(index: MetadataIndex) -> list[Any]:
        place = places.get(index)
        if place is None:
            raise InvalidArgument(f"the planner speaks of {index}, which no rank has written")
        return [number[place.source], place.entry, place.dtype, place.nbytes, place.kind]

    state: dict[str, list[Any]] = {}
    for fqn, stored in metadata.state_dict_metadata.items():
        if not isinstance(fqn, str):
            raise InvalidArgument(f"keys of a state_dict are strings here, not {fqn!r}")
        if isinstance(stored, BytesStorageMetadata):
            state[fqn] = ["b", written(MetadataIndex(fqn))]
            continue
        chunks = [[*map(list, (c.offsets, c.sizes)), written(MetadataIndex(fqn, c.offsets))] for c in stored.chunks]
        properties = stored.properties
        dtype = str(properties.dtype).removeprefix("torch.")
        state[fqn] = ["t", dtype, list(stored.size), bool(properties.requires_grad), chunks]
    index = {"version": VERSION, "sources": sources, "state": state, "planner": _planner_data(metadata.planner_data)}
    return json.dumps(index, separators=(",", ":")).encode()


def _planner_data(data: Any) -> Any:
    """The paths of a flattened state as they are; what other planners keep, pickled."""
    if data is None:
        return None
    if isinstance(data, dict) and all(
        isinstance(fqn, str) and isinstance(path, tuple) and all(type(key) in (str, int) for key in path)
        for fqn, path in data.items()
    ):
        return {"paths": {fqn: list(path) for fqn, path in data.items()}}
    return {"pickle": base64.b64encode(pickle.dumps(data, 4)).decode()}


def decode(text: bytes, where: str, allowed: Allowed) -> Metadata:
    """The index as torch's planners want it; ``storage_data`` gives the place of each chunk and object.

    Args:
        text: what ``encode`` made
        where: what messages call it
        allowed: which globals a planner's own data may name

    Raises:
        ProtocolError: it is no index, or of another version
        UnsafePickle: a planner's data names something that is not allowed
    """
    try:
        index = json.loads(text)
        version = index["version"]
        if version != VERSION:
            raise ProtocolError(f"{where}: its index is of version {version}, not {VERSION}: upgrade the older side")
        places: dict[MetadataIndex, Place] = {}
        state: dict[str, Any] = {}
        for fqn, stored in index["state"].items():
            if stored[0] == "b":
                state[fqn] = BytesStorageMetadata()
                places[MetadataIndex(fqn)] = _place(index["sources"], stored[1])
                continue
            _, dtype, size, requires_grad, chunks = stored
            listed = []
            for offsets, sizes, place in chunks:
                chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                listed.append(chunk)
                places[MetadataIndex(fqn, chunk.offsets)] = _place(index["sources"], place)
            properties = TensorProperties(dtype=_dtype(dtype), requires_grad=bool(requires_grad))
            state[fqn] = TensorStorageMetadata(properties=properties, size=torch.Size(size), chunks=listed)
        planner = index["planner"]
    except ProtocolError:
        raise
    except Exception as e:  # Whatever a wrong shape of JSON leads to.
        raise ProtocolError(f"{where}: its index cannot be read ({type(e).__name__}: {e})") from e
    return Metadata(state, planner_data=_read_planner_data(planner, where, allowed), storage_data=places)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"this torch has no dtype {name!r}")
    return dtype


def _place(sources: list[str], stored: list[Any]) -> Place:
    source, entry, dtype, nbytes, kind = stored
    if not (isinstance(entry, str) and isinstance(dtype, str) and isinstance(nbytes, int) and nbytes >= 0):
        raise ValueError(f"no place: {stored!r}")
    return Place(str(sources[source]), entry, dtype, nbytes, kind)


def _read_planner_data(stored: Any, where: str, allowed: Allowed) -> Any:
    match stored:
        case None:
            return None
        case {"paths": dict(paths)}:
            return {fqn: tuple(path) for fqn, path in paths.items()}
        case {"pickle": str(text)}:
            try:
                data = base64.b64decode(text)
            except ValueError as e:
                raise ProtocolError(f"{where}: the planner's data in its index cannot be read ({e})") from e
            return unpickler(allowed, lambda _: "the planner's data")(io.BytesIO(data)).load()
    raise ProtocolError(f"{where}: the planner's data in its index cannot be read")
