"""Reads checkpoints in a folder: this package's, and those of torch's own writer."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from .. import _validate
from ..errors import IncompleteCheckpoint, InvalidArgument, SystemRefused, TensorferryError
from ..net.network import Network, network_of
from ..net.serve import start
from ..pickles.allowlist import Allowed
from ..storage import foreign
from ..storage.divided import DividedSource, Partners
from ..storage.folder import INDEX, unfinished
from ..storage.names import parts_of_name
from ..storage.objects.place import ObjectPlace
from ..storage.places import AnyPlace, begun
from ..storage.source import FolderSource, Progress, replaced
from ..storage.whole_files import is_file, listed
from . import index, marker, torch_folder
from .common_slices import PlanNote, slice_digests, with_partners
from .failures import noted
from .in_folder import TORCH_INDEX, InFolder, checked_threads
from .reader import SliceReader
from .torch_folder import TorchFolderSource, with_stand_ins

logger = logging.getLogger("tensorferry")

#: How long a request to a rank waits until that begins to read.
_RANK_PATIENCE_S = 60.0


class FileReader(InFolder, SliceReader):
    """Reads a checkpoint that ``FileWriter`` or torch's own writer wrote, for ``torch.distributed.checkpoint.load``.

    Each rank reads the slices that its plan needs, directly into its tensors where possible, and verifies the checksums
    of all blocks that it reads. A checkpoint of torch's own is read as torch reads it, whole chunks without checksums,
    but for pickles, which are read with the allow-list; one thread reads it, and calls ``progress`` after each file.

    One load at a time: a load that another one has replaced is refused.

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
        network: where ranks that need the same slices of an object in a store, as replicas do, give each other what
            each of them has read; with ``relay=False`` this one reads for itself. docs/guides/object-stores.md says
            more

    Attributes:
        report: what the last load read, of several at once the one that began last, without the index: ``bytes`` of
            files or objects, ``relayed``, those that other ranks have given instead, and ``wanted``, the bytes that the
            plan asked for

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
        SystemRefused: ``path`` is relative, and the current folder is gone
    """

    _absent = (IncompleteCheckpoint,)

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
        network: Network | None = None,
    ) -> None:
        self._safe_globals = tuple(_validate.items("safe_globals", safe_globals))
        super().__init__(Allowed(self._safe_globals, trust_pickle), ("bytes", "relayed", "wanted"), progress)
        self._store_options, self._timeout = store_options, timeout
        self._network = network and network_of(network)
        self._path = self._place(path)
        self._threads = checked_threads(threads)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load, from the folder ``checkpoint_id`` if it is given; later loads read from there, too.

        Raises:
            InvalidArgument: ``checkpoint_id`` cannot be used, or this thread is in the middle of a read
            SystemRefused: ``checkpoint_id`` is relative, and the current folder is gone
        """
        self._loading.check()
        self._path = self._next(checkpoint_id)

    @noted
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the index: that of all ranks, or where there is none, that of torch's own for ``rank`` if it is given.

        Raises:
            IncompleteCheckpoint: there is no index, for example because the save was interrupted
            CorruptCheckpoint: the index does not match its checksums
            ProtocolError: the file is not an index of this version
            UnsafePickle: torch's index, or a planner's data in ours, names something that is not on the allow-list
            InvalidArgument: torch's own writer has saved into the same folder since, its extensions have transformed
                the files, or this thread is in the middle of a read
            SystemRefused: the index cannot be read
            TensorferryError: the store does not answer in time, or refuses
        """
        del args
        rank = kwargs.get("rank")
        load = self._load
        if rank is None or load.folder is None:
            load.folder = begun(self._path)
        folder = load.folder
        path = folder / INDEX
        if not is_file(path):
            if (theirs := _index_of_torch(folder, rank)) is not None:
                return self._open_theirs(theirs, shared=rank is None)
            raise _incomplete(folder)
        _refuse_two(path)
        source = FolderSource(path, self._threads)
        text = load.begin(source)
        files = source.containers()
        metadata = index.decode(text, str(path), self._allowed, files)
        load.digest, load.shared = source.digest, True
        where = folder if isinstance(folder, os.PathLike) else str(folder)
        named = parts_of_name(files[0]) if files else None
        return index.described(metadata, where, named and named["id"])

    def _open_theirs(self, path: AnyPlace, shared: bool) -> Metadata:
        """Reads the index ``path``, which torch's own writer wrote; ``shared`` says whether it is that of all ranks."""
        source = TorchFolderSource(path)
        allowed = with_stand_ins(self._safe_globals, self._allowed.trusts)
        metadata = torch_folder.decode(self._load.begin(source), str(path), allowed)
        self._load.digest, self._load.shared = source.digest, shared
        folder = path.parent
        return index.described(metadata, folder if isinstance(folder, os.PathLike) else str(folder))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds the digest of this rank's index to the plan, for the coordinator, and with a store what it needs.

        For the latter it starts a server, which ends with :meth:`read_data`, or when the time for the load is over.
        """
        load = self._load
        load.close_server()
        note = PlanNote(load.digest)
        try:
            if needs := self._needs(plan):
                assert isinstance(load.folder, ObjectPlace)
                server, host = start(_RANK_PATIENCE_S, self._network_of_ranks(), passing=True)
                load.keep_server(server, load.folder.seconds_left())
                note = PlanNote(load.digest, needs, server.url(host))
        except (SystemRefused, InvalidArgument) as e:
            # Of variables that are wrong, too: nobody else is needed for this load.
            logger.warning("this rank reads for itself what others need as well: %s", e)
        return dataclasses.replace(plan, storage_data=note)

    def _needs(self, plan: LoadPlan) -> Mapping[str, bytes]:
        """Returns what this rank may divide with others: nothing where there are none, or where it would not help."""
        load = self._load
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        in_store = isinstance(load.source, FolderSource) and isinstance(load.folder, ObjectPlace)
        if not (several and in_store and load.shared and load.metadata is not None and self._network_of_ranks().relay):
            return {}
        return slice_digests(plan, load.metadata.storage_data)

    def _network_of_ranks(self) -> Network:
        """Returns what is used for what ranks give each other; the environment is not read before it is needed."""
        self._network = self._network or Network()
        return self._network

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that all ranks have read the same index, and tells those that need the same slices of each other.

        Raises:
            SourceChanged: a save replaced the index after some ranks had read it
        """
        digests = {plan.storage_data.digest for plan in plans if isinstance(plan.storage_data, PlanNote)}
        if self._load.shared and len(digests) > 1:
            raise replaced(self._load.folder or self._path)
        return with_partners(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items of ``plan`` into their targets; of what others need as well, a part.

        Raises:
            Exception: as for :meth:`SliceReader.read_data`
        """
        note = plan.storage_data
        with self._dividing(note.partners if isinstance(note, PlanNote) else {}):
            return super().read_data(plan, planner)

    @contextlib.contextmanager
    def _dividing(self, partners: Mapping[str, Partners]) -> Iterator[None]:
        """Within the block, this rank reads a part of what its partners need as well; then its server is gone."""
        load = self._load
        source, server, place = load.source, load.server, load.folder
        try:
            if partners and server is not None and source is not None and isinstance(place, ObjectPlace):
                network = self._network_of_ranks()
                load.source = DividedSource(source, partners, server, network, place.seconds_left)
            yield
        finally:
            load.source = source
            load.close_server()


def _index_of_torch(folder: AnyPlace, rank: int | None) -> AnyPlace | None:
    """Returns the index that torch's own writer wrote, if it is what the folder holds; ``rank`` asks for a rank's."""
    path = folder / (TORCH_INDEX if rank is None else f"__{rank}{TORCH_INDEX}")
    return path if is_file(path) and not marker.is_marker(path) else None


def _refuse_two(path: AnyPlace) -> None:
    """Refuses the index at ``path`` if torch's own writer has saved into the same folder since."""
    theirs = path.parent / TORCH_INDEX
    if marker.is_marker(theirs):
        return
    try:
        newer = theirs.stat().st_mtime_ns >= path.stat().st_mtime_ns
    except (FileNotFoundError, IncompleteCheckpoint):
        return
    except OSError as e:
        if isinstance(e, TensorferryError):
            raise
        raise SystemRefused(e.errno, f"{path.parent} cannot be read: {e.strerror}") from e
    if newer:
        raise InvalidArgument(
            f"{path.parent} holds two checkpoints, and torch's {TORCH_INDEX} is newer than {path.name}: "
            f"load it with FileSystemReader, or remove {TORCH_INDEX} if it is not the one to load"
        )


def _incomplete(folder: AnyPlace) -> IncompleteCheckpoint:
    """Returns the error for a folder without an index, which says why there is none.

    Raises:
        ProtocolError: it holds files of torch's that are no checkpoint here
    """
    if not folder.is_dir():
        return IncompleteCheckpoint(f"there is no checkpoint: {folder} is not a folder")
    if marker.is_marker(folder / TORCH_INDEX):
        return IncompleteCheckpoint(
            f"{folder} holds an incomplete checkpoint: {INDEX} was removed. Load another checkpoint, or restore it"
        )
    try:
        listed(folder, INDEX)
    except (OSError, TensorferryError) as e:
        why = e.__cause__ if isinstance(e.__cause__, OSError) else e
        return IncompleteCheckpoint(
            f"there is no checkpoint in {folder}: it has no {INDEX}, and cannot be listed ({why})"
        )
    if (left := unfinished(folder)) is not None:
        return left
    foreign.refuse_folder_of_parts(folder)
    return IncompleteCheckpoint(f"there is no checkpoint in {folder}: it has no {INDEX}")
