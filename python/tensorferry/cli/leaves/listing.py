"""The listings of whatever the command line can name."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from ...errors import InvalidArgument
from ...storage import commits
from ...storage.folder import INDEX
from ...storage.places import AnyPlace
from .. import places
from ..flags import Receiving, Trust
from ..intact import files_of_ranks
from ..places import CheckpointKind, Place
from ..sources import Peers, open_source
from . import distributed, shards
from .leaf import Leaf, Listing, list_distributed, list_file, list_remote


def listings(
    given: Sequence[str], step: int | None, receiving: Receiving, trust: Trust, *, digests: bool
) -> list[tuple[str, Listing]]:
    """Returns the containers of a checkpoint with their names: one, or one for each rank.

    Args:
        given: a file or a folder, or the metadata of peers
        step: of peers, the step
        receiving: the deadline and the connections, for peers
        trust: what peers have to prove
        digests: with the digests of tensors

    Raises:
        TensorferryError: it cannot be read
        SourceChanged: saves have replaced it again and again meanwhile
        InvalidArgument: several files were given
    """

    def read_listings() -> list[tuple[str, Listing]]:
        place = places.find(given[0])
        if place.kind is CheckpointKind.PEERS:
            return _list_peers(Peers.of(given, trust), step, receiving, trust, digests=digests)
        if len(given) > 1:
            raise InvalidArgument(f"this command takes one file or folder, not {len(given)}: run it for each")
        return [*_list_place(place, digests=digests)]

    return places.settled(read_listings, given[0])


def _list_peers(
    peers: Peers, step: int | None, receiving: Receiving, trust: Trust, *, digests: bool
) -> list[tuple[str, Listing]]:
    """Lists what peers serve: one state, or the containers of a publication's ranks."""
    listed = []
    for number, urls in enumerate([[url] for url in peers.urls] if peers.are_ranks else [peers.urls]):
        remote, served = open_source(urls, step if step is not None else peers.step, trust, receiving)
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
    files = shards.files_of(folder)
    for path, names in files.items():
        listing = list_file(path, digests=digests)
        shards.check_names(path, names, [leaf.path for leaf in listing.leaves])
        leaves += [replace(leaf, notes=[*leaf.notes, path.name]) for leaf in listing.leaves]
        hidden |= listing.hidden
    about = {"kind": "tensors", "checksums": False, "files": [path.name for path in files]}
    leaves.sort(key=lambda leaf: leaf.path)
    return Listing({**about, "bytes": sum(leaf.bytes for leaf in leaves)}, leaves, None, hidden)


def _list_distributed(folder: AnyPlace, *, digests: bool) -> Listing:
    text, commit = commits.read(folder / INDEX)
    fields = distributed.decoded(text, folder / INDEX)
    listing = list_distributed(fields, folder)
    return distributed.with_digests(listing, folder, fields, commit) if digests else listing
