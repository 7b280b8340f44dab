"""Which checkpoints ``keep_last`` counts and removes: those of one lineage, the runs that go on from each other.

The id of the lineage is in the index of each checkpoint. A run takes it over from the checkpoint that it has loaded,
for what it saves beside that one; else from the newest checkpoint beside its first one whose name differs in the step
alone, as both indexes record it; else it is the first of a lineage. Checkpoints of other lineages, and those whose
names differ in anything but the step, are another job's.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..errors import IncompleteCheckpoint, SystemRefused, TensorferryError
from . import commits, leftovers
from .commits import Commit
from .folder import INDEX
from .folder_save import SaveId
from .names import BEGINNINGS, is_ours
from .objects.place import ObjectPlace
from .places import AnyPlace, begun
from .series import at_once, index_versions, read_indexes
from .whole_files import is_file, listed, remove_empty, subfolders

logger = logging.getLogger("tensorferry")

_NUMBER = re.compile("([0-9]+)")
#: Seconds that a store may take to show earlier checkpoints, while the other ranks wait; less if they do not wait long.
_LOOK_S = 60.0


class Lineage:
    """What a process knows of the lineage of its saves; it looks for earlier ones once, before its first save."""

    def __init__(self) -> None:
        self._id: str | None = None
        #: By folder what the index says; ``None`` for a save that was not committed.
        self._saves: dict[AnyPlace, Commit | None] = {}
        self._last: AnyPlace | None = None
        self._names: re.Pattern[str] | None = None
        self._looked: set[tuple[AnyPlace, re.Pattern[str]]] = set()
        self._is_warned = False

    def begin(self, folder: AnyPlace, save: SaveId, keep_last: int | None) -> SaveId:
        """Returns ``save``, which rank 0 is about to begin, as the newest of its lineage; raises nothing.

        Args:
            folder: the folder of the checkpoint
            save: the save; it has the lineage of the checkpoint that the run has loaded, if any
            keep_last: how many checkpoints stay; ``None`` keeps all, and looks for none
        """
        if save.lineage not in (None, self._id):
            self._id, self._saves, self._looked = save.lineage, {}, set()
        if keep_last is not None:
            self._names = self._names_of_steps(folder, save.step)
            if self._names is not None and (folder.parent, self._names) not in self._looked:
                self._looked.add((folder.parent, self._names))
                self._look(folder, save.step, self._names)
            self._last = folder
            self._saves.setdefault(folder, None)
        self._id = self._id or secrets.token_hex(6)
        known = [found.began for found in self._saves.values() if found is not None]
        return replace(save, lineage=self._id, began=max([save.began, *(began + 1 for began in known)]))

    def keep_last(self, count: int, newest: AnyPlace, commit: Commit) -> None:
        """Removes the oldest checkpoints but the last ``count``, and what saves have left that were not committed.

        The oldest are those whose saves began first: a job that has gone back to an earlier step goes on from what it
        saves then. It raises nothing, since the checkpoint that was just saved is complete: what cannot be removed is
        logged.

        Args:
            count: how many stay
            newest: the folder of the checkpoint that was just saved; it stays
            commit: what its index says
        """
        self._saves[newest] = commit
        names = self._names
        if names is None:
            return
        newest = begun(newest)
        committed: list[tuple[int, str, Commit]] = []
        uncommitted: list[AnyPlace] = []
        for folder, found in list(self._saves.items()):
            if folder.parent == newest.parent and names.fullmatch(folder.name) and not _is_link(folder):
                if found is None:
                    uncommitted.append(newest.parent / folder.name)
                elif folder == newest or _is_of_step(folder, found, commit.step, names):
                    committed.append((found.began, folder.name, found))
        for _, name, found in sorted(committed, key=lambda one: one[:2])[:-count]:
            if name == newest.name:
                # Another process of this lineage has saved what began after it.
                break
            if remove_checkpoint(newest.parent / name, found):
                del self._saves[newest.parent / name]
        if uncommitted:
            with contextlib.suppress(OSError, TensorferryError):
                now = (newest / INDEX).stat().st_mtime
                for folder, is_gone in zip(uncommitted, at_once(uncommitted, partial(_clear, now=now)), strict=True):
                    if is_gone:
                        del self._saves[folder]

    def _names_of_steps(self, folder: AnyPlace, step: int | None) -> re.Pattern[str] | None:
        """Returns which names differ from that of ``folder`` in the step alone; ``None`` if that cannot be told.

        The step is the last number in the name that is ``step``; without one, the number in which the name differs
        from that of the last save of this process.
        """
        pieces, last = _NUMBER.split(folder.name), [] if self._last is None else _NUMBER.split(self._last.name)
        places: list[int] = []
        if step is not None:
            places = [n for n in range(1, len(pieces), 2) if int(pieces[n]) == step][-1:]
            if not places:
                self._warn("keep_last removes nothing beside %s: its name does not have the step %d", folder, step)
        elif self._last is not None and self._last.parent == folder.parent and len(last) == len(pieces):
            places = [n for n, piece in enumerate(pieces) if piece != last[n]]
        if len(places) != 1 or places[0] % 2 == 0:
            return None
        before, after = "".join(pieces[: places[0]]), "".join(pieces[places[0] + 1 :])
        return re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}")

    def _look(self, folder: AnyPlace, step: int | None, names: re.Pattern[str]) -> None:
        """Looks for the saves beside ``folder``; a run without a lineage takes over that of the newest checkpoint."""
        if isinstance(folder, ObjectPlace):
            folder = folder.begun(min(_LOOK_S, folder.timeout / 4))
        try:
            beside = [one for one in _folders_beside(folder) if names.fullmatch(one.name)]
            found = dict(read_indexes(index_versions(beside), lambda one: commits.files_of(one / INDEX)))
        except (OSError, TensorferryError) as e:
            logger.warning("keep_last does not remove what earlier runs have saved beside %s: %s", folder, e)
            return
        earlier = {
            one: commit
            for one, commit in found.items()
            if commit.lineage is not None and _is_of_step(one, commit, step, names)
        }
        if self._id is None and step is not None and earlier:
            self._id = max(earlier.values(), key=lambda commit: commit.began).lineage
        self._saves |= {one: commit for one, commit in earlier.items() if commit.lineage == self._id}
        for one in beside:
            if one not in found:
                self._saves.setdefault(one, None)
        if others := sorted(one.name for one in found if one not in self._saves and one != folder):
            self._warn(
                "keep_last does not remove %d checkpoints beside %s, such as %s: this run has neither saved them nor "
                "gone on from them. Load the newest one before the first save, and pass its step to each save",
                len(others),
                folder,
                others[0],
            )

    def _warn(self, text: str, *values: object) -> None:
        """Says once what is not removed."""
        if not self._is_warned:
            self._is_warned = True
            logger.warning(text, *values)


def _is_of_step(folder: AnyPlace, commit: Commit, step: int | None, names: re.Pattern[str]) -> bool:
    """Whether the number in a folder's name is the step of its save, as it is in that of a save of ``step``."""
    found = names.fullmatch(folder.name)
    if commit.step is None:
        return step is None
    return found is not None and int(found[1]) == commit.step


def _is_link(folder: AnyPlace) -> bool:
    """Whether a folder is a link: what it leads to may be another job's."""
    return isinstance(folder, Path) and folder.is_symlink()


def _folders_beside(folder: AnyPlace) -> list[AnyPlace]:
    """Returns the folders beside ``folder``, and it as well; no links."""
    parent = folder.parent
    if isinstance(parent, Path) and not parent.exists():
        return []
    return [parent / name for name in subfolders(parent) if not _is_link(parent / name)]


def remove_checkpoint(folder: AnyPlace, commit: Commit) -> bool:
    """Removes a checkpoint: first its index, so that a removal that is interrupted leaves no checkpoint behind.

    If another save has been committed in the folder since, nothing is removed; in a store, see
    :func:`commits.remove_index`. Files of others stay, and the folder with them. Returns whether the checkpoint is
    gone; what cannot be removed is logged.
    """
    try:
        if commits.remove_index(folder / INDEX, commit):
            leftovers.remove(folder, commit.files)
            remove_empty(folder)
    except TensorferryError as e:
        with contextlib.suppress(TensorferryError):
            if isinstance(e, (SystemRefused, IncompleteCheckpoint)) and not is_file(folder / INDEX):
                return True
        logger.warning("the older checkpoint in %s is not removed: %s", folder, e)
        return False
    return True


def _clear(folder: AnyPlace, now: float) -> bool:
    """Removes what killed saves have left in a folder without an index; returns whether nothing of it is left."""
    try:
        if not _is_remains(listed(folder, *BEGINNINGS)):
            return True
        leftovers.remove_leftovers(folder, now, set(), partial(_spared, folder))
        remove_empty(folder)
        return not _is_remains(listed(folder, *BEGINNINGS))
    except (OSError, TensorferryError):
        return isinstance(folder, Path) and not folder.exists()


def _spared(folder: AnyPlace) -> set[str]:
    """Returns the names of the files that stay: all of them, if the folder has got an index meanwhile."""
    names = listed(folder, *BEGINNINGS)
    return set(names) if any(map(_is_index, names)) else set()


def _is_index(name: str) -> bool:
    return name.startswith("index") and name.endswith(".safetensors")


def _is_remains(names: list[str]) -> bool:
    """Whether a folder holds nothing but files of saves, and no index, by the names in it.

    Ranks that saved with ``torch.distributed.checkpoint`` and without a coordinator have an index each.
    """
    return not any(map(_is_index, names)) and names != [] and all(is_ours(name) for name in names)
