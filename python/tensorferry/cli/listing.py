"""The listings of whatever the command line can name, and the files of a model in several of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import IncompleteCheckpoint, InvalidArgument, ProtocolError, SystemRefused, TensorferryError
from ..storage.foreign import MODEL_INDEX
from ..storage.names import checked_plain
from ..storage.places import AnyPlace
from ..storage.whole_files import is_file, read_whole
from . import distributed, places
from .intact import files_of_ranks
from .leaf import Leaf, Listing, by_path, list_distributed, list_file, list_remote, nbytes
from .peers import Peers, open_source
from .places import CheckpointKind, Place

__all__ = ("Leaf", "Listing", "by_path", "listings", "of_all_ranks")

#: No index is longer, in bytes.
_LONGEST = 100_000_000


def listings(given: Sequence[str], step: int | None, timeout: float, *, digests: bool) -> list[tuple[str, Listing]]:
    """Returns the containers of a checkpoint with their names: one, or one for each rank.

    Args:
        given: a file or a folder, or the metadata of peers
        step: of peers, the step
        timeout: of peers, seconds for each of them
        digests: with the digests of tensors

    Raises:
        TensorferryError: it cannot be read
        SourceChanged: saves have replaced it again and again meanwhile
        InvalidArgument: several files were given
    """

    def read_listings() -> list[tuple[str, Listing]]:
        place = places.find(given[0])
        if place.kind is CheckpointKind.PEERS:
            return _list_peers(Peers.of(given), step, timeout, digests=digests)
        if len(given) > 1:
            raise InvalidArgument(f"this command takes one file or folder, not {len(given)}: run it for each")
        return [*_list_place(place, digests=digests)]

    return places.settled(read_listings, given[0])


def _list_peers(peers: Peers, step: int | None, timeout: float, *, digests: bool) -> list[tuple[str, Listing]]:
    """Lists what peers serve: one state, or the containers of a publication's ranks."""
    listed = []
    for number, urls in enumerate([[url] for url in peers.urls] if peers.are_ranks else [peers.urls]):
        remote, served = open_source(urls, step if step is not None else peers.step, timeout)
        with contextlib.closing(remote):
            name = f"rank {number}" if peers.are_ranks else "peer"
            listed.append((name, list_remote(remote, served, digests=digests)))
    return listed


def _list_place(place: Place, *, digests: bool) -> list[tuple[str, Listing]]:
    """Lists a file or a folder; the checkpoint of a checkpointer has a listing for each rank."""
    path = place.path
    match place.layout:
        case CheckpointKind.CONTAINER:
            return [(place.text, list_file(path, digests=digests))]
        case CheckpointKind.CHECKPOINT:
            index, files = files_of_ranks(path)
            listings_of_ranks = []
            for file in files:
                listing = list_file(file, digests=digests)
                listing.about["step"] = index.step
                listings_of_ranks.append((str(file), listing))
            return listings_of_ranks
        case CheckpointKind.SHARDS:
            return [(place.text, _list_shards(path, digests=digests))]
        case CheckpointKind.DISTRIBUTED:
            return [(place.text, _list_distributed(path, digests=digests))]
        case _:
            from . import torch_leaves

            return [(place.text, torch_leaves.list_place(place, digests=digests))]


def _list_shards(folder: AnyPlace, *, digests: bool) -> Listing:
    """Lists a model in several safetensors files as one."""
    leaves: list[Leaf] = []
    hidden: dict[str, str] = {}
    files = files_of_shards(folder)
    for path, names in files.items():
        listing = list_file(path, digests=digests)
        check_names_of_shard(path, names, [leaf.path for leaf in listing.leaves])
        leaves += [replace(leaf, notes=[*leaf.notes, path.name]) for leaf in listing.leaves]
        hidden |= listing.hidden
    about = {"kind": "tensors", "checksums": False, "files": [path.name for path in files]}
    leaves.sort(key=lambda leaf: leaf.path)
    return Listing({**about, "bytes": sum(leaf.bytes for leaf in leaves)}, leaves, None, hidden)


def _list_distributed(folder: AnyPlace, *, digests: bool) -> Listing:
    index, commit = distributed.read(folder)
    listing = list_distributed(index, sorted(commit.files))
    return distributed.with_digests(listing, folder, index, distributed.opened(folder)[1]) if digests else listing


def of_all_ranks(found: list[tuple[str, Listing]]) -> Listing:
    """Returns one listing of several ranks: a tensor that is spread over them once, other values with their ranks."""
    ranks = [by_path(listing.leaves) for _, listing in found]
    leaves = []
    for path in dict.fromkeys(path for rank in ranks for path in rank):
        holders = [number for number, rank in enumerate(ranks) if path in rank]
        those = [ranks[number][path] for number in holders]
        first = those[0]
        notes = [note for note in first.notes if note != first.part]
        if first.part:
            notes.append(f"spread over {len(holders)} ranks")
        elif len(holders) < len(ranks):
            notes.append(f"only on rank {', '.join(map(str, holders))}")
        if any((one.dtype, one.shape, one.digest) != (first.dtype, first.shape, first.digest) for one in those):
            notes.append("differs between ranks")
            first = replace(first, digest=None)
        leaves.append(
            replace(first, bytes=nbytes(first.dtype, first.shape) if first.part else first.bytes, notes=notes)
        )
    about = {**found[0][1].about, "bytes": sum(listing.about["bytes"] for _, listing in found)}
    return Listing({**about, "kind": f"states of {len(found)} ranks"}, leaves)


def files_of_shards(folder: Any) -> dict[Any, list[str]]:
    """Returns the files that the index in ``folder`` names, each with the names of its tensors.

    Raises:
        IncompleteCheckpoint: a file is missing
        ProtocolError: the index is not valid, or names a file outside of the folder
        SystemRefused: the index cannot be read
    """
    index = folder / MODEL_INDEX
    try:
        fields = json.loads(read_whole(index, _LONGEST))
    except OSError as e:
        if isinstance(e, TensorferryError):
            raise
        raise SystemRefused(e.errno, f"{index}: cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        if isinstance(e, ProtocolError):
            raise
        raise ProtocolError(f"{index}: its index cannot be read ({e})") from e
    places = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(places, dict):
        raise ProtocolError(f"{index}: its index cannot be read (it has no weight_map)")
    found: dict[Any, list[str]] = {}
    for tensor, name in places.items():
        found.setdefault(folder / checked_plain(name, f"{folder}: its index"), []).append(tensor)
    for path in found:
        if not is_file(path):
            raise IncompleteCheckpoint(f"{folder} is incomplete: {path.name} is missing")
    return dict(sorted(found.items()))


def check_names_of_shard(path: AnyPlace, expected: list[str], held: list[str]) -> None:
    """Compares the tensors that the index has in a file with those that are in it.

    Raises:
        IncompleteCheckpoint: one is not there
    """
    if missing := sorted(set(expected) - set(held)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise IncompleteCheckpoint(f"{path} does not hold {missing[0][:200]}{more}, which the index has there")
