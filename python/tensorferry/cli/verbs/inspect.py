"""``tensorferry inspect``: what a checkpoint holds, or a folder of checkpoints."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..._validate import readable
from ...errors import IncompleteCheckpoint, TensorferryError
from ...storage import commits
from ...storage.folder import INDEX, missing_files, read_index, unfinished
from ...storage.objects.place import ObjectPlace
from ...storage.places import AnyPlace, any_place, is_store_url
from ...storage.stores import store_of
from ...storage.whole_files import is_file, subfolders
from .. import console, exits, peers, places
from ..listing import Listing, listings, of_all_ranks
from ..places import CheckpointKind


def inspect(
    path: str,
    /,
    *more: str,
    digests: bool = False,
    step: int | None = None,
    timeout: float = peers.TIMEOUT,
    json: bool = False,
) -> int:
    """Shows the leaves of a checkpoint: dtypes, shapes, sizes, shared memory, shards and digests.

    If the folder holds several checkpoints, lists them, newest first, with the files that unfinished saves have left.

    Args:
        path: a file, a folder, the URL of one in an object store, or the metadata of a running peer
        more: the metadata of further sources
        digests: show the CRC-64/NVME of each tensor; a file without checksums is read for that
        step: the step to ask a peer for (default: the one that is served)
        timeout: seconds in which a peer must answer
        json: print one JSON document, with the leaves of each rank
    """
    peers.refuse_without_peers([path, *more], step, timeout)
    if not more and not digests and path and not peers.is_metadata(path) and (below := _checkpoints_below(path)):
        if json:
            console.out_json({"checkpoints": [one.fields() for one in below]})
        else:
            console.out_table(["name", "step", "bytes", "ranks", "saved", ""], [one.row() for one in below], right=[2])
        return exits.OK
    found = listings([path, *more], step, timeout, digests=digests)
    if json:
        console.out_json([{"name": name, **_fields(listing)} for name, listing in found])
    elif len(found) == 1:
        _show(*found[0], digests)
    else:
        _show(path, of_all_ranks(found), digests)
    return exits.OK


def _fields(listing: Listing) -> dict[str, Any]:
    """Returns a listing for JSON."""
    return {
        **listing.about,
        "tree": listing.tree,
        "leaves": [leaf.fields() for leaf in listing.leaves],
        "hidden": listing.hidden,
    }


def _show(name: str, listing: Listing, digests: bool) -> None:
    """Prints a listing: a line about all of it, a table of its leaves."""
    about, leaves = listing.about, listing.leaves
    tensors = sum(leaf.kind not in ("object", "alias") for leaf in leaves)
    checked = "with checksums" if about.get("checksums") else "without checksums"
    step = "" if about.get("step") is None else f", step {about['step']}"
    # An index has an object such as the settings of an optimizer in one piece; convert counts what is in it.
    others = "objects of one or more leaves" if "distributed" in about["kind"] else "other leaves"
    console.out(
        f"{name}: {about['kind']}{step}, {readable(about.get('bytes', 0))} in {tensors} tensors and "
        f"{len(leaves) - tensors} {others}, {checked}"
    )
    heads = ["path", "dtype", "shape", "bytes", *(["digest"] if digests else []), ""]
    rows = [
        [
            leaf.path,
            leaf.dtype or leaf.kind,
            "x".join(map(str, leaf.shape)) if leaf.dtype else "",
            leaf.bytes if leaf.dtype else "",
            *([leaf.digest or "-"] if digests else []),
            ", ".join(leaf.notes),
        ]
        for leaf in leaves
    ]
    console.out_table(heads, rows, right=[3])


@dataclass(frozen=True)
class _Below:
    """What stands below a folder under one name.

    Attributes:
        name: of the folder or file
        bytes: of the file, or of all files directly in the folder
        saved: nanoseconds since the epoch at which the save began, or else was written
        kind: of the checkpoint; empty if it holds none
        step: the step, where it is known
        ranks: how many ranks have saved it, where that is known
        problem: why it cannot be loaded; empty if nothing is known of that
    """

    name: str
    bytes: int
    saved: int
    kind: str = ""
    step: int | None = None
    ranks: int | None = None
    problem: str = ""

    def fields(self) -> dict[str, Any]:
        """Returns it for JSON."""
        return {**self.__dict__, "saved": self._date()}

    def row(self) -> list[object]:
        """Returns it for a table."""
        step, ranks = ("" if number is None else number for number in (self.step, self.ranks))
        return [self.name, step, readable(self.bytes), ranks, self._date(), self.problem or self.kind]

    def _date(self) -> str:
        try:
            return datetime.fromtimestamp(self.saved / 1e9).astimezone().isoformat(" ", "seconds")
        except (OverflowError, ValueError, OSError):  # An index may say anything.
            return ""


def _checkpoints_below(text: str) -> list[_Below]:
    """Returns what is directly below the folder ``text``, the newest first.

    That is nothing if it is a checkpoint itself, or none is below it. Of a folder of this machine, what cannot be read
    is left out; in a store, only folders are looked at.

    Raises:
        TensorferryError: it cannot be read
    """
    folder = any_place(text) if is_store_url(text) else Path(text)
    try:
        places.settled(lambda: places.find(text), text)
        return []
    except IncompleteCheckpoint:
        if isinstance(folder, Path) and (not folder.is_dir() or unfinished(folder) is not None):
            return []
    found = []
    if isinstance(folder, ObjectPlace):
        found = [_below(folder / name, [*store_of(folder / name).entries().values()]) for name in subfolders(folder)]
    else:
        with contextlib.suppress(OSError):
            for entry in sorted(os.listdir(folder)):
                path = folder / entry
                if not entry.startswith(".") and (path.is_dir() or path.name.endswith(places.FILES)):
                    with contextlib.suppress(OSError):
                        files = [one.stat() for one in os.scandir(path) if one.is_file()] if path.is_dir() else []
                        found.append(_below(path, files or [path.stat()]))
    listed = [one for one in found if one is not None]
    if not any(one.kind for one in listed):
        return []
    return sorted(listed, key=lambda one: (one.saved, one.name), reverse=True)


def _below(path: AnyPlace, files: list[Any]) -> _Below | None:
    """Returns what ``path`` is; ``None`` if it is neither a checkpoint nor what a save has left."""
    nbytes, newest = sum(about.st_size for about in files), max((about.st_mtime_ns for about in files), default=0)
    try:
        place = places.find(str(path))
        kind = place.kind.value
        if place.layout is CheckpointKind.CHECKPOINT:
            index = read_index(path)
            missing, began, ranks = missing_files(path, index), index.began, index.world_size
        elif place.layout is CheckpointKind.DISTRIBUTED:
            commit = commits.files_of(path / INDEX)
            missing = [file for file in commit.files if not is_file(path / file)]
            began, ranks = commit.began or newest, len(commit.files)
        else:
            return _Below(path.name, nbytes, newest, kind)
    except TensorferryError as e:
        if isinstance(path, Path) and path.is_file():
            return _Below(path.name, nbytes, newest)
        left = unfinished(path)
        if left is None and not places.has_signs(path):
            return None
        return _Below(path.name, nbytes, newest, problem=str(left or e))
    step = index.step if place.layout is CheckpointKind.CHECKPOINT else None
    problem = f"incomplete: {', '.join(missing)} is missing" if missing else ""
    return _Below(path.name, nbytes, began, kind, step, ranks, problem)
