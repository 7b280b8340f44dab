"""Checkpoints in a folder: one container file for each rank, and an index file, which is written last.

A folder holds a checkpoint exactly if it has a complete index; ``storage/commits.py`` says which files may be removed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .. import _gc, _validate
from .._native import Written
from .._reentry import CallMark
from ..errors import IncompleteCheckpoint, InvalidArgument, SystemRefused
from ..memory.accelerator import ACCELERATOR
from ..memory.staging import Stager
from ..pickles.allowlist import Allowed
from ..storage import commits, leftovers, reserved
from ..storage.commits import Commit
from ..storage.container import Container
from ..storage.folder import INDEX, make_folder
from ..storage.names import new_id
from ..storage.places import place_of
from ..storage.source import FolderSource, Progress, replaced
from . import index, marker, torch_folder
from .failures import noted, tell_of_numpy
from .reader import SliceReader
from .save_plan import ABOUT, PlanSnapshot
from .torch_folder import TorchFolderSource, with_stand_ins

_RANK_INDEX = "index-rank{:05d}.safetensors"
#: The names of the files of torch's own writer: the index of all ranks, and with a rank's number its index and data.
_TORCH_INDEX = marker.NAME
_TORCH_FILES = re.compile(r"\.metadata|__(?P<rank>\d+)(\.metadata|_\d+\.distcp)")


#: What to do about arguments of torch's writer that ask for something else.
_OTHERWISE = {
    "single_file_per_rank": "a rank always writes one file: leave it out",
    "cache_staged_state_dict": "tensorferry.checkpointing.AsyncCheckpointer keeps its buffers: leave it out",
    "_extensions": "files are not compressed or encrypted: use torch's FileSystemWriter",
    "serialization_format": "the format is safetensors: use torch's FileSystemWriter",
}


def _threads_of_torch(threads: int | None, theirs: dict[str, Any]) -> int | None:
    """Returns the number of threads that the arguments of a writer ask for, of which ``theirs`` are torch's.

    Raises:
        InvalidArgument: one of torch's cannot be followed
        TypeError: one is not torch's either
    """
    changes_nothing = {"single_file_per_rank": True, "cache_staged_state_dict": False, "_extensions": None}
    for name, value in theirs.items():
        if name in ("thread_count", "sync_files", "per_thread_copy_ahead"):
            continue
        if name not in _OTHERWISE:
            raise TypeError(f"FileWriter has no argument {name!r}")
        if name not in changes_nothing or value != changes_nothing[name]:
            raise InvalidArgument(f"{name}={_validate.brief(value)} is not for FileWriter: {_OTHERWISE[name]}")
    if "thread_count" not in theirs:
        return threads
    if threads is not None:
        raise InvalidArgument("threads and thread_count are the same: give one of them")
    return _validate.integer("thread_count", theirs["thread_count"], 1)


def _threads(threads: int | None) -> int | None:
    return None if threads is None else _validate.integer("threads", threads, 1)


class _InFolder:
    """The ``checkpoint_id`` of a writer or reader: the path of a folder."""

    _path: Path

    @property
    def checkpoint_id(self) -> Path:
        """The checkpoint's folder."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` can be a local folder: a URL cannot."""
        return isinstance(checkpoint_id, os.PathLike) or "://" not in str(checkpoint_id)


@dataclasses.dataclass(frozen=True)
class RankFile:
    """Where and how one rank writes its file of a save. It can be sent to another process.

    Attributes:
        path: the file
        threads: as for :class:`FileWriter`
        cached: as for :class:`FileWriter`
    """

    path: Path
    threads: int | None
    cached: bool | None

    def write(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        *,
        progress: Progress | None = None,
        allowed: Allowed | None = None,
    ) -> tuple[Written, list[WriteResult]]:
        """Writes the items of ``plan``; returns how much was written, and a result for each item.

        While the first of the two lives, the file is locked. ``progress`` is as for :class:`FileWriter`, ``allowed`` is
        the allow-list of loads, if they are to be warned for.

        Raises:
            UnsupportedLeaf: an item cannot be written; the message names it
            SystemRefused: the system refuses, for example because the disk is full
        """
        with _gc.gc_paused():
            packed = PlanSnapshot(plan, planner, Stager(ACCELERATOR), copy=False)
        if allowed is not None:
            packed.warn_of_refusals(allowed)
        # A random entry in the header, so that the checksum of the header, which the index records, is unique.
        about = [*ABOUT, ("tensorferry.file", secrets.token_hex(16))]
        written = Container(packed.rows, packed.owner, packed.private, about=about).write(
            self.path,
            partial=self.path.with_name(f"{self.path.name}.partial"),
            threads=self.threads,
            cached=self.cached,
            progress=progress,
        )
        return written, packed.results(self.path.name, written.header)


class FileWriter(_InFolder, StorageWriter):  # type: ignore[misc]  # mypy does not follow torch
    """Writes a checkpoint into a folder, for ``torch.distributed.checkpoint.save`` and ``async_save``.

    Each rank writes one safetensors file, with a checksum of every 512 bytes, and the coordinator writes
    ``index.safetensors`` last. After it comes a ``.metadata``, a file for which tools look; it has a sentence for
    torch's reader. A folder may be saved into repeatedly: the old checkpoint stays whole until the index of the new one
    replaces the old index, in one step, and is removed afterwards.

    Args:
        path: the folder; the ``checkpoint_id`` of a save overrides it
        threads: threads with which a rank writes; ``None`` chooses by the number of cores
        overwrite: ``False`` refuses a folder that has a checkpoint
        cached: whether files of 64 MiB or more are written through the page cache, so that a load soon after on this
            machine reads from memory (``True``), or bypass it where the file system supports that, which takes less
            processor time (``False``). ``None`` chooses the first while the file takes at most an eighth of the
            available memory, unless memory turns out to be slower than a disk. Smaller files never bypass the cache
        progress: called with the number of bytes that this rank has written and the number of all bytes of its file, a
            few times a second during a save and once at its end, in the thread of the save; an exception from it ends
            the save
        safe_globals, trust_pickle: what loads will be given; a save warns, once for each, of classes and functions that
            its objects need and a load would refuse
        theirs: arguments of torch's ``FileSystemWriter``, so that its calls can be kept: ``thread_count`` is
            ``threads``; ``single_file_per_rank=True``, ``sync_files``, ``per_thread_copy_ahead`` and
            ``cache_staged_state_dict=False`` change nothing, since there is one file for each rank, it is always synced
            and nothing is copied ahead. Others are refused

    Attributes:
        report: what the last save wrote on this rank, without the index: ``bytes``, and of these ``direct``, the bytes
            that bypassed the page cache

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        overwrite: bool = True,
        cached: bool | None = None,
        progress: Progress | None = None,
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
        **theirs: Any,
    ) -> None:
        super().__init__()
        self._path = place_of(path)
        self._threads = _threads(_threads_of_torch(threads, theirs))
        self._overwrite = _validate.boolean("overwrite", overwrite)
        self._cached = None if cached is None else _validate.boolean("cached", cached)
        self._progress = _validate.function("progress", progress)
        self._allowed = Allowed(safe_globals, trust_pickle)
        self.report: dict[str, int] = {"bytes": 0, "direct": 0}
        self._running = _Running()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what another process needs to save with a copy of this writer; running saves are left out."""
        return {name: value for name, value in self.__dict__.items() if name != "_running"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, which has no running save."""
        self.__dict__.update(state)
        self._running = _Running()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new save, into the folder ``checkpoint_id`` if it is given."""
        self._running.calls.check()
        tell_of_numpy()
        self._running.path = path = place_of(checkpoint_id) if checkpoint_id else self._path
        self._running.id = new_id()
        self._path = path

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Creates the record of this save, from the rank and role that torch passes."""
        del args
        self._running.calls.check()
        coordinated = kwargs.get("use_collectives", True)
        self._running.save = _Save(
            self._running.path or self._path, kwargs.get("rank") or 0, coordinated, is_coordinator or not coordinated
        )
        self._running.save.id = self._running.id or self._running.save.id
        self._running.path = self._running.id = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the folder.

        Raises:
            SystemRefused: the folder cannot be created or listed
            InvalidArgument: the folder has a checkpoint and ``overwrite`` is ``False``, or it has one with an index for
                all ranks while this save has no coordinator
        """
        save = self._running.save
        try:
            make_folder(save.path)
            names = set(os.listdir(save.path))
        except OSError as e:
            raise SystemRefused(f"the folder {save.path} cannot be created or listed: {e}") from e
        if marker.is_marker(save.path / _TORCH_INDEX):
            names.discard(_TORCH_INDEX)
        if not save.coordinated and names & {INDEX, _TORCH_INDEX}:
            raise InvalidArgument(
                f"{save.path} holds a checkpoint with an index of all ranks, which would be loaded instead of this "
                "one: save into another folder"
            )
        if not self._overwrite and (there := sorted(filter(save.is_index, names))):
            raise InvalidArgument(
                f"Checkpoint already exists and self.overwrite=False: {save.path} holds a checkpoint ({there[0]})"
            )
        if save.writes_index:
            save.begin(names)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns ``plans`` unchanged: each rank chooses the name of its file itself."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file.

        Raises:
            InvalidArgument: the coordinator saves with another class, or another save with this writer was made in the
                middle of this one
            UnsupportedLeaf: an item cannot be written; the message names it
            SystemRefused: the system refuses, for example because the disk is full
        """
        # A planner that caches plans may give one out that was planned for another writer, in an earlier save.
        if plan.storage_data is not None and not getattr(planner, "_enable_plan_caching", False):
            # The coordinator would write an index of its own kind, in which nothing finds what this rank has written.
            raise InvalidArgument(
                f"the coordinator has planned this save for another writer ({_validate.brief(plan.storage_data)}): "
                "give every rank a FileWriter, or call tensorferry.install() in every process"
            )
        save = self._running.ongoing()
        done: Future[list[WriteResult]] = Future()
        self.report = {"bytes": 0, "direct": 0}
        if not plan.items:
            if self._progress is not None:
                self._progress(0, 0)
            done.set_result([])
            return done
        with self._running.calls.held():
            written = self.rank_file().write(plan, planner, progress=self._progress, allowed=self._allowed)
        save.written, results = written
        self.report = {"bytes": save.written.bytes, "direct": save.written.direct}
        done.set_result(results)
        return done

    def rank_file(self) -> RankFile:
        """Returns where and how this rank writes its file of the save that has begun in this thread.

        With it another process can write the file in place of ``write_data``, without progress or
        warnings; the results come back to ``finish``.
        """
        save = self._running.save
        return RankFile(save.path / f"rank{save.rank:05d}-{save.id}.safetensors", self._threads, self._cached)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index, which commits the checkpoint, and removes the files of the checkpoint that it replaces.

        Raises:
            IncompleteCheckpoint: a save that began later has finished before this one, or a file of this save was
                removed meanwhile
            SystemRefused: the index cannot be written, or the marker beside it
        """
        save = self._running.ongoing()
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_data = stored
        index.stamp(metadata).storage_meta = StorageMeta(checkpoint_id=save.path, save_id=save.id)
        files = {ref.container: ref.header for ref in stored.values()}
        commits.commit_index(
            save.index,
            [(reserved.INDEX, index.encode(metadata, stored))],
            Commit(files, save.began),
            about=ABOUT,
            rank=None if save.coordinated else save.rank,
            then=save.replace_others,
        )
        save.is_over = True

    def storage_meta(self) -> StorageMeta:
        """Returns the folder of the checkpoint, as torch's ``StorageMeta``."""
        return StorageMeta(checkpoint_id=self._running.path or self._path, save_id=self._running.id)


class _Running(threading.local):
    """The save of the calling thread: one writer may run several saves at once, each in its own thread.

    Attributes:
        path: the folder of the next save, once ``reset`` was called for it
        id: its id, likewise
        save: the save that has begun
        calls: marks that the save's file is being written
    """

    def __init__(self) -> None:
        self.calls = CallMark("a save with this writer")
        self.path: Path | None = None
        self.id: str | None = None
        self.save = _Save(Path(), 0, True, False)

    def ongoing(self) -> _Save:
        """Returns the save that has begun.

        Raises:
            InvalidArgument: it has ended already: another save with this writer has begun and ended in the middle of
                this one
        """
        if self.save.is_over:
            raise InvalidArgument(
                "another save with this writer has begun and ended in the middle of this one, in the same thread, by a "
                "signal handler for example: give each save a writer of its own"
            )
        return self.save


class _Save:
    """What this rank records about one save, from its beginning to its end.

    Args:
        path: the folder
        rank: the rank of this process
        coordinated: whether one index names the files of all ranks
        writes_index: whether this rank writes an index

    Attributes:
        id: the unique id in the names of its files
        began: when it began, in nanoseconds since the epoch
        written: this rank's file; while this object lives, the file is locked
        is_over: whether its index is written
    """

    def __init__(self, path: Path, rank: int, coordinated: bool, writes_index: bool) -> None:
        self.path, self.rank, self.coordinated, self.writes_index = path, rank, coordinated, writes_index
        self.index = path / (INDEX if coordinated else _RANK_INDEX.format(rank))
        self.id = new_id()
        self.began = 0
        self.written: Written | None = None
        self.is_over = False
        self._of_torch: list[str] = []

    def begin(self, names: set[str]) -> None:
        """Records which files of the folder the new index will replace; ``names`` are all its files but the marker."""
        self.began = commits.begin_after(commits.began(self.index))
        if self.coordinated and not (self.path / INDEX).is_file() and marker.is_marker(self.path / _TORCH_INDEX):
            # Somebody has removed the index; if this save were killed, tools would take the folder for a checkpoint.
            leftovers.remove(self.path, [_TORCH_INDEX])
        self._of_torch = sorted(filter(self._is_replaced, names))

    def is_index(self, name: str) -> bool:
        """Whether a file of this name is the index of a checkpoint that this save would replace."""
        if name == self.index.name or (self._is_replaced(name) and name.endswith(".metadata")):
            return True
        return self.coordinated and name.startswith("index-rank") and name.endswith(".safetensors")

    def _is_replaced(self, name: str) -> bool:
        found = _TORCH_FILES.fullmatch(name)
        return found is not None and (self.coordinated or found["rank"] == str(self.rank))

    def replace_others(self) -> None:
        """Leaves the file by which tools find the checkpoint, and removes other checkpoints that the new one replaces.

        Those are torch's, whose index the file replaces, and those of ranks that were not coordinated.

        Raises:
            SystemRefused: the file cannot be written
        """
        # Tools do not look for checkpoints without an index of all ranks.
        theirs = self.path / _TORCH_INDEX
        if self.coordinated and (_TORCH_INDEX in self._of_torch or not theirs.exists()):
            marker.leave(self.index, self.id)
            self._of_torch = [name for name in self._of_torch if name != _TORCH_INDEX]
        # The other indexes go first: without its index a checkpoint cannot be loaded by mistake.
        leftovers.remove(self.path, sorted(self._of_torch))
        if self.coordinated:
            for rank_index in sorted(self.path.glob("index-rank*.safetensors")):
                of_rank = commits.committed(rank_index)
                leftovers.remove(self.path, [rank_index.name, *(of_rank.files if of_rank else ())])


class FileReader(_InFolder, SliceReader):
    """Reads a checkpoint that ``FileWriter`` or torch's own writer wrote, for ``torch.distributed.checkpoint.load``.

    Each rank reads the slices that its plan needs, directly into its tensors where possible, and verifies the checksums
    of all blocks that it reads. A checkpoint of torch's own is read as torch reads it, whole chunks without checksums,
    but for pickles, which are read with the allow-list.

    Args:
        path: the folder; the ``checkpoint_id`` of a load overrides it
        threads: threads with which a rank reads; ``None`` chooses by the number of cores
        safe_globals: classes and functions that pickled objects may name besides the default list
        trust_pickle: let pickled objects name anything; anyone who can write to the folder can then run code here
        progress: called with the number of bytes that this rank has read and the number of all bytes that its plan
            needs, a few times a second during a load and once at its end; an exception from it ends the load

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
    ) -> None:
        self._safe_globals = tuple(_validate.items("safe_globals", safe_globals))
        super().__init__(Allowed(self._safe_globals, trust_pickle), ("bytes", "wanted"), progress)
        self._path = place_of(path)
        self._threads = _threads(threads)
        #: What was read from the index, for ranks that are to read the same checkpoint: ``read_metadata(known=)``.
        self.known: Any = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load, from the folder ``checkpoint_id`` if it is given."""
        self._loading.check()
        tell_of_numpy()
        self._load.checkpoint = path = place_of(checkpoint_id) if checkpoint_id else self._path
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
        folder: Path = self._load.checkpoint or self._path
        path = folder / INDEX
        shared = _is_file(path)
        if not shared:
            if (theirs := _index_of_torch(folder, rank)) is not None:
                return self._open_theirs(theirs, shared=rank is None)
            if rank is None:
                raise _incomplete(folder)
            path = folder / _RANK_INDEX.format(rank)
            if not _is_file(path):
                raise _incomplete(folder)
        _refuse_two(path)
        source = FolderSource(path, self._threads, known)
        metadata = self._open(source, str(path))
        self.known = source.known
        self._load.digest = source.digest if shared else None
        return index.described(metadata, folder)

    def _open_theirs(self, path: Path, shared: bool) -> Metadata:
        """Reads the index ``path``, which torch's own writer wrote; ``shared`` says whether it is that of all ranks."""
        source = TorchFolderSource(path)
        allowed = with_stand_ins(self._safe_globals, self._allowed.trusts)
        metadata = torch_folder.decode(self._begin(source), str(path), allowed)
        self._load.digest = source.digest if shared else None
        return index.described(metadata, path.parent)

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


def _is_file(path: Path) -> bool:
    """Whether ``path`` is a file.

    Raises:
        SystemRefused: the system does not say, for example because a folder above it may not be entered
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        raise SystemRefused(e.errno, f"{path} cannot be examined: {e.strerror}") from e


def _index_of_torch(folder: Path, rank: int | None) -> Path | None:
    """Returns the index that torch's own writer wrote, if it is what the folder holds; ``rank`` asks for a rank's."""
    path = folder / (_TORCH_INDEX if rank is None else f"__{rank}{_TORCH_INDEX}")
    if not _is_file(path) or marker.is_marker(path) or any(folder.glob("index-rank*.safetensors")):
        return None
    return path


def _refuse_two(path: Path) -> None:
    """Refuses the index at ``path`` if torch's own writer has saved into the same folder since."""
    theirs = path.parent / _TORCH_INDEX
    if marker.is_marker(theirs):
        return
    try:
        newer = theirs.stat().st_mtime_ns >= path.stat().st_mtime_ns
    except OSError:
        return
    if newer:
        raise InvalidArgument(
            f"{path.parent} holds two checkpoints, and torch's {_TORCH_INDEX} is newer than {path.name}: "
            f"load it with FileSystemReader, or remove {_TORCH_INDEX} if it is not the one to load"
        )


def _incomplete(folder: Path) -> IncompleteCheckpoint:
    """Returns the error for a folder without an index, which says why there is none."""
    if not folder.is_dir():
        return IncompleteCheckpoint(f"there is no checkpoint: {folder} is not a folder")
    if marker.is_marker(folder / _TORCH_INDEX):
        return IncompleteCheckpoint(
            f"{folder} holds an incomplete checkpoint: {INDEX} was removed. Load another checkpoint, or restore it"
        )
    try:
        names = sorted(os.listdir(folder))
    except OSError as e:
        return IncompleteCheckpoint(
            f"there is no checkpoint in {folder}: it has no {INDEX}, and cannot be listed ({e})"
        )
    left = [name for name in names if commits.is_ours(name)]
    if left:
        return IncompleteCheckpoint(
            f"{folder} holds an incomplete checkpoint: the save that wrote {left[0]} ended before it wrote "
            f"{INDEX}. Load an earlier checkpoint"
        )
    return IncompleteCheckpoint(f"there is no checkpoint in {folder}: it has no {INDEX}")
