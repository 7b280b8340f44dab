"""The folder of a checkpoint that a checkpointer writes: a state container for each rank, and an index.

What is where, in a checkpoint of ``N`` ranks:

    rank00000-<id>.safetensors          the state of rank 0, as ``HTTPTransport`` would serve it, with checksums
    ...                                 up to rank N - 1
    index.safetensors                   written last, by a rename: it makes the folder a checkpoint

``<id>`` is the machine's id and the save's (``commits.new_id``, ``storage/commits.py`` says why). The index has two
entries: ``INDEX_FILES``, the commit with name and checksum of each file, and ``CHECKPOINT``, JSON with

    version      of this entry
    save         the id of the save, 12 hexadecimal digits, the same on all ranks
    step         the number that the caller gave the state, or null
    files        the name of each rank's file, by rank
    shards       for each path of the state at which some rank has a DTensor: the global shape, the dtype, and for each
                 rank that has a part of it the fields of its manifest (docs/reference/format.md), with ``rank``

Ranks need not talk to each other to commit, since their trainers may be gone by then. Rank 0 waits until the files of
all ranks are in the folder, and writes the index; the others wait until it is there. A rank that fails leaves an empty
file ``<its file>.failed`` with its reason as the text, which ends the wait of all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._native import Written, _file_entries, _file_header
from ..errors import IncompleteCheckpoint, InvalidArgument, ProtocolError, SystemRefused, TensorferryError
from . import commits, leftovers, reserved
from .commits import Commit
from .container import Container
from .whole_files import sync_folder as sync_folder
from .whole_files import write_whole

logger = logging.getLogger("tensorferry")

#: The file that makes a folder a checkpoint.
INDEX = "index.safetensors"
_VERSION = 1
#: The ``__metadata__`` of the files, besides that of every container.
_ABOUT = (("tensorferry.checkpoint", "1"),)
#: The files of torch's own checkpointer, which a save into their folder replaces.
_TORCH_FILE = "checkpoint_{}.pt"
#: Longest text of a rank's failure, in characters.
_LONGEST_REASON = 2000
#: Seconds between two looks into the folder, at first and at most.
_SOON, _LATE = 0.005, 0.25


@dataclass(frozen=True)
class SaveId:
    """What the ranks of a save agree on, and which of them this is.

    Attributes:
        save: 12 hexadecimal digits
        began: when it began, in nanoseconds since the epoch
        rank: the rank of this process
        world_size: how many ranks save
        step: the number that the caller gave the state
    """

    save: str
    began: int
    rank: int = 0
    world_size: int = 1
    step: int | None = None

    @classmethod
    def new(cls, rank: int = 0, world_size: int = 1, step: int | None = None, known: Iterable[int] = ()) -> SaveId:
        """Returns the id of a new save, which the other ranks are to take over.

        Args:
            rank: the rank of this process
            world_size: how many ranks save
            step: the number that the caller gave the state
            known: when the saves began after which it is to begin, see :func:`commits.begin_after`
        """
        return cls(secrets.token_hex(6), commits.begin_after(known), rank, world_size, step)


@dataclass(frozen=True)
class Index:
    """What the index of a checkpoint says.

    Attributes:
        save_id: the id of the save
        step: the number that the caller gave the state
        began: when the save began, in nanoseconds since the epoch
        world_size: how many ranks have saved
        files: by rank the name of its file and the checksum of that file's header
        shards: by path where the parts of a DTensor lie
    """

    save_id: str
    step: int | None
    began: int
    world_size: int
    files: dict[int, tuple[str, int | None]]
    shards: dict[str, Any]

    @property
    def commit(self) -> Commit:
        """Its files without their ranks, and when the save began."""
        return Commit(dict(self.files.values()), self.began)


def read_index(folder: Path) -> Index:
    """Reads the index of the checkpoint in ``folder``.

    Raises:
        IncompleteCheckpoint: there is none
        ProtocolError: the index is not valid, or that of another kind of checkpoint
        CorruptCheckpoint: it does not match its checksums
        SystemRefused: it cannot be read
    """
    path = folder / INDEX
    if not commits.is_file(path):
        raise _no_index(folder)
    try:
        # From one file, which a save may be about to replace.
        text, names_and_headers = _file_entries(path, [reserved.CHECKPOINT, reserved.INDEX_FILES])
    except SystemRefused as e:
        if commits.is_file(path):
            raise
        raise _no_index(folder) from e
    if text is None:
        raise ProtocolError(
            f"{path} is not the index of a checkpointer's save. A checkpoint of torch.distributed.checkpoint is loaded "
            "with tensorferry.dcp.FileReader"
        )
    commit = commits.decode(path, names_and_headers)
    try:
        fields = json.loads(text)
        if fields["version"] != _VERSION:
            raise ProtocolError(
                f"{path} has version {str(fields['version'])[:20]}, not {_VERSION}: upgrade tensorferry"
            )
        step, names, shards = fields["step"], fields["files"], fields["shards"]
        if not (step is None or type(step) is int) or not isinstance(shards, dict) or not isinstance(names, list):
            raise ValueError("a field of it has another type")
        files = {rank: (name, commit.files[name]) for rank, name in enumerate(names)}
        if not files or set(commit.files) != {name for name, _ in files.values()} or len(commit.files) != len(files):
            raise ValueError("its two lists of files differ")
        return Index(str(fields["save"]), step, commit.began, len(files), files, shards)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        if isinstance(e, TensorferryError):
            raise
        raise ProtocolError(f"{path}: its index cannot be read ({type(e).__name__}: {e})") from e


def missing_files(folder: Path, index: Index) -> list[str]:
    """Returns the names of files of the checkpoint in ``folder`` that are not there."""
    return [name for name, _ in index.files.values() if not commits.is_file(folder / name)]


def _no_index(folder: Path) -> IncompleteCheckpoint:
    return IncompleteCheckpoint(f"{folder} holds no complete checkpoint: it has no {INDEX}{_left_in(folder)}")


def _left_in(folder: Path) -> str:
    try:
        names = os.listdir(folder)
    except OSError as e:
        return f" ({e.strerror or e})"
    if INDEX in names:
        return " that is a file"
    count = sum(1 for name in names if commits.is_ours(name))
    return f", only files of saves that have not finished ({count})" if count else ""


def committed_save(folder: Path) -> str | None:
    """Returns the id of the save that the index of ``folder`` belongs to; ``None`` without a valid index."""
    try:
        return read_index(folder).save_id
    except TensorferryError:
        return None


def make_folder(folder: Path) -> bool:
    """Creates the folder and its missing parents, and syncs their directory entries to the disk.

    Returns:
        Whether the folder was not there before.

    Raises:
        OSError: the system refuses
    """
    missing = []
    for level in (folder, *folder.parents):
        if level.is_dir():
            break
        missing.append(level)
    folder.mkdir(parents=True, exist_ok=True)
    for level in reversed(missing):
        sync_folder(level.parent)
    return bool(missing)


class FolderSave:
    """One rank's part in a save: :meth:`write`, then :meth:`commit`; :meth:`fail` if anything goes wrong.

    The rank's file stays locked, and so safe from other saves, until this object is closed.

    Args:
        folder: the folder of the checkpoint
        save: which save, and which rank
        patience: seconds without a sign of life from another rank after which the save has failed

    Raises:
        SystemRefused: the folder cannot be created
    """

    def __init__(self, folder: Path, save: SaveId, patience: float = 600.0) -> None:
        self.folder, self.save = folder, save
        self._patience = patience
        self._name = _file_of(save)
        self._written: Written | None = None
        self._is_new = self._make_folder()

    @property
    def path(self) -> Path:
        """Where the file of this rank belongs. A caller may put a complete one there, instead of :meth:`write`."""
        return self.folder / self._name

    def write(self, container: Container, threads: int | None = None, cached: bool | None = None) -> Written:
        """Writes the state of this rank.

        Args:
            container: the state
            threads: as for :meth:`Container.write`
            cached: as for :meth:`Container.write`

        Raises:
            SystemRefused: the system refuses, for example because the disk is full
        """
        # A random entry in the header, so that the checksum of the header, which the index records, is unique.
        about = [*container.about, *_ABOUT, ("tensorferry.file", secrets.token_hex(16))]
        described = dataclasses.replace(container, about=about)
        partial = self.folder / f"{self._name}.partial"
        try:
            self._written = described.write(self.path, partial=partial, threads=threads, cached=cached)
        except SystemRefused:
            if self.folder.is_dir():
                raise
            # Another process has removed it while it was empty: a save of its own has failed, or old ones went.
            self._make_folder()
            self._written = described.write(self.path, partial=partial, threads=threads, cached=cached)
        return self._written

    def _make_folder(self) -> bool:
        try:
            return make_folder(self.folder)
        except OSError as e:
            raise SystemRefused(f"the folder {self.folder} cannot be created: {e}") from e

    def commit(self, check: Callable[[], None] = lambda: None) -> None:
        """Commits the checkpoint once all ranks have written; when it returns, the checkpoint is on the disk.

        Args:
            check: called now and then while other ranks are waited for; what it raises ends the wait

        Raises:
            IncompleteCheckpoint: another rank has failed, or shows no sign of life; a save that began later has
                finished before this one; or a file of this save was removed
            SystemRefused: the index cannot be written
        """
        if self.save.rank == 0:
            self._write_index(self._files_of_all(check))
        else:
            self._wait_for_index(check)

    def fail(self, reason: str) -> None:
        """Ends the save for all ranks, unless it is committed; see :func:`abandon`.

        A folder that this save has made is removed if nothing is in it, as after a save of one rank.
        """
        self._written = None
        abandon(self.folder, self.save, reason)
        if self._is_new:
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def close(self) -> None:
        """Unlocks the file of this rank."""
        self._written = None

    def _files_of_all(self, check: Callable[[], None]) -> list[str]:
        found: dict[int, str] = {}

        def complete(names: list[str]) -> bool:
            for name in names:
                if (match := self._of_this_save(name)) and match["suffix"] == "":
                    found.setdefault(int(match["rank"]), name)
            return all(rank in found for rank in range(self.save.world_size))

        self._wait(complete, check, lambda: sorted(set(range(self.save.world_size)) - set(found)))
        return [found[rank] for rank in range(self.save.world_size)]

    def _wait_for_index(self, check: Callable[[], None]) -> None:
        seen: tuple[int, int] | None = None

        def complete(names: list[str]) -> bool:
            nonlocal seen
            if INDEX not in names:
                return False
            try:
                about = os.stat(self.folder / INDEX)
            except OSError:
                return False
            # Read once: it may be long, and that of an earlier save may stay for minutes.
            before, seen = seen, (about.st_ino, about.st_mtime_ns)
            return seen != before and committed_save(self.folder) == self.save.save

        self._wait(complete, check, lambda: [0])
        # Rank 0 may be about to do so; this rank must not say that it is done before.
        try:
            sync_folder(self.folder)
        except OSError as e:
            raise SystemRefused(f"the folder {self.folder} cannot be synchronised: {e}") from e

    def _wait(
        self, complete: Callable[[list[str]], bool], check: Callable[[], None], missing: Callable[[], list[int]]
    ) -> None:
        """Looks into the folder until it is ``complete``, a rank has failed, or nothing changes for too long."""
        pause, last, seen = _SOON, time.monotonic(), None
        while True:
            names = self._listed()
            if complete(names):
                return
            for name in names:
                if (match := self._of_this_save(name)) and match["suffix"] == ".failed":
                    raise IncompleteCheckpoint(
                        f"{self.folder}: rank {int(match['rank'])} has failed, and the save with it: "
                        f"{_reason(self.folder / name)}"
                    )
            now, signs = time.monotonic(), self._signs(names)
            if signs != seen:
                last, seen, pause = now, signs, _SOON
            elif now - last > self._patience:
                raise IncompleteCheckpoint(
                    f"{self.folder}: rank {missing()[0]} has shown no sign of life for {self._patience:g} s. All ranks "
                    "must save together, into a folder that all of them see"
                )
            check()
            time.sleep(pause)
            pause = min(pause * 1.5, _LATE)

    def _listed(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except OSError as e:
            raise SystemRefused(f"the folder {self.folder} cannot be listed: {e}") from e

    def _signs(self, names: list[str]) -> list[tuple[str, int, int]]:
        """Returns what changes while other ranks write."""
        signs = []
        for name in sorted(names):
            if self._of_this_save(name):
                with contextlib.suppress(OSError):
                    about = os.stat(self.folder / name)
                    signs.append((name, about.st_blocks, about.st_mtime_ns))
        return signs

    def _of_this_save(self, name: str) -> re.Match[str] | None:
        if self.save.save not in name:
            return None
        pattern = rf"rank(?P<rank>\d{{5,}})-[0-9a-f]{{8}}{self.save.save}\.safetensors(?P<suffix>|\.partial|\.failed)"
        return re.fullmatch(pattern, name)

    def _write_index(self, names: list[str]) -> None:
        headers: dict[str, int | None] = {}
        parts: dict[str, Any] = {}
        for rank, name in enumerate(names):
            path = self.folder / name
            headers[name] = _file_header(path)
            (manifest,) = _file_entries(path, [reserved.MANIFEST])
            add_shards(parts, rank, manifest)
        fields = {
            "version": _VERSION,
            "save": self.save.save,
            "step": self.save.step,
            "files": names,
            "shards": parts,
        }
        torchs = [_TORCH_FILE.format(rank) for rank in range(self.save.world_size)]
        commits.commit_index(
            self.folder / INDEX,
            [(reserved.CHECKPOINT, json.dumps(fields, separators=(",", ":")).encode())],
            Commit(headers, self.save.began),
            about=_ABOUT,
            then=lambda: leftovers.remove(self.folder, torchs),
        )


def add_shards(shards: dict[str, Any], rank: int, manifest: bytes | None) -> None:
    """Adds the parts of DTensors and ShardedTensors that a rank's manifest describes.

    Raises:
        InvalidArgument: the ranks have different tensors at one path
    """
    if manifest is None or b'"global_shape"' not in manifest:
        return
    for path, shard in json.loads(manifest)["shards"].items():
        whole = shards.setdefault(path, {"dtype": shard["dtype"], "global_shape": shard["global_shape"], "parts": []})
        if (whole["dtype"], whole["global_shape"]) != (shard["dtype"], shard["global_shape"]):
            raise InvalidArgument(
                f"the ranks have different tensors at {path}: dtype and global shape must be the same on all of them"
            )
        # A DTensor has one part on each rank, and a ShardedTensor has a list of them.
        parts = shard.get("parts")
        if parts is None:
            parts = [{key: value for key, value in shard.items() if key not in ("dtype", "global_shape")}]
        whole["parts"] += [{**part, "rank": rank} for part in parts]


def _file_of(save: SaveId) -> str:
    return f"rank{save.rank:05d}-{commits.machine()}{save.save}.safetensors"


def abandon(folder: Path, save: SaveId, reason: str) -> None:
    """Ends a save whose writer on this rank has failed or is gone, for all ranks; a committed one stays.

    The other ranks stop waiting and report ``reason``. What this rank has written is removed, by this call or by a
    later save. Raises nothing: if the folder cannot be used, the others notice that nothing comes.
    """
    file = folder / _file_of(save)
    partial = folder / f"{file.name}.partial"
    with contextlib.suppress(OSError):
        if committed_save(folder) == save.save:
            return
        if save.world_size > 1:
            make_folder(folder)  # this rank may be the first to come here
            # A reason may name a path that is no valid text.
            text = reason[:_LONGEST_REASON].encode(errors="backslashreplace")
            write_whole(folder / f"{file.name}.failed", text, partial, synced=False)
        else:
            partial.unlink(missing_ok=True)
        # Of other ranks, rank 0 may be committing the file at this moment.
        if save.rank == 0:
            file.unlink(missing_ok=True)


def _reason(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(_LONGEST_REASON)
    except OSError as e:
        return f"its reason cannot be read ({e})"


def checkpoints(root: Path) -> list[tuple[Path, Index]]:
    """Returns the folders below ``root`` that are complete checkpoints of a checkpointer, the oldest first.

    Raises:
        SystemRefused: ``root`` cannot be listed
    """
    try:
        folders = [Path(entry.path) for entry in os.scandir(root) if os.path.isdir(entry.path)]
    except OSError as e:
        raise SystemRefused(f"the folder {root} cannot be listed: {e}") from e
    found = []
    for folder in folders:
        with contextlib.suppress(TensorferryError):
            found.append((folder, read_index(folder)))
    return sorted(found, key=lambda one: (one[1].began, one[0].name))


def committed_in(root: Path) -> frozenset[tuple[str, int, int]]:
    """Returns what changes with every checkpoint below ``root`` that is committed or removed."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(root):
            with contextlib.suppress(OSError):
                about = os.stat(os.path.join(entry.path, INDEX))
                found.append((entry.name, about.st_ino, about.st_mtime_ns))
    return frozenset(found)


class KnownSaves:
    """The saves that a process knows of, after which a new one begins: its own, and those that it finds on the disk.

    It reads each index of a series once, and looks at every save whether another one has taken its place. So a new save
    costs a look for an index in its folder and, if that is of a series, in each of the series' folders.
    """

    def __init__(self) -> None:
        #: By folder, inode and time of the index that was read.
        self._seen: dict[Path, tuple[int, int]] = {}
        self._newest = 0

    def began(self, folder: Path) -> list[int]:
        """Returns when the saves began after which one into ``folder`` is to begin; it raises nothing.

        These are the save in the folder and those in the folders of its series, which is that of :func:`keep_last`, and
        all saves of this process.
        """
        found = commits.began(folder / INDEX)
        series = _series(folder)
        beside: list[str] = []
        if series != folder.name:
            with contextlib.suppress(OSError):
                beside = os.listdir(folder.parent)
        for other in (folder.parent / name for name in beside if _series(Path(name)) == series):
            with contextlib.suppress(OSError):
                about = os.stat(other / INDEX)
                if self._seen.get(other) != (version := (about.st_ino, about.st_mtime_ns)):
                    found += commits.began(other / INDEX)
                    self._seen[other] = version
        self._newest = max([*found, self._newest])
        return [self._newest]

    def add(self, began: int) -> None:
        """A save of this process has begun."""
        self._newest = max(self._newest, began)


def remove_checkpoint(folder: Path, index: Index) -> None:
    """Removes a checkpoint: first its index, so that a removal that is interrupted leaves no checkpoint behind.

    If another save has been committed in the folder since ``index`` was read, nothing is removed. Files of others stay,
    and the folder with them. What cannot be removed is logged.
    """
    try:
        is_removed = commits.remove_index(folder / INDEX, index.commit)
    except TensorferryError as e:
        logger.warning("the older checkpoint in %s is not removed: %s", folder, e)
        return
    if is_removed:
        leftovers.remove(folder, index.commit.files)
        with contextlib.suppress(OSError):
            folder.rmdir()


def keep_last(count: int, newest: Path) -> None:
    """Removes the oldest checkpoints of a series but the last ``count``, and what killed saves and removals left of it.

    A series is the folders beside ``newest`` whose names differ from its name in numbers only, such as ``step-100`` and
    ``step-200``. A folder without a number in its name is a series of its own: what is beside it may be another job's.
    So may what a link leads to: links are no part of a series.

    The oldest are those whose saves began first. Step numbers do not decide: a job that has gone back to an earlier
    step goes on from what it saves then. Others may save into the series at the same time, such as the writer of a
    trainer that was killed: of two that remove, neither removes the newest, and none removes what began after its own.

    It raises nothing, since the checkpoint that was just saved is complete: what cannot be removed is logged.

    Args:
        count: how many stay
        newest: the folder of the checkpoint that was just saved; it stays
    """
    series = _series(newest)
    if series == newest.name:
        return
    try:
        beside = checkpoints(newest.parent)
        found = {folder: index for folder, index in beside if _series(folder) == series and not folder.is_symlink()}
    except TensorferryError as e:
        logger.warning("older checkpoints are not removed: %s", e)
        return
    # The oldest first. Where the one that was just saved is older than others, it stays as one more; where another has
    # removed it meanwhile, that one has removed what is older, too.
    for folder in list(found)[:-count] if newest in found else ():
        if folder == newest:
            break
        remove_checkpoint(folder, found[folder])
    with contextlib.suppress(OSError):
        now = os.stat(newest / INDEX).st_mtime
        for entry in list(os.scandir(newest.parent)):
            folder = Path(entry.path)
            if entry.is_dir(follow_symlinks=False) and folder not in found and _series(folder) == series:
                with contextlib.suppress(OSError):
                    _remove_remains(folder, now)


def _series(folder: Path) -> str:
    return re.sub(r"[0-9]+", "#", folder.name)


def _remove_remains(folder: Path, now: float) -> None:
    """Removes a folder in which nothing is but files of saves that were killed.

    Ranks that saved with ``torch.distributed.checkpoint`` and without a coordinator have an index each.
    """
    names = os.listdir(folder)
    has_index = any(name.startswith("index") and name.endswith(".safetensors") for name in names)
    if not has_index and names and all(commits.is_ours(name) for name in names):
        leftovers.remove_leftovers(folder, now, None, set(), lambda: set())
        with contextlib.suppress(OSError):
            folder.rmdir()
