"""Checkpoints in a folder: one container for each rank, and the index, which comes last."""

from __future__ import annotations

import logging
import os
import re
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .. import _gc, arguments
from .._native import Rows, _file_entries, _read_file, _write_file
from ..accelerator import ACCELERATOR
from ..allowlist import Allowed
from ..errors import IncompleteCheckpoint, InvalidArgument, ProtocolError, SystemRefused
from ..staging import Stager
from ..tensors import DTYPE_NAMES, address, scratch
from . import index
from .reader import SliceReader
from .reading import Part
from .writing import METADATA, Packed

logger = logging.getLogger("tensorferry")

#: Held while an index is written: saves of one process may overlap.
_finishing = threading.Lock()

INDEX = "index.safetensors"
_RANK_INDEX = "index-rank{:05d}.safetensors"
_OURS = re.compile(r"(rank\d{5,}-[0-9a-f]{12}|index(-rank\d{5,})?)\.safetensors(\.partial)?")


#: The longest name of a file, in bytes.
_NAME = 255


def _folder(path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not str(path) or "\0" in str(path):
        raise InvalidArgument(f"path is a folder's path, not {arguments.shown(path)}")
    if "://" in str(path):
        raise InvalidArgument(
            f"{arguments.shown(path)} is no folder of this machine: checkpoints go to file systems only"
        )
    return Path(path)


def _new_id() -> str:
    """As :data:`_OURS` has it in names."""
    return uuid.uuid4().hex[:12]


def _threads(threads: int | None) -> int | None:
    return None if threads is None else arguments.whole("threads", threads, 1)


class _InFolder:
    """A checkpoint that is known by its folder."""

    _path: Path

    @property
    def checkpoint_id(self) -> Path:
        """The folder."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can be a folder here."""
        return isinstance(checkpoint_id, os.PathLike) or "://" not in str(checkpoint_id)


class FileWriter(_InFolder, StorageWriter):  # type: ignore[misc]  # mypy does not follow torch
    """Writes a checkpoint into a folder, for ``torch.distributed.checkpoint.save`` and ``async_save``.

    Each rank writes one safetensors file, with a checksum of every 512 bytes, and the coordinator writes
    ``index.safetensors`` last. A folder may be saved into again and again: the checkpoint that is there stays whole
    until the index of the new one takes its place, in one step, and is removed then.

    Args:
        path: the folder; ``checkpoint_id`` of a save takes its place
        threads: threads a rank writes with; ``None`` chooses by the number of cores
        overwrite: with ``False``, a folder that has a checkpoint is refused
        cached: write large files, too, through the page cache: that takes longer, but who reads them soon after on this
            machine reads memory. By default a file of 64 MiB or more goes past it where the file system can

    Attributes:
        report: what the last save wrote on this rank besides the index: ``bytes``, and ``direct``, those of them that
            went past the page cache
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        overwrite: bool = True,
        cached: bool = False,
    ) -> None:
        """See the class."""
        super().__init__()
        self._path = _folder(path)
        self._threads = _threads(threads)
        self._overwrite = arguments.boolean("overwrite", overwrite)
        self._cached = arguments.boolean("cached", cached)
        self.report: dict[str, int] = {"bytes": 0, "direct": 0}
        self._rank = 0
        self._use_collectives = True
        self._save_id = _new_id()
        self._before: frozenset[str] = frozenset()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new save, into ``checkpoint_id`` if it is given."""
        if checkpoint_id:
            self._path = _folder(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learns which rank this is."""
        del is_coordinator, args
        self._rank = kwargs.get("rank") or 0
        self._use_collectives = kwargs.get("use_collectives", True)
        self._save_id = _new_id()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the folder.

        Raises:
            SystemRefused: the system refuses
            InvalidArgument: it has a checkpoint and ``overwrite`` is ``False``, or one of coordinated ranks where this
            save
                has none
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise SystemRefused(f"{self._path} cannot be made a folder: {e}") from e
        if not self._use_collectives and (self._path / INDEX).exists():
            raise InvalidArgument(
                f"{self._path} holds a checkpoint whose ranks were coordinated, which would be loaded instead of this "
                "one: save into another folder"
            )
        if not self._overwrite and self._index_path().exists():
            raise InvalidArgument(f"{self._path} holds a checkpoint, and overwrite=False")
        # What comes later may be of a save that overlaps with this one.
        self._before = frozenset(path.name for path in self._path.iterdir() if _OURS.fullmatch(path.name))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing to do: each rank chooses a name of its own."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file.

        Raises:
            UnsupportedLeaf: an item cannot be written; it is named
            SystemRefused: the system refuses, a full disk for one
        """
        # Not the save's own number: one writer may be in two saves at once.
        name = f"rank{self._rank:05d}-{_new_id()}.safetensors"
        with _gc.held_off():
            packed = Packed(plan, planner, Stager(ACCELERATOR), copy=False)
        written, direct = _write_file(
            self._path / name,
            rows=packed.rows,
            control=[],
            metadata=METADATA,
            threads=self._threads,
            cached=self._cached,
        )
        self.report = {"bytes": written, "direct": direct}
        done: Future[list[WriteResult]] = Future()
        done.set_result(packed.results(name))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index, which makes the checkpoint one, and removes what it replaces.

        Raises:
            IncompleteCheckpoint: a save that began later and is done already has removed files of this one
        """
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_data = places
        metadata.storage_meta = self.storage_meta()
        rows = Rows(torch.Tensor, torch.nn.Parameter, DTYPE_NAMES, native=False)
        control = [(index.ENTRY, index.encode(metadata, places))]
        kept = {place.source for place in places.values()}
        with _finishing:
            if gone := [name for name in sorted(kept) if not (self._path / name).exists()]:
                raise IncompleteCheckpoint(
                    f"{self._path}: a save that began later was done before this one and has removed {gone[0]}; what "
                    "it saved is there. Wait for one save before the next one into the same folder"
                )
            _write_file(self._index_path(), rows=rows, control=control, metadata=METADATA, threads=1)
            self._remove_others(kept)

    def _remove_others(self, kept: set[str]) -> None:
        own = None if self._use_collectives else f"rank{self._rank:05d}-"
        for name in self._before - kept - {self._index_path().name}:
            if own is None or name.startswith(own):
                try:
                    (self._path / name).unlink(missing_ok=True)
                except OSError as e:
                    # The checkpoint is there all the same.
                    logger.warning("cannot remove %s, which is of no use any more: %s", self._path / name, e)

    def _index_path(self) -> Path:
        return self._path / (INDEX if self._use_collectives else _RANK_INDEX.format(self._rank))

    def storage_meta(self) -> StorageMeta:
        """Where the checkpoint goes."""
        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)


class FileReader(_InFolder, SliceReader):
    """Reads a checkpoint that ``FileWriter`` wrote, for ``torch.distributed.checkpoint.load``.

    Each rank reads the slices its plan needs, straight into its tensors where it can, and verifies every block of them.

    Args:
        path: the folder; ``checkpoint_id`` of a load takes its place
        threads: threads a rank reads with; ``None`` chooses by the number of cores
        safe_globals: classes and functions that pickled objects may name besides the default list
        trust_pickle: let pickled objects name anything; then whoever can write to the folder can run code here

    Attributes:
        report: what the last load read besides the index: ``bytes`` of files, and ``wanted``, those of them that had a
            destination
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
    ) -> None:
        """See the class."""
        super().__init__(Allowed(safe_globals, trust_pickle))
        self._path = _folder(path)
        self._threads = _threads(threads)
        self.report: dict[str, int] = {"bytes": 0, "wanted": 0}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load, from ``checkpoint_id`` if it is given."""
        if checkpoint_id:
            self._path = _folder(checkpoint_id)
        self._metadata = None
        self.report = {"bytes": 0, "wanted": 0}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the index.

        Raises:
            IncompleteCheckpoint: there is none, or the save that was to write one was interrupted
            CorruptCheckpoint: it does not match its checksums
            ProtocolError: it is no index of this version
        """
        del args
        rank = kwargs.get("rank")
        path = self._path / INDEX
        if not path.is_file():
            if rank is None:
                raise self._incomplete()
            path = self._path / _RANK_INDEX.format(rank)
            if not path.is_file():
                raise self._incomplete()
        text = self._entry(path, index.ENTRY)
        metadata = index.decode(text, str(path), self._allowed)
        metadata.storage_meta = StorageMeta(checkpoint_id=self._path)
        return metadata

    def _entry(self, path: Path, entry: str) -> bytes:
        nbytes = {name: size for name, _, size in _file_entries(path)}.get(entry)
        if nbytes is None:
            raise ProtocolError(f"{path} is no index: it has no entry {entry!r}")
        memory = scratch(nbytes)
        _read_file(path, [(entry, "U8", nbytes, 0, nbytes, address(memory), [])], threads=1)
        return bytes(memory.numpy().tobytes())

    def _incomplete(self) -> IncompleteCheckpoint:
        if not self._path.is_dir():
            return IncompleteCheckpoint(f"there is no checkpoint: {self._path} is no folder")
        names = sorted(path.name for path in self._path.iterdir())
        left = [name for name in names if _OURS.fullmatch(name)]
        if left:
            return IncompleteCheckpoint(
                f"{self._path} holds an incomplete checkpoint: the save that wrote {left[0]} did not get to {INDEX}. "
                "Load an earlier checkpoint"
            )
        if ".metadata" in names:
            return IncompleteCheckpoint(
                f"{self._path} holds a checkpoint of torch's own: load it with FileSystemReader"
            )
        return IncompleteCheckpoint(f"there is no checkpoint in {self._path}: it has no {INDEX}")

    def _fetch(self, parts: dict[str, list[Part]]) -> None:
        for name, of_file in parts.items():
            if Path(name).name != name or name in ("", "..") or "\0" in name or len(name.encode()) > _NAME:
                raise ProtocolError(f"{self._path}: its index names a file outside of it, {name!r}")
            path = self._path / name
            if not path.is_file():
                raise IncompleteCheckpoint(
                    f"{self._path} holds an incomplete checkpoint: its index names {name}, and there is no such file. "
                    "Load another checkpoint, or bring the file back"
                )
            self._add(_read_file(path, of_file, threads=self._threads))

    def _add(self, report: dict[str, int]) -> None:
        for key, value in report.items():
            self.report[key] += value
