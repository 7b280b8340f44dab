"""Checkpoints in a folder or an object store: one container file for each rank, and an index, which is written last.

A folder holds a checkpoint exactly if it has a complete index; ``storage/commits.py`` says which files may be removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .. import _gc, _validate
from .._reentry import CallLock
from ..errors import InvalidArgument
from ..memory.accelerator import ACCELERATOR, Accelerator
from ..memory.bounce import BounceBuffers
from ..memory.late import LateRows
from ..pickles.allowlist import Allowed
from ..state.together import Together
from ..storage import commits, reserved
from ..storage.commits import Commit
from ..storage.container import Container, Stored
from ..storage.names import new_id
from ..storage.places import AnyPlace, begun
from ..storage.source import Progress
from ..storage.whole_files import create_folder, listed
from . import index, marker
from .failures import fail_without_numpy
from .in_folder import TORCH_INDEX, InFolder, checked_threads
from .index import RankPart
from .running_saves import SaveRecord, agreed, planned_for_others
from .save_plan import ABOUT, PlanSnapshot, check_left_to_others, objects_of, objects_with_parts
from .uncollected import OwnPart, merged


@functools.lru_cache(maxsize=1)
def _bounce_buffers(accelerator: Accelerator, process: int) -> BounceBuffers:
    """Returns the buffers through which all saves of this process read accelerators."""
    del process
    return BounceBuffers(accelerator)


@dataclasses.dataclass(frozen=True)
class RankFile:
    """Where and how one rank writes its file of a save. It can be sent to another process.

    Attributes:
        path: the file
        threads: as for :class:`FileWriter`
        cached: as for :class:`FileWriter`
    """

    path: AnyPlace
    threads: int | None
    cached: bool | None

    def write(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        *,
        progress: Progress | None = None,
        allowed: Allowed | None = None,
    ) -> tuple[Stored, RankPart]:
        """Writes the items of ``plan``; returns how much was written, and what the coordinator is told.

        While the first of the two lives, the file is locked. ``progress`` is as for :class:`FileWriter`, ``allowed`` is
        the allow-list of loads, if they are to be warned for.

        Raises:
            UnsupportedLeaf: an item cannot be written; the message names it
            InvalidArgument: a graph is being captured on a device that holds an item
            SystemRefused: the system refuses, for example because the disk is full
            TensorferryError: the store does not answer in time, or refuses
            Exception: what ``progress`` raises, or the device when a copy fails
        """
        with _gc.gc_paused():
            snapshot = PlanSnapshot(plan, planner, ACCELERATOR)
        if allowed is not None:
            snapshot.warn_of_refusals(allowed)
        # A random entry in the header, so that the checksum of the header, which the index records, is unique.
        about = [*ABOUT, ("tensorferry.file", secrets.token_hex(16))]
        late = LateRows(_bounce_buffers(ACCELERATOR, os.getpid()), snapshot.late) if snapshot.late else None
        written = Container(snapshot.rows, snapshot.owner, snapshot.private, about=about, late=late).write(
            self.path,
            partial=self.path.with_name(f"{self.path.name}.partial"),
            threads=self.threads,
            cached=self.cached,
            progress=progress,
        )
        return written, snapshot.part(self.path.name, written.header)


class FileWriter(InFolder, StorageWriter):  # type: ignore[misc]  # mypy does not follow torch
    """Writes a checkpoint into a folder, for ``torch.distributed.checkpoint.save`` and ``async_save``.

    Each rank writes one safetensors file, with a checksum of every 512 bytes, and the coordinator writes
    ``index.safetensors`` last. After it comes a ``.metadata``, a file for which tools look; it has a sentence for
    torch's reader. A folder may be saved into repeatedly: the old checkpoint stays whole until the index of the new one
    replaces the old index, in one step, and is removed afterwards.

    One save at a time: a save that another one has replaced, in another thread or by a signal handler, is refused.

    Args:
        path: the folder, or the URL of a place in an object store, such as ``s3://bucket/run/step-1000``; the
            ``checkpoint_id`` of a save overrides it
        threads: threads with which a rank writes, or for a store, how many parts are uploaded at a
            time; ``None`` chooses by the number of cores
        thread_count: torch's name of ``threads``
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
        store_options: options of obstore for the store, by its own names, such as ``endpoint`` or ``region``; what is
            not given comes from the environment. ``client_options``, ``retry_config`` and ``credential_provider`` are
            those of its stores
        timeout: how long all requests of a save to a store may take together; 10 minutes by default
        process_group: that of ``dcp.save``, for a save with ``use_collectives=False``: its ranks tell each other over
            the store of ``torch.distributed``, whatever its backend, and wait as long as its time-out

    Attributes:
        report: what the last save wrote on this rank, without the index: ``bytes``, and of these ``direct``, the bytes
            that bypassed the page cache

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
        SystemRefused: ``path`` is relative, and the current folder is gone
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
        store_options: Mapping[str, Any] | None = None,
        timeout: timedelta | None = None,
        thread_count: int | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        self._store_options, self._timeout, self._process_group = store_options, timeout, process_group
        self._path = self._place(path)
        if threads is not None and thread_count is not None:
            raise InvalidArgument("threads and thread_count are the same: give one of them")
        self._threads = checked_threads(threads if thread_count is None else thread_count)
        self._overwrite = _validate.boolean("overwrite", overwrite)
        self._cached = None if cached is None else _validate.boolean("cached", cached)
        self._progress = _validate.function("progress", progress)
        self._allowed = Allowed(safe_globals, trust_pickle)
        self.report: dict[str, int] = {"bytes": 0, "direct": 0}
        self._start()

    def _start(self) -> None:
        self._saving = CallLock("a save with this writer")
        #: Folder and id of the next save, once ``reset`` was called for it; the save that has begun.
        self._next_save: tuple[AnyPlace, str] | None = None
        self._save: SaveRecord | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what another process needs to save with a copy of this writer; running saves are left out."""
        left_out = ("_saving", "_next_save", "_save", "_process_group")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, which has no running save."""
        self.__dict__.update(state)
        self._process_group = None
        self._start()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new save, into the folder ``checkpoint_id`` if it is given; later saves go there, too.

        Raises:
            InvalidArgument: ``checkpoint_id`` cannot be used, or this thread is writing the file of a save
            SystemRefused: ``checkpoint_id`` is relative, and the current folder is gone
        """
        self._saving.check()
        self._path = self._next(checkpoint_id)
        self._next_save = self._path, new_id()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Creates the record of this save, from the rank and role that torch passes.

        Raises:
            InvalidArgument: this thread is writing the file of another save with this writer, or the ranks of a save
                without collectives are not known
        """
        del args
        self._saving.check()
        rank, ranks = kwargs.get("rank") or 0, None
        if kwargs.get("use_collectives", True):
            fail_without_numpy()
        else:
            group = Together(self._process_group)
            if rank != group.rank:
                raise InvalidArgument(
                    f"use_collectives=False, and dcp.save says that this is rank {rank}, FileWriter that it is rank "
                    f"{group.rank}: give dcp.save's process_group to FileWriter(process_group=) as well; for a save of "
                    "this rank alone, no_dist=True is enough"
                )
            ranks = group if group.world > 1 else None
        path, save_id = self._next_save or (begun(self._path), new_id())
        self._next_save = None
        self._save = SaveRecord(path, save_id, rank, is_coordinator, ranks)

    def _ongoing(self, plan: SavePlan | None = None) -> SaveRecord:
        """Returns the save that has begun, and that the caller goes on with: see :meth:`SaveRecord.check`.

        Raises:
            InvalidArgument: there is none, or it is another one
        """
        if self._save is None:
            raise InvalidArgument("no save with this writer has begun: call set_up_storage_writer first")
        self._save.check(plan)
        return self._save

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the folder, and records what the save will replace in it.

        A marker whose index is gone is removed: see :meth:`SaveRecord.begin`.

        Returns:
            ``plan``, with a mark of this save.

        Raises:
            SystemRefused: the folder cannot be created, synchronised or listed
            TensorferryError: the store does not answer, or refuses
            InvalidArgument: the folder has a checkpoint and ``overwrite`` is ``False``; or no save has begun
        """
        save = self._ongoing()
        save.is_new_folder = create_folder(save.path)
        self._check_free(save, set() if self._overwrite else _names_in(save.path))
        if save.writes_index:
            save.begin()
        save.objects = objects_of(plan)
        return dataclasses.replace(plan, storage_data=save.mark)

    def _check_free(self, save: SaveRecord, names: Iterable[str]) -> None:
        """Refuses a folder with the files ``names``, if there is a checkpoint among them that is not to be replaced."""
        if not self._overwrite and (there := sorted(filter(save.is_index, names))):
            raise InvalidArgument(
                f"Checkpoint already exists and self.overwrite=False: {save.path} holds a checkpoint ({there[0]})"
            )

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns ``plans``, whose ranks choose the names of their files themselves, with a mark of this writer."""
        return [agreed(plan) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file; none if the plan has no items.

        If that fails, a folder that this save has made is removed, unless something is in it.

        Raises:
            InvalidArgument: the coordinator saves with another class, another save with this writer was made in the
                middle of this one, or a graph is being captured on a device that holds an item
            UnsupportedLeaf: an item cannot be written; the message names it
            SystemRefused: the system refuses, for example because the disk is full
            TensorferryError: the store does not answer in time, or refuses
            Exception: what ``progress`` raises, or the device when a copy fails
        """
        # A planner that caches plans may give one out that was planned for another writer, in an earlier save.
        caches = getattr(planner, "_enable_plan_caching", False)
        if planned_for_others(plan) and not caches:
            # The coordinator would write an index of its own kind, in which nothing finds what this rank has written.
            raise InvalidArgument(
                f"the coordinator has planned this save for another writer ({_validate.brief(plan.storage_data)}): "
                "give every rank a FileWriter, or call tensorferry.install() in every process"
            )
        save = self._ongoing(None if caches else plan)
        done: Future[list[WriteResult]] = Future()
        self.report = {"bytes": 0, "direct": 0}
        # The folder stays: the rank that saves those objects is writing into it.
        check_left_to_others(save.objects, plan, planner)
        if save.ranks is not None:
            save.with_parts = objects_with_parts(save.objects, planner)
        if not plan.items:
            if self._progress is not None:
                self._progress(0, 0)
            done.set_result([])
            return done
        with self._saving.held(), save.undone(), self._telling(save):
            written = self.rank_file().write(plan, planner, progress=self._progress, allowed=self._allowed)
        save.written, part = written
        self.report = {"bytes": save.written.bytes, "direct": save.written.direct}
        done.set_result(part.results(save.written.bytes))
        return done

    def rank_file(self) -> RankFile:
        """Returns where and how this rank writes its file of the save that has begun.

        With it another process can write the file in place of ``write_data``, without progress or
        warnings; the results come back to ``finish``.

        Raises:
            InvalidArgument: no save has begun, or it has ended already
        """
        save = self._ongoing()
        return RankFile(save.path / f"rank{save.rank:05d}-{save.id}.safetensors", self._threads, self._cached)

    def go_on(self) -> None:
        """The save that has begun goes on, after another process has written: see :meth:`rank_file`.

        In a store, the commit has a deadline of its own.

        Raises:
            InvalidArgument: the save has ended already
        """
        self._ongoing().go_on()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index, which commits the checkpoint, and removes the files of the checkpoint that it replaces.

        Raises:
            RankFailed: without collectives, another rank has failed, or did not come in time
            IncompleteCheckpoint: a save that began later has finished before this one, or a file of this save was
                removed meanwhile
            InvalidArgument: the save has ended already, the planner's metadata names what no rank has written or not
                all of a tensor, a key is not a string, or ``overwrite`` is ``False`` and another save has committed a
                checkpoint meanwhile
            SystemRefused: the index cannot be written, or another process keeps the folder locked; or the marker beside
                the index cannot be written: then the checkpoint is complete, and what it replaces stays
            TensorferryError: the store does not answer in time, or refuses
            Exception: what pickling the planner's data raises
        """
        save = self._ongoing()
        parts = index.parts_of(results)
        index.stamp(metadata).storage_meta = StorageMeta(checkpoint_id=_id_of(save.path), save_id=save.id)
        if save.ranks is None:
            containers = sorted(part.container for part in parts if part.header is not None)
            self._commit(save, parts, index.encode(metadata, parts, containers))
        else:
            (part,) = parts
            own = OwnPart(str(save.path), part, index.encode(metadata, parts, [part.container]), save.with_parts)
            self._commit_together(save, lambda: own)
        save.is_over = True

    def _commit(self, save: SaveRecord, parts: Sequence[RankPart], encoded: bytes) -> None:
        """Writes the index of a save, and removes what the checkpoint replaces."""
        files = {part.container: part.header for part in parts if part.header is not None}

        def check() -> None:
            # Another job may have saved there meanwhile.
            if not self._overwrite:
                self._check_free(save, _names_in(save.path))

        with save.undone():
            replaced = commits.commit_index(
                save.index,
                [(reserved.INDEX, encoded)],
                Commit(files, save.began),
                about=ABOUT,
                check=check,
                seen=save.seen,
            )
            save.replace_others(replaced, files)

    def _commit_together(self, save: SaveRecord, told: Callable[[], OwnPart]) -> None:
        """Has the first rank commit what all ranks tell; ``told`` raises what has failed on this one."""
        assert save.ranks is not None

        def tell() -> OwnPart:
            return told()

        def commit(ranks: list[OwnPart]) -> None:
            self._commit(save, [rank.part for rank in ranks], merged(ranks))

        save.ranks.step(f"save {save.path}", tell, commit)

    @contextlib.contextmanager
    def _telling(self, save: SaveRecord) -> Iterator[None]:
        """If the block fails in a save without collectives, tells the other ranks, who raise as well."""
        try:
            yield
        except BaseException as e:
            if save.ranks is not None:
                error = e

                def fail() -> OwnPart:
                    raise error

                self._commit_together(save, fail)
            raise

    def storage_meta(self) -> StorageMeta:
        """Returns the folder of the checkpoint, and after :meth:`reset` the save's id, as torch's ``StorageMeta``."""
        save_id = None if self._next_save is None else self._next_save[1]
        return StorageMeta(checkpoint_id=_id_of(self._path), save_id=save_id)


def _names_in(folder: AnyPlace) -> set[str]:
    """Returns the names of all files of a folder but the marker; in a store, of indexes and of torch's files."""
    names = set(listed(folder, "index", "__", TORCH_INDEX))
    return names - {TORCH_INDEX} if TORCH_INDEX in names and marker.is_marker(folder / TORCH_INDEX) else names


def _id_of(place: AnyPlace) -> Any:
    """Returns a place as torch has it: a path, or text."""
    return place if isinstance(place, os.PathLike) else str(place)
