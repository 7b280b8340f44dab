"""Reads checkpoints in a folder: this package's, and those of torch's own writer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from .. import _validate
from ..errors import IncompleteCheckpoint, InvalidArgument, TensorferryError
from ..pickles.allowlist import Allowed
from ..storage.folder import INDEX, unfinished
from ..storage.places import AnyPlace, begun
from ..storage.source import FolderSource, Progress, replaced
from ..storage.whole_files import is_file, listed
from . import index, marker, torch_folder
from .failures import noted
from .in_folder import RANK_INDEX, TORCH_INDEX, InFolder, thread_count
from .reader import SliceReader
from .torch_folder import TorchFolderSource, with_stand_ins


class FileReader(InFolder, SliceReader):
    """Reads a checkpoint that ``FileWriter`` or torch's own writer wrote, for ``torch.distributed.checkpoint.load``.

    Each rank reads the slices that its plan needs, directly into its tensors where possible, and verifies the checksums
    of all blocks that it reads. A checkpoint of torch's own is read as torch reads it, whole chunks without checksums,
    but for pickles, which are read with the allow-list.

    Args:
        path: the folder, or the URL of a place in an object store; the ``checkpoint_id`` of a load overrides it
        threads: threads with which a rank reads, or for a store, requests at a time for each object; ``None`` chooses
            by the number of cores
        safe_globals: classes and functions that pickled objects may name besides the default list
        trust_pickle: let pickled objects name anything; anyone who can write to the folder can then run code here
        progress: called with the number of bytes that this rank has read and the number of all bytes that its plan
            needs, a few times a second during a load and once at its end; an exception from it ends the load
        store_options: as for ``FileWriter``
        timeout: how long all requests of a load from a store may take together; 10 minutes by default

    Attributes:
        report: what the last load read, without the index: ``bytes`` of files, and of these ``wanted``, the bytes that
            the plan asked for

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
        progress: Progress | None = None,
        store_options: Mapping[str, Any] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._safe_globals = tuple(_validate.items("safe_globals", safe_globals))
        super().__init__(Allowed(self._safe_globals, trust_pickle), ("bytes", "wanted"), progress)
        self._store_options, self._timeout = store_options, timeout
        self._path = self._place(path)
        self._threads = thread_count(threads)
        #: What was read from the index, for ranks that are to read the same checkpoint: ``read_metadata(known=)``.
        self.known: Any = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load, from the folder ``checkpoint_id`` if it is given."""
        self._loading.check()
        self._load.checkpoint = path = self._next(checkpoint_id)
        self._load.metadata, self._path = None, path

    @noted
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the index.

        Raises:
            IncompleteCheckpoint: there is no index, for example because the save was interrupted
            CorruptCheckpoint: the index does not match its checksums
            ProtocolError: the file is not an index of this version
            UnsafePickle: torch's index names something that is not on the allow-list
            InvalidArgument: torch's own writer has saved into the same folder since
        """
        del args
        rank, known = kwargs.get("rank"), kwargs.get("known")
        folder: AnyPlace = self._load.checkpoint or begun(self._path)
        path = folder / INDEX
        shared = is_file(path)
        if not shared:
            if (theirs := _index_of_torch(folder, rank)) is not None:
                return self._open_theirs(theirs, shared=rank is None)
            if rank is None:
                raise _incomplete(folder)
            path = folder / RANK_INDEX.format(rank)
            if not is_file(path):
                raise _incomplete(folder)
        _refuse_two(path)
        source = FolderSource(path, self._threads, known)
        metadata = self._open(source, str(path))
        self.known = source.known
        self._load.digest = source.digest if shared else None
        return index.described(metadata, folder if isinstance(folder, os.PathLike) else str(folder))

    def _open_theirs(self, path: AnyPlace, shared: bool) -> Metadata:
        """Reads the index ``path``, which torch's own writer wrote; ``shared`` says whether it is that of all ranks."""
        source = TorchFolderSource(path)
        allowed = with_stand_ins(self._safe_globals, self._allowed.trusts)
        metadata = torch_folder.decode(self._begin(source), str(path), allowed)
        self._load.digest = source.digest if shared else None
        folder = path.parent
        return index.described(metadata, folder if isinstance(folder, os.PathLike) else str(folder))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds the digest of this rank's index to the plan, for the coordinator."""
        return plan if self._load.digest is None else dataclasses.replace(plan, storage_data=self._load.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that all ranks have read the same index.

        Raises:
            SourceChanged: a save replaced the index after some ranks had read it
        """
        if len({plan.storage_data for plan in plans if isinstance(plan.storage_data, str)}) > 1:
            raise replaced(self._load.checkpoint or self._path)
        return plans


def _index_of_torch(folder: AnyPlace, rank: int | None) -> AnyPlace | None:
    """Returns the index that torch's own writer wrote, if it is what the folder holds; ``rank`` asks for a rank's."""
    path = folder / (TORCH_INDEX if rank is None else f"__{rank}{TORCH_INDEX}")
    if not is_file(path) or marker.is_marker(path) or any(folder.glob("index-rank*.safetensors")):
        return None
    return path


def _refuse_two(path: AnyPlace) -> None:
    """Refuses the index at ``path`` if torch's own writer has saved into the same folder since."""
    theirs = path.parent / TORCH_INDEX
    if marker.is_marker(theirs):
        return
    try:
        newer = theirs.stat().st_mtime_ns >= path.stat().st_mtime_ns
    except (OSError, IncompleteCheckpoint):
        return
    if newer:
        raise InvalidArgument(
            f"{path.parent} holds two checkpoints, and torch's {TORCH_INDEX} is newer than {path.name}: "
            f"load it with FileSystemReader, or remove {TORCH_INDEX} if it is not the one to load"
        )


def _incomplete(folder: AnyPlace) -> IncompleteCheckpoint:
    """Returns the error for a folder without an index, which says why there is none."""
    if not folder.is_dir():
        return IncompleteCheckpoint(f"there is no checkpoint: {folder} is not a folder")
    if marker.is_marker(folder / TORCH_INDEX):
        return IncompleteCheckpoint(
            f"{folder} holds an incomplete checkpoint: {INDEX} was removed. Load another checkpoint, or restore it"
        )
    try:
        listed(folder)
    except (OSError, TensorferryError) as e:
        why = e.__cause__ if isinstance(e.__cause__, OSError) else e
        return IncompleteCheckpoint(
            f"there is no checkpoint in {folder}: it has no {INDEX}, and cannot be listed ({why})"
        )
    if (left := unfinished(folder)) is not None:
        return left
    return IncompleteCheckpoint(f"there is no checkpoint in {folder}: it has no {INDEX}")
