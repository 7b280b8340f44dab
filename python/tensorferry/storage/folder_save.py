"""One rank's part in a save into a folder: its file, and the commit with all other ranks.

Ranks need not talk to each other to commit, since their trainers may be gone by then. Rank 0 waits until the files of
all ranks are in the folder, and writes the index; the others wait until it is there. A rank that fails leaves a
file ``<its file>.failed`` with its reason as the text, which ends the wait of all others. In a store, where nothing
shows before it is complete, a rank that uploads replaces an empty object ``<its file>.partial`` now and then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._native import Stored as StoredFile
from .._native import _file_entries, _file_entry_digests, _file_header
from ..errors import ConnectError, FetchTimeout, IncompleteCheckpoint, StoreRefused, SystemRefused, TensorferryError
from . import commits, leftovers, reserved
from .commits import Commit
from .container import Container, Stored
from .folder import ABOUT, INDEX, committed_save, encode_index
from .names import BEGINNINGS, machine
from .objects.place import ObjectPlace
from .places import AnyPlace, begun
from .spread import RankState, spread_tensors
from .stores import Stat, store_of
from .whole_files import FEW, create_folder, read_whole, remove_empty, version_of, write_whole

#: The files of torch's own checkpointer, which a save into their folder replaces.
_TORCH_FILE = "checkpoint_{}.pt"
#: Longest text of a rank's failure, in characters.
_LONGEST_REASON = 2000
#: After which errors it is not known whether a save is committed: the system or a store did not let its index be read.
_UNKNOWN = (FetchTimeout, ConnectError, StoreRefused, SystemRefused)
#: How many signs of life a rank that uploads gives in the time in which another one waits for one.
_SIGNS = 4


@dataclass(frozen=True)
class SaveId:
    """What the ranks of a save agree on, and which of them this is.

    Attributes:
        save: 12 hexadecimal digits
        began: when it began, in nanoseconds since the epoch
        rank: the rank of this process
        world_size: how many ranks save
        step: the number that the caller gave the state
        lineage: as for :class:`Commit`; that of rank 0 counts
    """

    save: str
    began: int
    rank: int = 0
    world_size: int = 1
    step: int | None = None
    lineage: str | None = None

    @classmethod
    def new(
        cls,
        rank: int = 0,
        world_size: int = 1,
        step: int | None = None,
        known: Iterable[int] = (),
        lineage: str | None = None,
    ) -> SaveId:
        """Returns the id of a new save, which the other ranks are to take over.

        Args:
            rank: the rank of this process
            world_size: how many ranks save
            step: the number that the caller gave the state
            known: when the saves began after which it is to begin, see :func:`commits.begin_after`
            lineage: that of the checkpoint from which the run goes on
        """
        return cls(secrets.token_hex(6), commits.begin_after(known), rank, world_size, step, lineage)


class FolderSave:
    """One rank's part in a save: :meth:`write`, then :meth:`commit`; :meth:`fail` if anything goes wrong.

    The rank's file stays locked, and so safe from other saves, until this object is closed.

    Args:
        folder: the folder of the checkpoint
        save: which save, and which rank
        patience: seconds without a sign of life from another rank after which the save has failed; in a store, also
            seconds in which nothing is sent

    Raises:
        SystemRefused: the folder cannot be created
    """

    def __init__(self, folder: AnyPlace, save: SaveId, patience: float = 600.0) -> None:
        self.folder, self.save = begun(folder), save
        self._patience = patience
        self._name = _file_of(save)
        self._written: Stored | None = None
        self._is_new = create_folder(self.folder)

    @property
    def path(self) -> AnyPlace:
        """Where the file of this rank belongs. A caller may put a complete one there, instead of :meth:`write`."""
        return self.folder / self._name

    def write(self, container: Container, threads: int | None = None, cached: bool | None = None) -> Stored:
        """Writes the state of this rank.

        Args:
            container: the state
            threads: as for :meth:`Container.write`
            cached: as for :meth:`Container.write`

        Returns:
            As :meth:`Container.write`. Whoever keeps it keeps the file locked, also after :meth:`close`.

        Raises:
            InvalidArgument, SystemRefused, TensorferryError: as for :meth:`Container.write`
        """
        # A random entry in the header, so that the checksum of the header, which the index records, is unique.
        about = [*container.about, *ABOUT, ("tensorferry.file", secrets.token_hex(16))]
        described = dataclasses.replace(container, about=about)
        partial = self.folder / f"{self._name}.partial"
        if isinstance(self.folder, ObjectPlace):
            self._written = self._upload(self.folder, described, threads)
            return self._written
        try:
            self._written = described.write(self.path, partial=partial, threads=threads, cached=cached)
        except SystemRefused:
            if self.folder.is_dir():
                raise
            # Another process has removed it while it was empty: a save of its own has failed, or old ones went.
            create_folder(self.folder)
            self._written = described.write(self.path, partial=partial, threads=threads, cached=cached)
        return self._written

    def _upload(self, folder: ObjectPlace, container: Container, threads: int | None) -> Stored:
        """Uploads the state of this rank, for as long as it takes, unless nothing is sent for :attr:`_patience`.

        The object shows when it is complete. Until then, another one is replaced now and then, as a sign of life.
        """
        sign = folder / f"{self._name}.partial"
        sent, moved, shown, is_shown = 0, time.monotonic(), time.monotonic(), False

        def on_progress(done: int, _: int) -> None:
            nonlocal sent, moved, shown, is_shown
            now = time.monotonic()
            if done > sent:
                sent, moved = done, now
            elif now - moved > self._patience:
                raise FetchTimeout(f"{self.path}: writing it: the store has taken nothing for {self._patience:g} s")
            if self.save.world_size > 1 and moved > shown and now - shown > self._patience / _SIGNS:
                shown, is_shown = now, True
                with contextlib.suppress(TensorferryError):
                    begun(sign).write_bytes(b"")

        try:
            return container.write(folder.patient() / self._name, partial=sign, threads=threads, progress=on_progress)
        finally:
            if is_shown:
                leftovers.remove(begun(folder), [sign.name])

    def commit(self, check: Callable[[], None] = lambda: None) -> Commit | None:
        """Commits the checkpoint once all ranks have written; when it returns, the checkpoint is on the disk.

        Args:
            check: called now and then while other ranks are waited for, and by rank 0 right before the commit, in a
                folder while it is locked; what it raises ends the save

        Returns:
            On rank 0, what the index says.

        Raises:
            IncompleteCheckpoint: another rank has failed, or shows no sign of life; a save that began later has
                finished before this one; or a file of this save was removed
            InvalidArgument: the parts of a tensor do not make up the whole, see :func:`spread_tensors`
            SystemRefused: the folder cannot be listed or synced; otherwise as for :func:`commits.commit_index`
            TensorferryError: the file of a rank cannot be read; otherwise as for :func:`commits.commit_index`
            Exception: what ``check`` raises
        """
        if self.save.rank == 0:
            names = [self._name] if self.save.world_size == 1 else self._wait_for_files(check)
            return self._commit_index(begun(self.folder), names, check)
        self._wait_for_index(check)
        return None

    def fail(self, reason: str) -> None:
        """Ends the save for all ranks, unless it is committed; see :func:`abandon`.

        A folder that this save has made is removed if nothing is in it, as after a save of one rank.
        """
        self.close()
        abandon(self.folder, self.save, reason)
        if self._is_new:
            remove_empty(self.folder)

    def close(self) -> None:
        """Unlocks the file of this rank."""
        self._written = None

    def _wait_for_files(self, check: Callable[[], None]) -> list[str]:
        """Waits until the files of all ranks are in the folder; returns their names, by rank."""
        files: dict[int, str] = {}
        ranks = range(self.save.world_size)
        for names in self._listings(check, lambda: next(rank for rank in ranks if rank not in files)):
            for name in names:
                if (match := self._of_this_save(name)) and match["suffix"] == "":
                    files.setdefault(int(match["rank"]), name)
            if len(files) == len(ranks):
                break
        return [files[rank] for rank in ranks]

    def _wait_for_index(self, check: Callable[[], None]) -> None:
        """Waits until the index of this save, which rank 0 writes, is in the folder, and syncs the folder."""
        seen: tuple[object, ...] | None = None
        for names in self._listings(check, lambda: 0):
            # Each index is read once: it may be long, and that of an earlier save may stay for minutes.
            if INDEX not in names or (version := version_of(names[INDEX])) == seen:
                continue
            # If it cannot be read, it is at the next look.
            with contextlib.suppress(*_UNKNOWN):
                found = committed_save(begun(self.folder))
                seen = version
                if found == self.save.save:
                    break
        # Rank 0 may be about to sync it; this rank must not say that it is done before.
        commits.sync_committed(self.folder)

    def _listings(self, check: Callable[[], None], missing: Callable[[], int]) -> Iterator[Mapping[str, Stat]]:
        """Yields what is in the folder, again and again, until a rank has failed or nothing changes for too long.

        Raises:
            IncompleteCheckpoint: that is so
            TensorferryError: the folder cannot be listed
            Exception: what ``check`` raises
        """
        soon, late = store_of(self.folder).pauses
        pause, last, seen = soon, time.monotonic(), None
        while True:
            names = store_of(begun(self.folder)).entries(*BEGINNINGS)
            yield names
            for name in names:
                if (match := self._of_this_save(name)) and match["suffix"] == ".failed":
                    raise IncompleteCheckpoint(
                        f"{self.folder}: rank {int(match['rank'])} has failed, and the save with it: "
                        f"{_reason(begun(self.folder) / name)}"
                    )
            now = time.monotonic()
            # Files of saves change while ranks write them.
            signs = {name: (one.st_size, one.st_mtime_ns) for name, one in names.items() if self._of_this_save(name)}
            if signs != seen:
                last, seen, pause = now, signs, soon
            elif now - last > self._patience:
                raise IncompleteCheckpoint(
                    f"{self.folder}: rank {missing()} has shown no sign of life for {self._patience:g} s. All ranks "
                    "must save together, into a folder that all of them see"
                )
            check()
            time.sleep(pause)
            pause = min(pause * 1.5, late)

    def _of_this_save(self, name: str) -> re.Match[str] | None:
        if self.save.save not in name:
            return None
        pattern = rf"rank(?P<rank>\d{{5,}})-[0-9a-f]{{8}}{self.save.save}\.safetensors(?P<suffix>|\.partial|\.failed)"
        return re.fullmatch(pattern, name)

    def _commit_index(self, folder: AnyPlace, names: list[str], check: Callable[[], None]) -> Commit:
        """Commits the save: replaces the index by one of the ranks' files ``names``, with the shards they describe.

        Then removes the files that only the earlier save needed, and torch's own ``checkpoint_<rank>.pt``.
        """
        # Of an object, what is opened once has all that is read of it here.
        files = [store_of(folder).open(name)[0] or folder / name for name in names]
        headers = {name: _file_header(file) for name, file in zip(names, files, strict=True)}
        # A rank of a job may save its own parts alone, and load them.
        parts = spread_tensors([_saved(file) for file in files], whole=len(files) > 1)
        commit = Commit(headers, self.save.began, self.save.lineage, self.save.step)
        torchs = {_TORCH_FILE.format(rank) for rank in range(self.save.world_size)}
        replaced = commits.commit_index(
            folder / INDEX,
            [(reserved.CHECKPOINT, encode_index(self.save.save, names, parts))],
            commit,
            about=ABOUT,
            check=check,
        )
        leftovers.remove(folder, replaced.listed.keys() & torchs)
        commits.remove_replaced(folder / INDEX, replaced, names)
        return commit


def _saved(path: Any) -> RankState:
    """Returns what a rank has saved in a file or object."""
    return RankState(
        lambda: _file_entries(path, [reserved.MANIFEST])[0],
        lambda: StoredFile.open(path, checksums=False),
        lambda: _file_entry_digests(path),
    )


def _file_of(save: SaveId) -> str:
    return f"rank{save.rank:05d}-{machine()}{save.save}.safetensors"


def abandon(folder: AnyPlace, save: SaveId, reason: str) -> None:
    """Ends a save whose writer on this rank has failed or is gone, for all ranks; a committed one stays.

    The other ranks stop waiting and report ``reason``. What this rank has written is removed, by this call or by a
    later save: by a later one if the index cannot be read, and in a store, where the index may be written although
    nobody has heard of it, or be on its way. Raises nothing: if the folder cannot be used, the others notice that
    nothing comes.
    """
    # With a deadline of its own: that of the save may have passed.
    folder = begun(folder)
    file = folder / _file_of(save)
    partial = folder / f"{file.name}.partial"
    with contextlib.suppress(OSError, TensorferryError):
        # Without an answer, it may be committed; the others look for its index before they heed a failure.
        is_uncommitted = False
        with contextlib.suppress(*_UNKNOWN):
            if committed_save(folder) == save.save:
                return
            is_uncommitted = True
        if save.world_size > 1:
            create_folder(folder)  # this rank may be the first to come here
            # A reason may name a path that is no valid text.
            text = reason[:_LONGEST_REASON].encode(errors="backslashreplace")
            write_whole(folder / f"{file.name}.failed", text, partial, synced=False)
        elif isinstance(partial, Path):
            partial.unlink(missing_ok=True)
        # Of other ranks, rank 0 may be committing the file at this moment.
        if save.rank == 0 and is_uncommitted and isinstance(file, Path):
            file.unlink(missing_ok=True)


def _reason(path: AnyPlace) -> str:
    try:
        return read_whole(path, FEW).decode(errors="replace")[:_LONGEST_REASON]
    except (OSError, TensorferryError) as e:
        return f"its reason cannot be read ({e})"
