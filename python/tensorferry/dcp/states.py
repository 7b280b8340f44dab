"""Presents states as a distributed checkpoint: those that keepers hold, or that transports send.

A state is a container with a manifest and a pickle (docs/reference/format.md), and has no index of a distributed
checkpoint. Here one is made of the states of all ranks, with the keys that torch's planners give the same states:
DTensors and ShardedTensors are put together from the parts that the ranks have; of everything else that several ranks
have, the first rank's is taken.

To learn the keys, a state is built over memory that stands in for its bytes, so that nothing but manifest and pickle is
fetched before torch's planner has chosen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .._gc import gc_paused
from .._native import Remote
from ..errors import FetchTimeout, InvalidArgument, ProtocolError, TensorferryError, UnsafePickle
from ..memory.tensors import why_not_writable
from ..pickles.allowlist import Allowed
from ..state import tree
from ..state.build import StandIns
from ..state.load import begin
from ..state.local_parts import is_spread
from ..state.part import storages_of
from ..state.shards import Shard, described, entry_of
from ..storage.boxes import checked_sizes
from ..storage.peers import PeerSource, url_of
from ..storage.slices import SliceTuple
from ..storage.spread import RankState, spread_tensors
from .index import BUILT, ELEMENTS, EntryRef, stamp

#: Brings slices to their addresses.
Read = Callable[[Mapping[str, list[SliceTuple]]], object]


class States:
    """The states of the ranks of a job, with the index of a distributed checkpoint.

    Args:
        source: the servers of the ranks
        allowed: the globals that pickled objects may name

    Raises:
        ProtocolError: what one of them serves is not a state
        UnsafePickle: an object is not on the allow-list
        TensorferryError: as for ``HTTPTransport.recv_checkpoint``
    """

    def __init__(self, source: PeerSource, allowed: Allowed) -> None:
        self._ranks = {name: _State(name, source, allowed) for name in source.containers()}

    @gc_paused()
    def metadata(self) -> Metadata:
        """Returns the index; its ``storage_data`` maps each chunk and object to its :class:`EntryRef`.

        Raises:
            ProtocolError: the ranks' states contradict each other, or not all of them are here
        """
        states = list(self._ranks.values())
        found: dict[str, Any] = {}
        refs: dict[MetadataIndex, EntryRef] = {}
        paths: dict[str, Any] = {}
        try:
            shards = spread_tensors([state.of_rank() for state in states])
        except InvalidArgument as e:
            raise ProtocolError(f"the metadata must name all ranks of the job, and names {len(states)}: {e}") from e
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            if isinstance(e, TensorferryError):
                raise
            raise ProtocolError(f"{states[0].where}: a manifest has no valid description of its shards ({e})") from e
        for state in states:
            for fqn, path in state.paths.items():
                if fqn not in found:
                    if (described_at := state.shard_path(fqn)) is None:
                        found[fqn], stored = state.metadata_of(fqn)
                    elif described_at in shards:
                        found[fqn], stored = _spread(states, fqn, shards[described_at])
                    else:
                        raise ProtocolError(f"{state.where}: its manifest does not say which part of {fqn} it has")
                    refs.update(stored)
                    paths[fqn] = path
        return stamp(Metadata(found, planner_data=paths, storage_data=refs))

    def values(self, refs: Sequence[EntryRef], read: Read) -> list[Any]:
        """Returns the values that the entries of kind ``BUILT`` refer to.

        Args:
            refs: the entries, whose names are keys of the checkpoint
            read: brings slices to their addresses

        Raises:
            TensorferryError: as for the constructor
        """
        wanted: dict[str, set[str]] = defaultdict(set)
        for ref in refs:
            wanted[ref.container].add(str(ref.entry))
        found = {name: self._ranks[name].values(keys, read) for name, keys in wanted.items()}
        return [found[ref.container][str(ref.entry)] for ref in refs]


class _State:
    """The state of one rank.

    Args:
        name: the name of its container
        source: the servers of the ranks
        allowed: the globals that its pickle may name

    Attributes:
        name: likewise
        where: how messages name it: without the part of its URL that grants access
        manifest: its manifest
        paths: for each key of the checkpoint that it has, the path in the state
    """

    def __init__(self, name: str, source: PeerSource, allowed: Allowed) -> None:
        self.name = name
        self.where = f"the state at {urlsplit(url_of(name)).netloc.rpartition('@')[2]}"
        # Of a ShardedTensor of this other job, only the shards are taken.
        self._allowed = allowed.detached()
        self._source = source
        self._remote: Remote = source.open(name)
        try:
            self.manifest = self._remote.manifest
            self._names, self._dtypes, self._sizes = self._remote.names, self._remote.dtypes, self._remote.sizes
            self._values: dict[str, Any] = {}
            try:
                self._begin()
            except (UnsafePickle, FetchTimeout):
                raise
            except TensorferryError:
                # Some objects cannot be built before the bytes of their tensors are fetched: sparse tensors check their
                # indices. What is really wrong with the pickle shows again.
                self._begin(source.read)
        finally:
            # An exception keeps this object as long as somebody keeps it.
            self._remote.close()
        #: The identity of a value, to its first key: the one by which the manifest describes a tensor that has several.
        self._first: dict[int, str] = {}
        for fqn, value in self._values.items():
            self._first.setdefault(id(value), fqn)

    def _begin(self, read: Read | None = None) -> None:
        """Builds the state over memory that stands in for its bytes; with ``read``, these are fetched into it."""
        self._builder, self._pickled = begin(self._remote)
        self._stand_ins = StandIns(self._builder)
        if read is not None:
            self._stand_ins.storages = set(range(len(self._builder.manifest.storages)))
            self._fetch(read)
        self.paths = self._build()

    def _build(self) -> dict[str, Any]:
        """Builds the state over the memory as it is; returns the paths of its values by key."""
        builder, stand_ins = self._builder, self._stand_ins
        leaves = [stand_ins.leaf(number) for number in range(len(builder.plain))]
        objects = builder.objects(self._pickled, self._allowed, leaves, stand_ins.storage)
        state = tree.unflatten(builder.manifest.tree, leaves, objects, self._allowed.defaultdict)
        if not isinstance(state, Mapping):
            raise ProtocolError(f"{self.where} is a {type(state).__name__}; a distributed checkpoint is a dict")
        try:
            self._values, paths = flatten_state_dict(dict(state))
        except (ValueError, RecursionError) as e:
            raise ProtocolError(f"{self.where} has no keys of a distributed checkpoint: {e}") from e
        self._numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        return dict(paths)

    def of_rank(self) -> RankState:
        """Returns what the rank serves; its digests are asked for when they are needed."""
        return RankState(lambda: self.manifest, lambda: self._remote, self._digests)

    def _digests(self) -> list[int]:
        remote = self._source.open(self.name)
        try:
            return remote.entry_digests() or []
        finally:
            remote.close()

    def shard_path(self, fqn: str) -> str | None:
        """Returns the path at which the shards of a tensor are described, ``None`` if it is not spread over ranks."""
        value = self._values[fqn]
        return self._first[id(value)] if is_spread(value) else None

    def metadata_of(self, fqn: str) -> tuple[Any, dict[MetadataIndex, EntryRef]]:
        """Returns the metadata of the value ``fqn``, which is not spread over ranks, and where it is stored.

        Tensors that have no shape (nested and uninitialised ones) are described as bytes, as objects are.
        """
        value = self._values[fqn]
        if not isinstance(value, torch.Tensor):
            return BytesStorageMetadata(), {MetadataIndex(fqn): self._built(fqn)}
        try:
            size = torch.Size(checked_sizes(list(value.shape)))
        except Exception:  # Nested tensors and uninitialised parameters have no shape, and raise various errors.
            return BytesStorageMetadata(), {MetadataIndex(fqn): self._built(fqn)}
        number = self._numbers.get(id(value))
        if number is None:
            ref, requires_grad = self._view(value) or self._built(fqn), value.requires_grad
        else:
            ref, flags = self._ref(self._builder.plain[number]), self._builder.manifest.flags
            requires_grad = bool(flags) and flags[number] in "23"
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
        properties = TensorProperties(dtype=value.dtype, requires_grad=requires_grad)
        ref = ref._replace(tensor=(value.dtype, size))
        return TensorStorageMetadata(properties, size, [chunk]), {MetadataIndex(fqn, chunk.offsets): ref}

    def _built(self, fqn: str) -> EntryRef:
        return EntryRef(self.name, fqn, "U8", 0, BUILT)

    def _view(self, value: torch.Tensor) -> EntryRef | None:
        """Returns where the elements of a strided tensor are; ``None`` if they are not in one entry as they are."""
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or why_not_writable(value) is not None:
            return None
        if value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
            return None
        k = self._stand_ins.number_of(value.untyped_storage())
        if k is None or not value.numel():
            return None
        offsets, shape = [0] * value.dim(), list(value.shape)
        shard = Shard(0, offsets, shape, list(value.stride()), k, value.storage_offset())
        return self.elements(shard, value.dtype)

    def elements(self, shard: Shard, dtype: torch.dtype) -> EntryRef | None:
        """Returns the entry that holds the elements of a shard, and their layout in it; ``None`` if it takes several.

        ``dtype`` says how many bytes an element has.
        """
        storages = self._builder.manifest.storages
        start, span = shard.span(shard.offsets, shard.shape, dtype.itemsize)
        try:
            entry, start = entry_of(storages, self._sizes, shard.storage, start, span)
        except KeyError:
            return None
        return self._ref(entry)._replace(layout=(start, tuple(shard.stride)))

    def _ref(self, entry: int) -> EntryRef:
        return EntryRef(self.name, self._names[entry], self._dtypes[entry], self._sizes[entry], ELEMENTS)

    def values(self, keys: set[str], read: Read) -> dict[str, Any]:
        """Returns values by key, with their bytes."""
        self._stand_ins.want(set(), storages_of([self._values[key] for key in keys]))
        self._fetch(read)
        self._build()
        return {key: self._values[key] for key in keys}

    def _fetch(self, read: Read) -> None:
        """Fetches the bytes of the storages that are wanted into the memory that stands in for them."""
        stand_ins, storages = self._stand_ins, self._builder.manifest.storages
        places = {self._builder.plain[n]: stand_ins.leaf(n).untyped_storage().data_ptr() for n in stand_ins.leaves}
        for k in stand_ins.storages:
            start = stand_ins.storage(k).data_ptr()
            places |= {entry: start + low for entry, low in storages[k][1]}
        slices: list[SliceTuple] = [
            (self._names[i], self._dtypes[i], self._sizes[i], 0, self._sizes[i], place, [])
            for i, place in places.items()
            if self._sizes[i]
        ]
        if slices:
            read({self.name: slices})
        stand_ins.note_read()


def _spread(
    states: Sequence[_State], fqn: str, fields: dict[str, Any]
) -> tuple[TensorStorageMetadata, dict[MetadataIndex, EntryRef]]:
    """Returns the metadata of a tensor that is spread over ranks, and where its parts are stored."""
    where = states[0].where
    dtype, shape, shards = described(where, fqn, fields)
    chunks, refs = [], {}
    try:
        size = torch.Size(checked_sizes(shape))
        for shard in shards:
            if math.prod(shard.shape):
                offsets, sizes = (torch.Size(checked_sizes(numbers)) for numbers in (shard.offsets, shard.shape))
                chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
                ref = states[shard.rank].elements(shard, dtype)
                if ref is None:
                    raise ValueError(f"rank {shard.rank} does not have its part")
                refs[MetadataIndex(fqn, offsets)] = ref._replace(tensor=(dtype, sizes))
    except ValueError as e:
        raise ProtocolError(f"{where}: the description of {fqn} contradicts itself: {e}") from e
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks), refs
