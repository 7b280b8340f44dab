"""Folders of distributed checkpoints, as far as they can be handled without torch: their index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from .._native import Index, Stored, Table, _file_entries, _file_entry_digests, _file_header
from ..errors import CorruptCheckpoint, IncompleteCheckpoint, ProtocolError
from ..storage import commits, reserved
from ..storage.container import Container
from ..storage.folder import INDEX
from ..storage.names import checked_files as checked_names
from ..storage.names import new_id
from ..storage.places import AnyPlace
from ..storage.whole_files import is_file
from .leaf import TORCH_NAMES, Listing, nbytes

#: As ``dcp/save_plan.py`` has it.
_ABOUT = (("tensorferry.dcp", "1"),)


def read(folder: AnyPlace) -> tuple[Index, commits.Commit]:
    """Reads the index in ``folder``, whose files count in the order of their names.

    Raises:
        ProtocolError: it is not an index of this version
        TensorferryError: otherwise as for :func:`commits.read`
    """
    text, commit = commits.read(folder / INDEX)
    return decoded(text, folder / INDEX, len(commit.files)), commit


def decoded(text: bytes, where: object, files: int) -> Index:
    """Returns the index ``text`` of ``files`` files.

    Raises:
        ProtocolError: it is not an index of this version
    """
    try:
        return Index.decode(text, files)
    except ProtocolError as e:
        raise ProtocolError(f"{where}: its index cannot be read: {e}") from e


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


def opened(folder: AnyPlace) -> tuple[Index, list[str]]:
    """Returns the index in ``folder`` and the names of its files, which are there; raises as what it calls."""
    index, commit = read(folder)
    return index, checked_files(folder, sorted(commit.files), commit)


def check_entries(folder: AnyPlace, index: Index, names: list[str]) -> None:
    """Checks that the files have the entries that an index says, and these the tensors that it says.

    Args:
        folder: the folder
        index: the index
        names: its files, as they are called in the folder

    Raises:
        ProtocolError: index and files contradict each other
        TensorferryError: a file cannot be read
    """
    headers = [Stored.open(folder / name, checksums=False) for name in names]
    columns = [(stored.dtypes, stored.sizes) for stored in headers]
    for number, key in enumerate(index.keys):
        dtype = index.item(number)[2]
        for _, sizes, file, entry, size, kind, _ in index.chunks(number):
            dtypes, lengths = columns[file]
            holds = entry < len(lengths) and lengths[entry] == size
            if holds and kind == "t" and dtype is not None:
                holds = TORCH_NAMES.get(dtypes[entry]) in (dtype, "uint8") and nbytes(dtype, sizes) == size
            if not holds:
                raise ProtocolError(f"{folder}: entry {entry} of {names[file]} is not what the index says of {key}")


def with_digests(listing: Listing, folder: AnyPlace, index: Index, names: list[str]) -> Listing:
    """Returns ``listing`` with the digests of its tensors and objects.

    That of a tensor in several shards is a digest of their digests and places.

    Raises:
        ProtocolError: index and files contradict each other
        TensorferryError: a file cannot be read
    """
    by_file = [_file_entry_digests(folder / name) for name in names]
    found = []
    for number, leaf in enumerate(listing.leaves):
        try:
            shards = sorted(
                (list(offsets), list(sizes), by_file[file][entry])
                for offsets, sizes, file, entry, *_ in index.chunks(number)
            )
        except IndexError as e:
            raise ProtocolError(f"{folder}: its index names an entry that no file has ({leaf.path})") from e
        whole = len(shards) == 1
        digest = f"{shards[0][2]:016x}" if whole else blake2b(repr(shards).encode(), digest_size=8).hexdigest()
        found.append(replace(leaf, digest=digest))
    return Listing(listing.about, found, listing.tree, listing.hidden)


def index_container(control: list[tuple[str, bytes]]) -> Container:
    """Returns a container without tensors, of these control entries."""
    return Container(Table(), None, True, control, _ABOUT)


def write_index(folder: Path, files: list[str], began: int, check: Callable[[], object] = lambda: None) -> None:
    """Commits a distributed checkpoint that was pulled: writes its index, which names files instead of peers.

    The files of the checkpoint that this replaces are removed.

    Args:
        folder: the folder
        files: the file of each rank; the first one has the index
        began: when the pull began, as :func:`commits.begin_after` says
        check: as for :func:`commits.commit_index`

    Raises:
        IncompleteCheckpoint: a save that began later has finished in the folder meanwhile, and the pulled files are
            removed; or one of them is gone
        CorruptCheckpoint: a file of a rank is damaged
        SystemRefused: the index cannot be written
        ProtocolError: the first rank has no index, or it contradicts the files
        Exception: what ``check`` raises
    """
    from ..dcp import marker

    (text,) = _file_entries(folder / files[0], [reserved.INDEX])
    if text is None:
        raise ProtocolError("the first rank serves no index of a distributed checkpoint")
    check_entries(folder, decoded(text, "the publication", len(files)), files)
    headers = {name: _file_header(folder / name) for name in files}
    index = folder / INDEX
    replaced = commits.commit_index(
        index,
        [(reserved.INDEX, text)],
        commits.Commit(headers, began),
        about=_ABOUT,
        check=check,
    )
    marker.leave(index, new_id())
    commits.remove_replaced(index, replaced, files)
