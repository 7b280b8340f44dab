"""What makes a folder a checkpoint: its index, and the one way in which an index is replaced or removed.

A folder may have several writers: saves of one job that overlap, two jobs that were given the same path, a coordinator
that was thought to be dead, somebody who removes old checkpoints. Five rules keep every committed checkpoint whole:

- Every file that a save writes has a unique name (``names.py``), and an index that names other files is none.
- Everybody who replaces an index calls :func:`commit_index` or :func:`remove_index`. They lock
  the folder (``flock``), read the index again, and only then rename or remove. In a store, which has no locks, writes
  are conditional instead; removals are not, and a window remains. A save neither replaces nor removes the index of one
  that began later. A removal removes only the very index that was looked at.
- A save begins later than the one in its folder, whatever the clock says: :func:`begin_after`.
- Whoever has replaced an index removes the files that only the old one had named. None of them belongs to a save that
  still runs.
- Other files are removed only if their writer is dead (``leftovers.py``). Writers keep their files locked until their
  save is over. If the writer ran on this machine, a free lock proves that it is dead; file names therefore contain the
  machine's id. Other machines may not share locks with this one: their files are removed only after a day without a
  write, and so is everything in a store.

The lock of a folder is shared by all processes of a machine, on every file system. Whether it is shared by several
machines depends on the file system; NFS and Lustre do not lock folders for all of them. Then only the second reading
protects an index from another machine, and a window remains, between that reading and the rename right behind it: if
two machines commit into one folder within it, the later rename wins, even if its save began first. The folder holds a
whole checkpoint then, too, but that of the other save is lost although it was committed, unless it was written last.
Let only one job save into a folder, and remove checkpoints on the machine that saves or while no save runs.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._native import Table, _file_entries
from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    ProtocolError,
    SourceChanged,
    SystemRefused,
    TensorferryError,
)
from . import leftovers
from .container import Container
from .names import checked_files
from .places import AnyPlace
from .reserved import INDEX, INDEX_FILES, OLD_INDEX
from .stores import Stat, store_of

logger = logging.getLogger("tensorferry")

#: The last time that counts as the beginning of a save, in nanoseconds since the epoch: in the year 2116.
_LAST = 1 << 62
#: How often a commit looks again at an index that others replace meanwhile.
_ATTEMPTS = 20


@dataclass(frozen=True)
class Commit:
    """What an index records about its files.

    Attributes:
        files: the name of each file, mapped to the checksum of its header
        began: when the save began, in nanoseconds since the epoch: see :func:`begin_after`
        lineage: the id of the runs that go on from each other, of which one has saved it, see ``lineage.py``
        step: the number that the caller gave the state
    """

    files: dict[str, int]
    began: int = 0
    lineage: str | None = None
    step: int | None = None

    def encode(self) -> bytes:
        """Returns the bytes of the index's entry ``INDEX_FILES``."""
        files = {name: f"{header:016x}" for name, header in self.files.items()}
        fields: dict[str, Any] = {"began": self.began, "files": files}
        fields |= {name: value for name in ("lineage", "step") if (value := getattr(self, name)) is not None}
        return json.dumps(fields, separators=(",", ":")).encode()


def begin_after(known: Iterable[int]) -> int:
    """Returns when a new save begins, in nanoseconds since the epoch: now, or right after the newest of ``known``.

    Args:
        known: when earlier saves began, those that the new one may replace or stand beside
    """
    return max(time.time_ns(), min(max(known, default=0), _LAST - 1) + 1)


def read(path: AnyPlace) -> tuple[bytes, Commit]:
    """Reads the index file ``path``; returns the index, still encoded, and its commit. The file is opened once.

    Raises:
        ProtocolError: the file is not an index, or names other files than those of ranks
        CorruptCheckpoint: the file does not match its checksums
        SystemRefused: the file cannot be read
        IncompleteCheckpoint: there is no such object
        TensorferryError: a store does not answer, or refuses
    """
    text, files, old = _file_entries(path, [INDEX, INDEX_FILES, OLD_INDEX])
    if old is not None:
        raise ProtocolError(
            f"{path} was written by an older tensorferry, before 0.1.0: load it with that one, and save it anew"
        )
    if text is None:
        raise ProtocolError(f"{path} is not an index: it has no entry {INDEX!r}")
    return text, decode(path, files)


def decode(path: AnyPlace, files: bytes | None) -> Commit:
    """Returns the commit in the entry ``INDEX_FILES`` of the index ``path``.

    Raises:
        ProtocolError: there is no such entry, or it is not valid
    """
    if files is None:
        raise ProtocolError(f"{path}: its index cannot be read (it has no entry {INDEX_FILES!r})")
    try:
        fields: Any = json.loads(files)
        began = fields["began"]
        if type(began) is not int or not 0 <= began <= _LAST:
            raise ValueError("it says no time at which its save began")
        headers = [int(header, 16) for header in fields["files"].values()]
        if not all(0 <= header < 1 << 64 for header in headers):
            raise ValueError("a checksum does not have 64 bits")
        names = checked_files(fields["files"], path)
        lineage, step = fields.get("lineage"), fields.get("step")
        if not (lineage is None or isinstance(lineage, str)) or not (step is None or type(step) is int):
            raise ValueError("its lineage or step has another type")
        return Commit(dict(zip(names, headers, strict=True)), began, lineage, step)
    except ProtocolError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ProtocolError(f"{path}: its index cannot be read ({type(e).__name__}: {e})") from e


def files_of(path: AnyPlace) -> Commit:
    """Returns the commit of the index ``path``.

    Raises:
        IncompleteCheckpoint: there is none
        TensorferryError: the index cannot be read, or names other files than those of ranks
    """
    # In an index of many tensors, this entry is the small one.
    return decode(path, _file_entries(path, [INDEX_FILES])[0])


def look(path: AnyPlace) -> tuple[Commit | None, Any]:
    """Returns the commit of an index, ``None`` without one, with no files if it is damaged; and its version.

    That it is damaged is logged.

    Raises:
        SystemRefused: the system does not say whether there is an index, or refuses to read it
        TensorferryError: see :func:`says_nothing`
    """
    store = store_of(path.parent)
    opened, version = store.open(path.name)
    if opened is None:
        return None, version
    try:
        return decode(path, _file_entries(opened, [INDEX_FILES])[0]), version
    except TensorferryError as e:
        if says_nothing(e):
            # On another machine, somebody may have removed it just now.
            if isinstance(e, SystemRefused) and store.stat(path.name) is None:
                return None, version
            raise
        logger.warning(
            "the index of the checkpoint that is replaced cannot be read, so its files are not removed: %s", e
        )
        return Commit({}), version


def says_nothing(error: TensorferryError) -> bool:
    """Whether an error says nothing of an index, which may be whole: it was not read.

    The system has refused, or a store did not answer or has refused. Who takes the index for damaged then loses a
    checkpoint that was committed.
    """
    return not isinstance(error, (CorruptCheckpoint, ProtocolError, IncompleteCheckpoint))


def seen_at(index: AnyPlace) -> tuple[Commit | None, Any] | None:
    """Returns what :func:`look` shows; ``None`` if it raises, which the commit will do again."""
    try:
        return look(index)
    except TensorferryError as e:
        logger.debug("%s: it is not known when its save began: %s", index, e)
        return None


def beginnings(*indexes: AnyPlace) -> list[int]:
    """Returns when the saves that wrote ``indexes`` began, for :func:`begin_after`; skips files that are no index.

    It raises nothing: a save that begins too early for want of an answer is refused when it commits. After the first
    question that the system or a store does not answer, no more are asked.
    """
    beginnings = []
    for path in indexes:
        if (seen := seen_at(path)) is None:
            break
        if seen[0] is not None:
            beginnings.append(seen[0].began)
    return beginnings


@dataclass(frozen=True)
class Replaced:
    """What a commit has found, for those who remove what it replaces.

    Attributes:
        before: the commit of the old index, if there was one
        listed: what was in the folder before the commit
        now: when the index was written, by the clock of the file system or the store
    """

    before: Commit | None
    listed: Mapping[str, Stat] = field(repr=False)
    now: float


def commit_index(
    index: AnyPlace,
    entries: Sequence[tuple[str, bytes]],
    commit: Commit,
    *,
    about: Sequence[tuple[str, str]] = (),
    check: Callable[[], object] = lambda: None,
    seen: tuple[Commit | None, Any] | None = None,
) -> Replaced:
    """Commits a save: writes its index in place of the one that is there.

    When it returns, the index is on the disk, and the caller removes what it has replaced, with
    :func:`remove_replaced`. In a folder, it costs two syncs, of the index and of the folder.

    Args:
        index: the path of the index
        entries: the entries of the index without ``INDEX_FILES``
        commit: its files, which are complete and which this save has written, and when the save began
        about: keys and values for the index's ``__metadata__``
        check: called right before the index is replaced, in a folder while it is locked; if it raises, the save has
            failed, and its files are removed
        seen: what :func:`look` has shown when the save began; a store is not asked again, if it has conditions

    Raises:
        IncompleteCheckpoint: a save that began later has finished before this one, whose files are removed then; or
            another process has removed one of its files
        SystemRefused: the index cannot be written, and in a folder, the files of the save are removed then; the
            checkpoint is committed, and the folder cannot be synced; or another process keeps the folder locked
        SourceChanged: other saves have replaced the index in a store again and again
        InvalidArgument: the calling thread is in the middle of a commit
        TensorferryError: a store does not answer, or refuses; the index may be there then
        Exception: what ``check`` raises
    """
    folder = index.parent
    store = store_of(folder)
    content = Container(Table(), None, True, [*entries, (INDEX_FILES, commit.encode())], about)
    with store.holding(commit.files) as listed:
        if not store.compares or (seen is not None and seen[1] is None):
            seen = None
        elif index.name not in listed:
            seen = None, store.absent
        try:
            with store.new_index(index.name, content) as put:
                reached("written", index)
                with store.locked():
                    before, now = _replace(index, commit, put, check, seen)
        except SystemRefused:
            if not store.may_be_late:
                # The save has failed. On a full disk, its files would leave no room for the next one.
                leftovers.remove(folder, commit.files)
            raise
    reached("renamed", index)
    sync_committed(folder)
    return Replaced(before, listed, now)


def _replace(
    index: AnyPlace,
    commit: Commit,
    put: Callable[[Any], float],
    check: Callable[[], object],
    seen: tuple[Commit | None, Any] | None,
) -> tuple[Commit | None, float]:
    """Puts an index in the place of an earlier one; returns the commit of that one, and when it did."""
    for _ in range(_ATTEMPTS):
        before, version = seen or look(index)
        seen = None
        try:
            _refuse_if_newer(index, before, commit)
            check()
        except BaseException:
            leftovers.remove(index.parent, commit.files)
            raise
        reached("checked", index)
        try:
            return before, put(version)
        except SourceChanged:
            continue
    raise SourceChanged(f"{index}: other saves have replaced it again and again: let only one job save there")


def _refuse_if_newer(index: AnyPlace, before: Commit | None, commit: Commit) -> None:
    if before is not None and before.began > commit.began:
        raise IncompleteCheckpoint(
            f"{index.parent}: a save that began later has finished before this one; its checkpoint is in the "
            "folder, and this one is discarded. Let only one job save into a folder, one save at a time"
        )


def sync_committed(folder: AnyPlace) -> None:
    """Syncs a folder whose index is in its place.

    Raises:
        SystemRefused: the system refuses
    """
    try:
        store_of(folder).sync()
    except OSError as e:
        raise SystemRefused(
            e.errno,
            f"{folder}: its checkpoint is committed, but not synchronised: {e.strerror}. It can be loaded, and may be "
            "lost if the machine goes down before the file system has written it",
        ) from e


def remove_replaced(index: AnyPlace, replaced: Replaced, files: Collection[str]) -> None:
    """Removes the files that a new index has replaced, and those that killed saves have left; logs failures.

    Args:
        index: the new index
        replaced: what its commit has found
        files: the files that the new index names
    """
    before = {} if replaced.before is None else replaced.before.files
    old = before.keys() - set(files)
    if old:
        leftovers.remove(index.parent, old)
    kept = {*files, *old}
    leftovers.remove_leftovers(index.parent, replaced.now, kept, lambda: set(files_of(index).files), replaced.listed)


def remove_index(index: AnyPlace, expected: Commit) -> bool:
    """Removes an index, if it is still the one whose commit is ``expected``; returns whether it did.

    Stores do not remove on a condition: there, an index that a save puts in its place right after the look is removed.

    Raises:
        TensorferryError: it cannot be read or removed, or another process keeps the folder locked
    """
    store = store_of(index.parent)
    with store.locked():
        if files_of(index) != expected:
            return False
        reached("checked", index)
        store.remove([index.name])
    return True


def reached(moment: str, index: AnyPlace) -> None:
    """Does nothing: by replacing this function, tests make something happen between two steps of a commit.

    Args:
        moment: what has just happened: ``written`` (the new index is on the disk under another name; not in a store),
            ``checked`` (the folder, if it is one, is locked, and the old index may be replaced or removed), ``renamed``
            (the folder is not locked any more)
        index: the path of the index
    """
