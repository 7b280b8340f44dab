"""Loads checkpoints: those of this package's checkpointers, those of torch's ``CheckpointWriter``, and single files.

A checkpoint of ``N`` ranks can be loaded by any number of ranks. A rank takes objects and plain tensors from the file
of its own number, or from that of rank 0 if there is none. A DTensor is taken from that file, too, if its part there is
the part that is wanted; otherwise its values are put together from the files of all ranks (``resharding.py``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from .._native import Stored
from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InvalidArgument,
    SourceChanged,
    StateMismatch,
    SystemRefused,
    TensorferryError,
    UnsafePickle,
    message_of,
)
from ..memory.accelerator import ACCELERATOR
from ..memory.bounce import BounceBuffers
from ..memory.tensors import storage_key
from ..pickles import torch_archives
from ..pickles.allowlist import Allowed
from ..state import part, tree
from ..state.build import Relocate
from ..state.load import receive, receive_part
from ..storage import folder as folders
from ..storage.commits import is_file
from ..storage.places import place_of
from .resharding import Resharding, check_parts, check_placements

logger = logging.getLogger("tensorferry")

#: Where a keeper has the state of a rank: takes the checkpoint's path, the rank and how many ranks load.
Prefer = Callable[[str, int, int], "Stored | None"]

#: How often a load begins again because a save has replaced the checkpoint meanwhile.
_ATTEMPTS = 5


def load(
    path: str | os.PathLike[str],
    state_dict: Any = None,
    *,
    default_map_location: Any = None,
    strict: bool = False,
    rank: int = 0,
    world_size: int = 1,
    allowed: Allowed | None = None,
    prefer: Prefer | None = None,
    threads: int | None = None,
) -> Any:
    """Like :func:`read`, but returns the state alone."""
    return read(
        path,
        state_dict,
        map_location=default_map_location,
        strict=strict,
        rank=rank,
        world_size=world_size,
        allowed=allowed,
        prefer=prefer,
        threads=threads,
    )[0]


def read(
    path: str | os.PathLike[str],
    state_dict: Any = None,
    *,
    map_location: Any = None,
    strict: bool = False,
    rank: int = 0,
    world_size: int = 1,
    allowed: Allowed | None = None,
    prefer: Prefer | None = None,
    threads: int | None = None,
) -> tuple[Any, list[str]]:
    """Loads a checkpoint.

    Args:
        path: the checkpoint's folder, or a single file: a container (``.safetensors``) or what ``torch.save`` wrote
        state_dict: loads only the keys of this state, at every level of nested dicts, into its tensors; ``None`` in
            place of a value takes whatever is there. Without it, everything is loaded
        map_location: where tensors go, as ``torch.load`` has it: ``None`` restores the device that each was on. With
            ``state_dict``, those of it stay where they are, and ``None`` puts others on the CPU. A
            checkpoint that does not say which device a tensor was on, since an earlier version saved it, counts as one
            of the CPU
        strict: refuses a checkpoint that lacks keys of ``state_dict``
        rank: the rank of this process
        world_size: how many ranks load
        allowed: the globals that pickled objects may name
        prefer: returns the state that a keeper has of this checkpoint and rank, which is used instead of the file
        threads: threads that read; ``None`` chooses by the number of cores

    Returns:
        The state, ``state_dict`` itself if it was given; and the paths in ``state_dict`` that the checkpoint lacks,
        which stay as they are.

    Raises:
        IncompleteCheckpoint: there is no complete checkpoint; what is missing is named
        StateMismatch: values differ in dtype, shape or type, or keys are missing and ``strict`` is set; nothing was
            overwritten
        CorruptCheckpoint: bytes do not match their checksums; some tensors of ``state_dict`` may have new values
        SourceChanged: saves have replaced the checkpoint again and again meanwhile
        ProtocolError: a file is not what it should be
        UnsafePickle: an object is not on the allow-list
        SystemRefused: a file cannot be read, or there is no memory
        InvalidArgument: ``map_location`` cannot be used
    """
    loading = _Loading(state_dict, map_location, strict, rank, world_size, allowed or Allowed(), threads)
    place = place_of(path)
    found = None if prefer is None else _from_keeper(prefer, os.fspath(place), rank, world_size, loading)
    return found or loading.run(place)


def load_file(
    path: str | os.PathLike[str],
    state_dict: Any = None,
    *,
    map_location: Any = None,
    strict: bool = False,
    safe_globals: Iterable[Any] = (),
    trust_pickle: bool = False,
) -> Any:
    """Loads a state from a single file.

    That is a rank's file of a checkpoint, what ``curl`` fetched from an ``HTTPTransport``, or what ``torch.save``
    wrote. What came from a server has no checksums in the file, so that damage to it stays unnoticed.

    Args:
        path: the file
        state_dict: as for ``AsyncCheckpointer.load``
        map_location: likewise
        strict: likewise
        safe_globals: classes and functions that pickled objects may name, besides the default list
        trust_pickle: lets them name anything

    Returns:
        The state; ``state_dict`` itself if it was given.

    Raises:
        TensorferryError: as for ``AsyncCheckpointer.load``
    """
    allowed = Allowed(safe_globals, trust_pickle)
    loading = _Loading(state_dict, map_location, strict, 0, 1, allowed, None)
    if not is_file(Path(path)):
        raise IncompleteCheckpoint(f"{os.fspath(path)}: there is no such file")
    return loading.from_file(Path(path))[0]


def latest_checkpoint(root: str | os.PathLike[str]) -> str | None:
    """Returns the path of the newest complete checkpoint directly below ``root``, or ``None`` if there is none.

    The newest is the one whose save began last, as its index says; times of files and step numbers do not matter. A
    save begins after those of its series, even if the clock has gone back. A folder whose index or one of whose files
    is missing, and a folder of another program, does not count.

    Raises:
        SystemRefused: ``root`` exists and cannot be listed
    """
    found = complete_checkpoints(Path(root))
    return os.fspath(found[-1][0]) if found else None


def complete_checkpoints(root: Path) -> list[tuple[Path, folders.Index]]:
    """Returns the folders directly below ``root`` that are complete checkpoints with all their files, oldest first.

    Raises:
        SystemRefused: ``root`` exists and cannot be listed
    """
    if not os.path.isdir(root):
        return []
    found = []
    before = folders.committed_in(root)
    for _ in range(_ATTEMPTS):
        found = [one for one in folders.checkpoints(root) if not folders.missing_files(*one)]
        # A save that replaced or removed one meanwhile has left none of its files, and committed another one: which may
        # have been looked for before it was there.
        now = folders.committed_in(root)
        if now == before:
            break
        before = now
    return found


def _from_keeper(
    prefer: Prefer, path: str, rank: int, world_size: int, loading: _Loading
) -> tuple[Any, list[str]] | None:
    """Loads what a keeper has; ``None`` if it has nothing, or nothing that can be used."""
    try:
        stored = prefer(path, rank, world_size)
        return None if stored is None else loading.from_container(stored)
    except (UnsafePickle, InvalidArgument):
        raise
    except TensorferryError as e:
        logger.warning(
            "%s is loaded from its folder, because the state in the keeper cannot be used: %s", path, message_of(e)
        )
        return None


def relocation(map_location: Any) -> Relocate | None:
    """Returns what moves a storage in host memory to where ``map_location`` says, ``None`` if they all stay.

    Raises:
        InvalidArgument: it is not a device, a dict or a callable
    """
    known = map_location is None or isinstance(map_location, (str, torch.device, dict))
    if not known and not callable(map_location):
        raise InvalidArgument(
            f"map_location must be a device, its name, a dict or a callable, not a {type(map_location).__name__}"
        )
    if isinstance(map_location, (str, torch.device)):
        try:
            if torch.device(map_location).type == "cpu":
                return None
        except RuntimeError as e:
            raise InvalidArgument(f"map_location {map_location!r} is not a device: {e}") from e
    restore = torch.serialization._get_restore_location(map_location)

    def relocate(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        if map_location is None and location == "cpu":
            return storage
        try:
            moved = restore(storage, location)
        except (RuntimeError, AssertionError) as e:
            if not known:
                raise
            where = repr(location) if map_location is None else f"{map_location!r} (it was on {location!r})"
            raise InvalidArgument(
                f"map_location: a tensor cannot be put on {where}: {e}. Pass another default_map_location, such as "
                '"cpu"'
            ) from e
        return getattr(moved, "_untyped_storage", moved)

    return relocate


class _Loading:
    """One load; the arguments are those of :func:`read`."""

    def __init__(
        self,
        state_dict: Any,
        map_location: Any,
        strict: bool,
        rank: int,
        world_size: int,
        allowed: Allowed,
        threads: int | None,
    ) -> None:
        self._asking = state_dict
        self._map_location = map_location
        self._relocate = relocation(map_location)
        self._strict = strict
        self._rank, self._world_size = rank, world_size
        self._allowed = allowed
        self._threads = threads

    def run(self, path: Path) -> tuple[Any, list[str]]:
        if is_file(path):
            return self.from_file(path)
        for _ in range(_ATTEMPTS):
            try:
                index = folders.read_index(path)
            except IncompleteCheckpoint:
                file = path / f"checkpoint_{self._rank}.pt"
                if is_file(file):
                    return self._from_archive(file)
                raise
            if (found := self._of_index(path, index)) is not None:
                return found
        raise SourceChanged(f"{path}: saves replace the checkpoint faster than it can be loaded: load again")

    def _of_index(self, path: Path, index: folders.Index) -> tuple[Any, list[str]] | None:
        """Loads the checkpoint that ``index`` describes; ``None`` if a save has replaced it meanwhile."""
        try:
            if missing := folders.missing_files(path, index):
                raise IncompleteCheckpoint(
                    f"{path} holds an incomplete checkpoint of {index.world_size} ranks: {', '.join(missing)} "
                    "is missing. Load another checkpoint, or restore the file"
                )
            name, header = index.files.get(self._rank, index.files[0])
            stored = Stored.open(path / name, threads=self._threads, header=header)
            resharding = Resharding(path, index, self._rank, self._world_size, self._threads)
            return self.from_container(stored, resharding)
        except (IncompleteCheckpoint, SystemRefused, CorruptCheckpoint) as e:
            if (committed := folders.committed_save(path)) not in (None, index.save_id):
                return None
            if isinstance(e, SystemRefused) and (committed is None or folders.missing_files(path, index)):
                raise IncompleteCheckpoint(f"{path} was removed while it was loaded: {e}") from e
            raise

    def from_file(self, path: Path) -> tuple[Any, list[str]]:
        """Loads a single file."""
        try:
            with path.open("rb") as file:
                is_archive = file.read(4) == b"PK\x03\x04"
        except OSError as e:
            raise SystemRefused(e.errno, f"{path}: cannot be read: {e.strerror}") from e
        if is_archive:
            return self._from_archive(path)
        stored = Stored.open(path, threads=self._threads, checksums=False)
        if not stored.is_verified:
            logger.warning("%s has no checksums: it is loaded without being verified", path)
        return self.from_container(stored)

    def from_container(self, stored: Stored, resharding: Resharding | None = None) -> tuple[Any, list[str]]:
        """Loads a container, and tensors with other parts by ``resharding``."""
        bounce = BounceBuffers(ACCELERATOR)
        # With resharding, a ShardedTensor of other ranks is replaced by what they have of it.
        allowed = self._allowed if resharding is None else self._allowed.detached()
        relocate = self._relocate
        # Without devices, there is nothing to be done, and with 100,000 tensors that takes long.
        if self._map_location is None and (self._asking is not None or b'"devices"' not in (stored.manifest or b"")):
            relocate = None
        try:
            if self._asking is None:
                state, _, _ = receive(stored, allowed, None, bounce, relocate)
                return (state if resharding is None else resharding.gathered(state)), []
            if resharding is None:
                check_parts(stored, self._asking)
            kept = None if resharding is None else resharding.plan(self._asking)
            found, missing = receive_part(stored, allowed, self._asking, bounce, relocate, self._strict, kept)
            if resharding is not None:
                resharding.fill()
            return part.merged(self._asking, found, kept), missing
        finally:
            bounce.close()

    def _from_archive(self, path: Path) -> tuple[Any, list[str]]:
        """Loads what ``torch.save`` wrote."""
        if self._asking is None:
            return torch_archives.load_file(path, self._allowed, self._map_location), []
        wanted = self._records(path)

        def stand_in(name: str, nbytes: int) -> torch.Tensor | None:
            return None if wanted is None or name in wanted else _untouched(nbytes)

        state = torch_archives.load_file(path, self._allowed, self._map_location, stand_in)
        check_placements(state, self._asking)
        return part.fill(self._asking, state, self._strict)

    def _records(self, path: Path) -> set[str] | None:
        """Returns the names of the records of an archive that are needed; ``None`` if that cannot be found out."""
        names: dict[int, str] = {}
        held = []

        def stand_in(name: str, nbytes: int) -> torch.Tensor:
            held.append(_untouched(nbytes))
            names[storage_key(held[-1].untyped_storage())] = name
            return held[-1]

        try:
            state = torch_archives.load_file(path, self._allowed, _here, stand_in)
            flat = tree.flatten(state)
            chosen = part.Part(flat.tree, flat.objects, self._asking, self._strict)
            needed = part.storages_of(
                [flat.plain[n] for n in chosen.leaves] + [flat.objects[n] for n in chosen.objects]
            )
        except (StateMismatch, SystemRefused):
            raise
        except Exception:  # What is built of no values may be refused for them: then all of it is read.
            logger.debug("%s is read whole", path, exc_info=True)
            return None
        return {names[key] for key in needed if key in names}


def _here(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
    """The ``map_location`` that leaves storages where they are."""
    return storage


def _untouched(nbytes: int) -> torch.Tensor:
    """Returns memory to which nothing is written: it takes no pages."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(torch.UntypedStorage(nbytes))
