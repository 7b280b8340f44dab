"""``tensorferry verify``: compares the files of a checkpoint with their checksums."""

from __future__ import annotations

from typing import Any

from ..._native import Stored, _file_damage
from ...errors import CorruptCheckpoint, InvalidArgument
from ...storage.folder import INDEX
from ...storage.places import AnyPlace
from ...storage.whole_files import is_file
from .. import console, copying, distributed, exits, places
from ..intact import check_archive, files_of_ranks
from ..listing import check_names_of_shard, files_of_shards
from ..mapped import check_foreign
from ..places import CheckpointKind, Place

#: How many entries are named for each damaged run.
_NAMED = 8
#: The state that is the same on all ranks, in a folder of Megatron's.
_COMMON = "common.pt"
_WITHOUT = "it has no checksums, so its bytes were not compared; tensorferry convert gives it some"


def verify(path: str, /, *, json: bool = False) -> int:
    """Compares every byte of a checkpoint with its checksums.

    Exits with 0 if all bytes match, with 1 if there is nothing that they could be compared with, as in a safetensors
    file of another program, and with 4 if something is damaged.

    Args:
        path: a file or a folder, or the URL of one in an object store
        json: print one JSON document
    """

    def checked() -> list[dict[str, Any]]:
        place = places.find(path)
        if place.kind is places.CheckpointKind.PEERS:
            raise InvalidArgument("what comes from a peer is verified while it is pulled")
        files = _files(place)
        if place.kind is places.CheckpointKind.MEGATRON and is_file(place.path / _COMMON):
            files.append((place.path / _COMMON, True))
        return [_verified(file, archive) for file, archive in files]

    files = places.settled(checked, path)
    verified = all(one["checksums"] and not one["damaged"] and not one["error"] for one in files)
    if json:
        console.out_json({"path": path, "verified": verified, "files": files})
    for one in () if json else files:
        for bad in one["damaged"]:
            console.out(
                f"{one['path']}: damaged: payload bytes {bad['start']}-{bad['end']}, in {', '.join(bad['entries'])}"
            )
        if one["error"]:
            console.out(one["error"])
        elif not one["damaged"]:
            state = "all bytes match" if one["checksums"] else _WITHOUT
            console.out(f"{one['path']}: {state}")
    if any(one["damaged"] or one["error"] for one in files):
        return exits.STATUS[CorruptCheckpoint]
    return exits.OK if verified else exits.NO


def _files(place: Any) -> list[tuple[AnyPlace, bool | None]]:
    """Returns the files of a checkpoint, and whether each is an archive of torch's.

    Of a format without checksums, that is its folder alone, with ``None``.

    Raises:
        IncompleteCheckpoint: one is missing
        CorruptCheckpoint: one has another header than the index says, or is shorter than the index of torch's says
        TensorferryError: the index cannot be read, is not valid, or contradicts the files
    """
    path: AnyPlace = place.path
    match place.layout:
        case CheckpointKind.CONTAINER:
            return [(path, False)]
        case CheckpointKind.ARCHIVE:
            return [(path, True)]
        case CheckpointKind.CHECKPOINT:
            return [(file, False) for file in (path / INDEX, *files_of_ranks(path)[1])]
        case CheckpointKind.SHARDS:
            found = files_of_shards(path)
            for file, names in found.items():
                check_names_of_shard(file, names, Stored.open(file, checksums=False).names)
            return [(file, False) for file in found]
        case CheckpointKind.DISTRIBUTED:
            index, names = distributed.opened(path)
            distributed.check_entries(path, index, names)
            return [(path / name, False) for name in (INDEX, *names)]
        case CheckpointKind.TORCH_DISTRIBUTED:
            from .. import torch_leaves

            torch_leaves.check_files(path)
            return [(path, None)]
        case _:
            return [(path, None)]


def _verified(path: AnyPlace, archive: bool | None) -> dict[str, Any]:
    """Compares a container, or an ``archive`` of ``torch.save``, with its checksums; returns what is damaged.

    With ``None``, there are none.

    Raises:
        TensorferryError: it cannot be read, or is one of those that every verb refuses
    """
    findings: dict[str, Any] = {"path": str(path), "checksums": True, "damaged": [], "error": None}
    try:
        if archive is None:
            findings["checksums"] = False
        elif archive:
            findings["checksums"] = _check_archive(path)
        else:
            damaged = _file_damage(path)
            findings["checksums"] = damaged is not None
            findings["damaged"] = _named(path, damaged) if damaged else []
            if damaged is None:
                check_foreign(path, Stored.open(path, checksums=False))
    except CorruptCheckpoint as e:
        findings["error"] = str(e)
    return findings


def _named(path: AnyPlace, damaged: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Returns the damaged runs with the names of the entries that lie in them, of a file whose header is valid."""
    stored = Stored.open(path, checksums=False)
    spans = list(zip(stored.names, stored.starts, stored.sizes, strict=True))
    return [
        {"start": start, "end": end, "entries": [name for name, at, n in spans if at < end and start < at + n][:_NAMED]}
        for start, end in damaged
    ]


def _check_archive(path: AnyPlace) -> bool:
    """As :func:`~tensorferry.cli.intact.check_archive`, in a store as well."""
    with copying.local(Place(CheckpointKind.ARCHIVE, str(path)), verify=False) as here:
        return check_archive(here.path, path)
