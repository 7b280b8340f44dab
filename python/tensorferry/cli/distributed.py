"""Folders of distributed checkpoints, as far as they can be handled without torch: their index as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._native import Stored, Table, _file_entries, _file_entry_digests, _file_header
from ..errors import CorruptCheckpoint, IncompleteCheckpoint, ProtocolError
from ..storage import commits, reserved
from ..storage.container import Container
from ..storage.folder import INDEX
from ..storage.names import checked_files as checked_names
from ..storage.names import new_id
from ..storage.peers import container_name
from ..storage.places import AnyPlace
from ..storage.whole_files import is_file
from .leaf import TORCH_NAMES, Listing, nbytes

#: As ``dcp/save_plan.py`` has it.
_ABOUT = (("tensorferry.dcp", "1"),)


def decoded(text: bytes, where: object) -> dict[str, Any]:
    """Returns the fields of the index ``text``.

    Raises:
        ProtocolError: it is not an index of this version
    """
    try:
        fields = json.loads(text)
        if fields["version"] != 1:
            raise ValueError(f"it has version {str(fields['version'])[:20]}")
        if not isinstance(fields["sources"], list) or not isinstance(fields["state"], dict):
            raise ValueError("a field of it has another type")
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ProtocolError(f"{where}: its index cannot be read ({type(e).__name__}: {e})") from e
    return dict(fields)


def checked_files(folder: AnyPlace, names: list[Any], commit: commits.Commit) -> list[str]:
    """Returns the names of the files of an index, after checking that they are the ones it commits, and are there.

    Raises:
        ProtocolError: a name is not that of a rank's file, or is not in the index's list of files
        IncompleteCheckpoint: a file is missing
        CorruptCheckpoint: a file has another header than the index says
        TensorferryError: a file cannot be read
    """
    for name in checked_names(names, folder / INDEX):
        if name not in commit.files:
            raise ProtocolError(f"{folder}: {INDEX} refers to {name!r}, which is not in its list of files")
        if not is_file(folder / name):
            raise IncompleteCheckpoint(
                f"{folder} holds an incomplete checkpoint: its index names {name}, and there is none"
            )
        if commit.files[name] not in (None, _file_header(folder / name)):
            raise CorruptCheckpoint(f"{folder / name}: it is not the file that the index names, but another one")
    return names


def opened(folder: AnyPlace) -> tuple[dict[str, Any], list[str]]:
    """Returns the index in ``folder`` and the names of its files, which are there; raises as what it calls."""
    text, commit = commits.read(folder / INDEX)
    fields = decoded(text, folder / INDEX)
    return fields, checked_files(folder, fields["sources"], commit)


def check_entries(folder: AnyPlace, fields: dict[str, Any], names: list[str]) -> None:
    """Checks that the files have the entries that an index says, and these the tensors that it says.

    Args:
        folder: the folder
        fields: the index
        names: its files, as they are called in the folder

    Raises:
        ProtocolError: index and files contradict each other
        TensorferryError: a file cannot be read
    """
    headers = []
    for name in names:
        stored = Stored.open(folder / name, checksums=False)
        headers.append(dict(zip(stored.names, zip(stored.dtypes, stored.sizes, strict=True), strict=True)))
    for fqn, about in fields["state"].items():
        try:
            chunks: list[Any] = [(None, about[1])] if about[0] == "b" else [(chunk[1], chunk[2]) for chunk in about[4]]
            for sizes, (number, entry, dtype, size, kind) in chunks:
                holds = kind != "t" or (
                    (dtype == "U8" or TORCH_NAMES[dtype] == about[1]) and nbytes(about[1], tuple(sizes)) == size
                )
                if not holds or headers[number].get(entry) != (dtype, size):
                    raise ProtocolError(
                        f"{folder}: the entry {entry!r} of {names[number]} is not what the index says of {fqn}"
                    )
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise ProtocolError(f"{folder}: what its index says of {fqn} is not valid") from e


def with_digests(listing: Listing, folder: AnyPlace, fields: dict[str, Any], names: list[str]) -> Listing:
    """Returns ``listing`` with the digests of its tensors and objects.

    That of a tensor in several shards is a digest of their digests and places.

    Raises:
        ProtocolError: index and files contradict each other
        TensorferryError: a file cannot be read
    """
    by_file = []
    for name in names:
        stored = Stored.open(folder / name)
        by_file.append(dict(zip(stored.names, _file_entry_digests(folder / name), strict=True)))
    found = []
    for leaf in listing.leaves:
        stored_as = fields["state"][leaf.path]
        try:
            if stored_as[0] == "b":
                digest = f"{by_file[stored_as[1][0]][stored_as[1][1]]:016x}"
            else:
                shards = sorted((list(c[0]), list(c[1]), by_file[c[2][0]][c[2][1]]) for c in stored_as[4])
                whole = len(shards) == 1
                digest = (
                    f"{shards[0][2]:016x}"
                    if whole
                    else hashlib.blake2b(repr(shards).encode(), digest_size=8).hexdigest()
                )
        except (KeyError, IndexError, TypeError) as e:
            raise ProtocolError(f"{folder}: its index names an entry that no file has ({leaf.path})") from e
        found.append(replace(leaf, digest=digest))
    return Listing(listing.about, found, listing.tree, listing.hidden)


def index_container(control: list[tuple[str, bytes]]) -> Container:
    """Returns a container without tensors, of these control entries."""
    return Container(Table(), None, True, control, _ABOUT)


def write_index(
    folder: Path, step: int, names: dict[str, str], began: int, check: Callable[[], object] = lambda: None
) -> None:
    """Commits a distributed checkpoint that was pulled: writes its index, which names files instead of peers.

    The files of the checkpoint that this replaces are removed.

    Args:
        folder: the folder
        step: the step of the publication
        names: the file of each rank by its URL; the first one has the index
        began: when the pull began, as :func:`commits.begin_after` says
        check: as for :func:`commits.commit_index`

    Raises:
        IncompleteCheckpoint: a save that began later has finished in the folder meanwhile, and the pulled files are
            removed; or one of them is gone
        CorruptCheckpoint: a file of a rank is damaged
        SystemRefused: the index cannot be written
        ProtocolError: the first rank has no index, its index names other peers, or it contradicts the files
        Exception: what ``check`` raises
    """
    from ..dcp import marker

    files = list(names.values())
    (text,) = _file_entries(folder / files[0], [reserved.INDEX])
    if text is None:
        raise ProtocolError("the first rank serves no index of a distributed checkpoint")
    fields = decoded(text, "the publication")
    of_peers = {container_name(step, url): name for url, name in names.items()}
    try:
        fields["sources"] = [of_peers[source] for source in fields["sources"]]
    except (KeyError, TypeError):
        raise ProtocolError("the index names a source that the metadata does not") from None
    check_entries(folder, fields, fields["sources"])
    headers = {name: _file_header(folder / name) for name in files}
    index = folder / INDEX
    replaced = commits.commit_index(
        index,
        [(reserved.INDEX, json.dumps(fields, separators=(",", ":")).encode())],
        commits.Commit(headers, began),
        about=_ABOUT,
        check=check,
    )
    marker.leave(index, new_id())
    commits.remove_replaced(index, replaced, files)
