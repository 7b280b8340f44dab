"""What a writer records of a save."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from ..errors import InvalidArgument
from ..state.together import Together
from ..storage import commits, leftovers
from ..storage.container import Stored
from ..storage.folder import INDEX
from ..storage.places import AnyPlace, begun
from . import marker
from .in_folder import TORCH_INDEX

#: How what a plan says of its save begins: text, since the coordinator's process may know nothing of this package.
_MARK = "tensorferry save "
#: What the coordinator adds to it.
_AGREED = ", agreed"

#: The names of the files of torch's own writer: the indexes of all ranks and of one, and its data.
_TORCH_FILES = re.compile(r"\.metadata|__\d+(\.metadata|_\d+\.distcp)")


def agreed(plan: SavePlan) -> SavePlan:
    """Returns a rank's plan as the coordinator gives it back: its own writer is of this class, too."""
    note = plan.storage_data
    return dataclasses.replace(plan, storage_data=note + _AGREED) if _is_mark(note) else plan


def planned_for_others(plan: SavePlan) -> bool:
    """Whether the coordinator has planned a save for a writer of another class, which may leave marks as they are."""
    return plan.storage_data is not None and not _is_agreed(plan.storage_data)


def _is_mark(note: Any) -> bool:
    return isinstance(note, str) and note.startswith(_MARK)


def _is_agreed(note: Any) -> bool:
    return _is_mark(note) and note.endswith(_AGREED)


class SaveRecord:
    """What this rank records about one save, from its beginning to its end.

    Args:
        path: the folder
        save_id: the unique id in the names of its files
        rank: the rank of this process
        writes_index: whether this rank writes the index
        ranks: the others, if torch does not collect what they have written

    Attributes:
        id: ``save_id``
        began: when it began, in nanoseconds since the epoch
        written: this rank's file; while this object lives, the file is locked
        is_over: whether its index is written
        is_new_folder: whether this save has made the folder
        objects: the pickled objects that this rank has, of which others may save some
        with_parts: without collectives, the keys of those that hold its part of a tensor
    """

    def __init__(
        self, path: AnyPlace, save_id: str, rank: int, writes_index: bool, ranks: Together | None = None
    ) -> None:
        self.path, self.rank, self.writes_index, self.ranks = path, rank, writes_index, ranks
        self.index = path / INDEX
        self.id = save_id
        self.began = 0
        self.written: Stored | None = None
        self.is_over = self.is_new_folder = False
        self.objects: set[MetadataIndex] = set()
        self.with_parts: set[str] = set()
        self.seen: tuple[commits.Commit | None, Any] | None = None
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Records when the save begins. A marker without the index to which it belongs is removed.

        Raises:
            TensorferryError: the system does not say what is in the folder, or the store does not answer
        """
        self.seen = commits.seen_at(self.index)
        before = None if self.seen is None else self.seen[0]
        known = [] if before is None else [before.began]
        if before is None and self.seen is not None and marker.is_marker(self.path / TORCH_INDEX):
            # Somebody has removed the index; if this save were killed, tools would take it for a checkpoint.
            leftovers.remove(self.path, [TORCH_INDEX])
        self.began = commits.begin_after(known)

    def check(self, plan: SavePlan | None = None) -> None:
        """Checks that this save is the one that the caller goes on with; all calls of a save are made in one thread.

        Args:
            plan: what is to be written by it

        Raises:
            InvalidArgument: another save with the writer has begun meanwhile
        """
        note = None if plan is None else plan.storage_data
        is_other = _is_agreed(note) and note != self.mark + _AGREED
        if self.is_over or is_other or self._thread != threading.get_ident():
            raise InvalidArgument(
                "another save with this writer has begun in the middle of this one, in another thread or by a signal "
                "handler: give each save a writer of its own"
            )

    def go_on(self) -> None:
        """The save goes on now: in a store, what is left of it has a deadline of its own."""
        self.path = begun(self.path)
        self.index = self.path / self.index.name

    @property
    def mark(self) -> str:
        """What plans of this save carry, so that they are not written by another one."""
        return _MARK + self.id

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """If the block fails, removes a folder that this save has made and in which nothing is."""
        try:
            yield
        except BaseException:
            if self.is_new_folder and isinstance(self.path, Path):
                with contextlib.suppress(OSError):
                    self.path.rmdir()
            raise

    def is_index(self, name: str) -> bool:
        """Whether a file of this name is the index of a checkpoint that this save would replace."""
        return name == INDEX or (_TORCH_FILES.fullmatch(name) is not None and name.endswith(".metadata"))

    def replace_others(self, replaced: commits.Replaced, files: Collection[str]) -> None:
        """Leaves the file by which tools find the checkpoint, and removes other checkpoints that the new one replaces.

        Those are torch's that are older than the files of this save, whose index that file replaces.

        Args:
            replaced: what the commit has found
            files: the files of this save

        Raises:
            SystemRefused: the file cannot be written; nothing is removed then
            TensorferryError: the store does not answer, or refuses
        """
        there = replaced.listed
        wrote = min((there[name].st_mtime for name in files), default=replaced.now)
        of_torch = {name for name, one in there.items() if _TORCH_FILES.fullmatch(name) and one.st_mtime <= wrote}
        if TORCH_INDEX in of_torch or TORCH_INDEX not in there:
            if TORCH_INDEX not in there or not marker.may_be_marker(there[TORCH_INDEX]):
                marker.leave(self.index, self.id)
            of_torch.discard(TORCH_INDEX)
        # The other indexes go first: without its index a checkpoint cannot be loaded by mistake.
        if of_torch:
            leftovers.remove(self.path, sorted(of_torch))
        commits.remove_replaced(self.index, replaced, files)
