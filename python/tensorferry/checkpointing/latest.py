"""The newest checkpoint of a folder: on disk, and for all ranks of a job also in the keepers of their nodes."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InvalidArgument,
    SystemRefused,
    TensorferryError,
    message_of,
)
from ..storage import commits
from ..storage.folder import INDEX, Index, is_of_other_program, missing_files, read_index
from ..storage.objects.place import ObjectPlace
from ..storage.places import AnyPlace, begun, place_as_given
from ..storage.series import index_versions, read_indexes
from ..storage.whole_files import is_file, subfolders
from . import other_formats

if TYPE_CHECKING:
    from .keeper.client import Keeper
    from .ranks import Ranks

logger = logging.getLogger("tensorferry")

#: How many names an error has.
_NAMED = 5
#: How often the folders are listed again because a save has changed them meanwhile.
_ATTEMPTS = 5


def latest_checkpoint(
    root: str | os.PathLike[str],
    *,
    store_options: Mapping[str, Any] | None = None,
    timeout: timedelta | None = None,
) -> str | None:
    """Returns the path of the newest complete checkpoint directly below ``root``, or ``None`` if there is none.

    The newest is the one whose save began last, as its index says; times of files and step numbers do not matter. A
    folder whose index or one of whose files is missing, and a folder of another program, does not count. One whose
    index cannot be read is passed over, with a warning that names it. If there are checkpoints of other formats alone,
    a warning names them.

    Args:
        root: the folder, or a place in an object store
        store_options: as for ``tensorferry.dcp.FileReader``
        timeout: likewise

    Raises:
        CorruptCheckpoint: there is none but such as cannot be read
        SystemRefused: the system does not say what is in ``root``
        InvalidArgument: ``root`` names neither a folder of this machine nor a place in an object store; or it is a
            file, or the folder of a checkpoint itself
        TensorferryError: a store does not answer, or refuses
    """
    place = place_as_given(root, "root", store_options=store_options, timeout=timeout)
    newest = newest_complete(place)
    return None if newest is None else str(newest[0])


def newest_complete(root: AnyPlace, *, are_others: bool = False) -> tuple[AnyPlace, Index] | None:
    """Returns the newest checkpoint directly below ``root`` that has all its files; ``None`` without one.

    What is there instead is logged, or raised.

    Args:
        root: the folder, or a place in an object store
        are_others: there are checkpoints elsewhere, so that nothing is raised for want of one here

    Raises:
        CorruptCheckpoint: there is none but such as have a damaged index
        SystemRefused: the system does not say what is in ``root``, or refuses to read the index of the only one
        InvalidArgument: it is a file, or the folder of a checkpoint itself
        TensorferryError: a store does not answer, or refuses
    """
    root = begun(root)
    if isinstance(root, Path) and not is_folder(root):
        if is_file(root) and not are_others:
            raise InvalidArgument(f"{root} is a file: give the folder above the folders of the checkpoints")
        return None
    newest: tuple[AnyPlace, Index] | None = None
    damaged: dict[AnyPlace, TensorferryError] = {}
    there = _index_versions(root)
    for _ in range(_ATTEMPTS):
        read = read_indexes(there, _read_or_error)
        found = [(folder, index) for folder, index in read if isinstance(index, Index)]
        found.sort(key=lambda one: (one[1].began, one[0].name), reverse=True)
        newest = next((one for one in found if not missing_files(*one)), None)
        # A save that replaced or removed one meanwhile has left none of its files, and committed another one: which may
        # have been looked for before it was there.
        before, there = there, _index_versions(root)
        # One that has been replaced or removed meanwhile says nothing.
        damaged = {
            folder: error
            for folder, error in read
            if isinstance(error, TensorferryError) and there.get(folder) == before[folder]
        }
        if there == before:
            break
    if damaged:
        _tell_damaged(damaged, is_only=newest is None and not are_others)
    elif newest is None and not are_others:
        _tell_nothing(root)
    return newest


def _read_or_error(folder: AnyPlace) -> Index | TensorferryError | None:
    """Returns the index in ``folder``, or why it cannot be read; ``None`` if it is gone, or another program's.

    Raises:
        TensorferryError: a store does not answer, or refuses
    """
    try:
        return read_index(folder)
    except IncompleteCheckpoint:
        return None
    except TensorferryError as e:
        if isinstance(folder, ObjectPlace) and commits.says_nothing(e):
            raise
        return None if is_of_other_program(folder) else e


def _tell_damaged(damaged: Mapping[AnyPlace, TensorferryError], *, is_only: bool) -> None:
    """Warns of the checkpoints whose index cannot be read; raises that if they are the only ones."""
    first, *others = sorted(damaged)
    error = damaged[first]
    more = f", and those in {', '.join(one.name for one in others[:_NAMED])}" if others else ""
    more += f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    if is_only and isinstance(error, SystemRefused):
        raise error
    if is_only:
        raise CorruptCheckpoint(
            f"the index of the checkpoint in {first} cannot be read{more}, and there is no other checkpoint: restore "
            f"it, or move the folder away to begin anew ({message_of(error)})"
        )
    logger.warning(
        "the index of the checkpoint in %s cannot be read%s: passed over (%s)", first, more, message_of(error)
    )


def _tell_nothing(root: AnyPlace) -> None:
    """Tells what ``root`` is, in which no checkpoint is.

    Raises:
        InvalidArgument: it is a checkpoint itself, or an object in a store
    """
    if isinstance(root, ObjectPlace) and root.may_be_file and is_file(root):
        raise InvalidArgument(f"{root} is an object: give the place above the folders of the checkpoints")
    if is_file(root / INDEX) and not is_of_other_program(root):
        raise InvalidArgument(f"{root} is a checkpoint itself: give the folder above it")
    other_formats.log_passed_over(root)


def _index_versions(root: AnyPlace) -> dict[AnyPlace, tuple[object, ...]]:
    return index_versions([root / name for name in subfolders(root)])


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder. A file server that does not answer is no reason to begin anew.

    Raises:
        SystemRefused: the system does not say, for example because a folder above it may not be entered
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        raise SystemRefused(e.errno, f"{path} cannot be examined: {e.strerror}") from e


def find_latest(root: AnyPlace, ranks: Ranks, keeper: Keeper | None) -> tuple[AnyPlace, str] | None:
    """Returns the folder and the id of the newest save below ``root``, on all ranks the same; ``None`` without one.

    A save counts if it is committed on the disk as rank 0 sees it, or if every rank has its snapshot in the keeper of
    its node or a buddy. Ranks agree on the name of the folder below ``root``, which may be a link that leads to
    another place on each node.

    Raises:
        TensorferryError: on all ranks, as :func:`newest_complete` says to rank 0 where nothing is in the keepers
    """
    root = Path(os.path.realpath(root)) if isinstance(root, Path) else root
    own: list[list[Any]] = []
    if keeper is not None and isinstance(root, Path):
        known = keeper.below(root, ranks.rank, ranks.world_size)
        own = [[one.began, Path(one.path).name, one.save_id] for one in known]
    gathered = ranks.gather(own)
    choice: list[Any] | None = None
    if ranks.rank == 0:
        try:
            candidates = _kept_for_all_ranks(gathered)
            if (newest := newest_complete(root, are_others=bool(candidates))) is not None:
                candidates.append([newest[1].began, newest[0].name, newest[1].save_id])
            choice = max(candidates, default=None)
        except TensorferryError as e:
            # The others wait for an answer.
            if ranks.world_size > 1:
                ranks.from_first([None, f"{type(e).__name__}: {e}"])
            raise
    choice = ranks.from_first(choice)
    if choice is not None and choice[0] is None:
        raise TensorferryError(f"rank 0 cannot find the newest checkpoint: {choice[1]}")
    if choice is None:
        return None
    ranks.note_beginning(int(choice[0]))
    return root / choice[1], str(choice[2])


def _kept_for_all_ranks(gathered: Sequence[list[list[Any]]]) -> list[list[Any]]:
    """Returns the saves that each rank has listed."""
    common = set.intersection(*({tuple(one) for one in listed} for listed in gathered))
    return [list(one) for one in common]
