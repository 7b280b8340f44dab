"""The leaves of what only torch can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from .._gc import gc_paused
from ..dcp import torch_folder
from ..dcp.marker import NAME
from ..dcp.torch_folder import TorchFolderSource, with_stand_ins
from ..errors import InvalidArgument
from ..pickles.allowlist import Allowed
from ..pickles.globals.kinds import Unlisted
from ..state import tree
from ..storage.places import AnyPlace
from .leaf import Leaf, Listing, UniqueNames, walk
from .places import CheckpointKind, Place


def list_place(place: Place, *, digests: bool) -> Listing:
    """Lists a ``torch.save`` file or a distributed checkpoint of torch; pickles are read with the allow-list.

    Raises:
        TensorferryError: it cannot be read
        InvalidArgument: digests were asked for of a distributed checkpoint, which has none; or it is of Megatron's zarr
    """
    if place.layout is CheckpointKind.MEGATRON:
        raise InvalidArgument(f"{place.text} is a checkpoint of Megatron's backend zarr: convert it first")
    if digests and place.layout is CheckpointKind.TORCH_DISTRIBUTED:
        raise InvalidArgument(f"{place.text} has no digests: convert it, or compare it with tensorferry diff")
    if place.layout is CheckpointKind.TORCH_DISTRIBUTED:
        return _list_folder(place.path)
    from .copying import local

    with local(place, verify=False) as here:
        return _list_archive(here.path, digests=digests)


def _list_archive(path: Path, *, digests: bool) -> Listing:
    from .states import state_of_archive

    leaves = leaves_of(state_of_archive(path, allowed=Allowed().sparing()), digests=digests)
    return _listing(CheckpointKind.ARCHIVE, leaves, file_bytes=path.stat().st_size)


def _listing(kind: CheckpointKind, leaves: list[Leaf], **about: int) -> Listing:
    return Listing(
        {"kind": kind.value, "checksums": False, "bytes": sum(leaf.bytes for leaf in leaves), **about}, leaves
    )


def leaves_of(state: Any, *, digests: bool) -> list[Leaf]:
    """Returns the leaves of a state in memory."""
    from .values import digest_of

    found = []
    for path, value in values_of(state).items():
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                nbytes = value.numel() * value.element_size()
                kind = "tensor" if value.is_contiguous() and value.untyped_storage().nbytes() == nbytes else "view"
            else:
                nbytes, kind = 0, "view"
            dtype = str(value.dtype).removeprefix("torch.")
            digest = digest_of(value) if digests else None
            found.append(Leaf(path, kind, dtype, tuple(value.shape), nbytes, [], digest))
        else:
            is_allowed = type(value) is not Unlisted
            note = type(value).__name__ if is_allowed else f"{value.module}.{value.name}, not on the allow-list"
            found.append(Leaf(path, "object", notes=[note]))
    return found


def values_of(state: Any) -> dict[str, Any]:
    """Returns the leaves of a state in memory by their paths, as a container of it names them."""
    found: dict[str, Any] = {}
    unique = UniqueNames(found)
    with gc_paused():
        flat = tree.flatten(state)
        names = flat.rows.names
        for path, number in walk(json.loads(flat.tree)):
            # A leaf that stands in several places has its own name in the first of them.
            name = names[number] if number >= 0 and names[number] not in found else path
            found[unique.of(name)] = flat.leaf(number)
    return found


def check_files(folder: AnyPlace) -> None:
    """Checks that a distributed checkpoint of torch has the files that its index names, and all bytes of them.

    Raises:
        IncompleteCheckpoint: one is missing
        CorruptCheckpoint: one is shorter than the index says
        TensorferryError: the index cannot be read
    """
    needs: dict[str, int] = {}
    for ref in _index_of(folder).storage_data.values():
        needs[ref.container] = max(needs.get(ref.container, 0), int(ref.entry) + ref.nbytes)
    for name, nbytes in needs.items():
        torch_folder.check_file(folder / name, nbytes)


def _index_of(folder: AnyPlace) -> Metadata:
    source = TorchFolderSource(folder / NAME)
    return torch_folder.decode(source.read_index(), str(folder / NAME), with_stand_ins((), False))


def _list_folder(folder: Path) -> Listing:
    """Lists a distributed checkpoint of torch by its index."""
    leaves = []
    for fqn, about in _index_of(folder).state_dict_metadata.items():
        chunks = getattr(about, "chunks", None)
        if chunks is None:
            leaves.append(Leaf(fqn, "object"))
            continue
        dtype, shape = about.properties.dtype, tuple(about.size)
        notes = [f"{len(chunks)} shards"] if len(chunks) > 1 else []
        kind = "sharded" if len(chunks) > 1 else "tensor"
        nbytes = about.size.numel() * dtype.itemsize
        leaves.append(Leaf(fqn, kind, str(dtype).removeprefix("torch."), shape, nbytes, notes))
    return _listing(CheckpointKind.TORCH_DISTRIBUTED, leaves)
