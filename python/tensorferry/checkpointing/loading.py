"""Loads checkpoints: those of this package's checkpointers, those of torch's ``CheckpointWriter``, and single files.

A checkpoint of ``N`` ranks can be loaded by any number of ranks. A rank takes objects and plain tensors from the file
of its own number, or from that of rank 0 if there is none. A DTensor is taken from that file, too, if its part there is
the part that is wanted; otherwise its values are put together from the files of all ranks (``resharding.py``). Another
number of ranks that takes all of it gets the keys that only other ranks have as well (``union.py``). Only of torch's
``CheckpointWriter``, a rank loads the file of its own number and no other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

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
from ..pickles import torch_archives
from ..pickles.allowlist import Allowed, refuse_unlisted
from ..state import part
from ..state.load import receive, receive_part
from ..storage import foreign
from ..storage.folder import Index, missing_files, read_index
from ..storage.objects.download import local_file
from ..storage.objects.place import ObjectPlace
from ..storage.places import AnyPlace, any_place, begun, place_as_given
from ..storage.settled import ATTEMPTS, is_outdated
from ..storage.whole_files import is_file
from . import other_formats
from .map_location import relocation
from .resharding import Resharding

logger = logging.getLogger("tensorferry")

#: Where a keeper has the state of a rank: takes the checkpoint's path, the rank and how many ranks load.
Prefer = Callable[[str, int, int], "Stored | None"]


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
    save_id: str | None = None,
    timeout: timedelta | None = None,
) -> tuple[Any, list[str]]:
    """Loads a checkpoint.

    Args:
        path: the checkpoint's folder, or a single file: a container (``.safetensors``) or what ``torch.save`` wrote
        state_dict: loads only the keys of this state, at every level of nested dicts, into its tensors; values that
            are no tensors are replaced, lists and tuples without tensors as a whole. Without it, everything is loaded
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
        save_id: the save that all ranks have agreed to load; no other one is loaded from the folder
        timeout: how long all requests to an object store may take together; ``None`` is 10 minutes

    Returns:
        The state, ``state_dict`` itself if it was given; and the paths in ``state_dict`` that the checkpoint lacks,
        which stay as they are.

    Raises:
        IncompleteCheckpoint: there is no complete checkpoint; what is missing is named
        StateMismatch: tensors differ in dtype, shape, kind or part, or have no tensor in their place, lists with
            tensors differ in length, or keys are missing and ``strict`` is set; nothing was overwritten, unless the
            message says that some tensors may have new values. Without ``state_dict``, the states of the ranks
            contradict each other
        CorruptCheckpoint: bytes do not match their checksums. After this error and all others but ``StateMismatch``,
            some tensors of ``state_dict`` may have new values
        SourceChanged: saves have replaced the checkpoint again and again meanwhile, or the folder does not hold the
            save ``save_id``
        ProtocolError: a file is not what it should be
        UnsafePickle: an object is not on the allow-list
        SystemRefused: a file cannot be read, or there is no memory
        InvalidArgument: ``path`` or ``map_location`` cannot be used
        TensorferryError: a store does not answer in time, or refuses
        Exception: what a callable ``map_location`` raises
    """
    loading = _StateLoad(state_dict, map_location, strict, rank, world_size, allowed or Allowed(), threads, save_id)
    place = any_place(path, timeout=timeout)
    unfit: StateMismatch | None = None
    try:
        if prefer is not None and (found := _from_keeper(prefer, str(place), rank, world_size, loading)):
            return found
    except StateMismatch as e:
        # It may be one of placements, which the files of all ranks fit.
        unfit = e
    try:
        return loading.run(begun(place))
    except IncompleteCheckpoint as e:
        if unfit is None:
            raise
        raise unfit from e


def load_file(
    path: str | os.PathLike[str],
    state_dict: Any = None,
    *,
    map_location: Any = None,
    strict: bool = False,
    safe_globals: Iterable[Any] = (),
    trust_pickle: bool = False,
    store_options: Mapping[str, Any] | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Loads a state from a single file.

    That is a rank's file of a checkpoint, what ``curl`` fetched from an ``HTTPTransport``, or what ``torch.save``
    wrote. What came from a server has no checksums in the file, so that damage to it stays unnoticed.

    Args:
        path: the file, or the URL of an object in a store; of ``torch.save``'s, the object is first copied to a folder
            for temporary files
        state_dict: as for ``AsyncCheckpointer.load``
        map_location: likewise
        strict: likewise
        safe_globals: classes and functions that pickled objects may name, besides the default list
        trust_pickle: lets them name anything
        store_options: as for ``tensorferry.dcp.FileReader``
        timeout: likewise

    Returns:
        The state; ``state_dict`` itself if it was given.

    Raises:
        TensorferryError: as for ``AsyncCheckpointer.load``
    """
    allowed = Allowed(safe_globals, trust_pickle)
    loading = _StateLoad(state_dict, map_location, strict, 0, 1, allowed, None)
    file = begun(place_as_given(path, store_options=store_options, timeout=timeout))
    if not is_file(file):
        raise IncompleteCheckpoint(f"{os.fspath(path)}: there is no such file")
    return loading.from_file(file)[0]


def _from_keeper(
    prefer: Prefer, path: str, rank: int, world_size: int, loading: _StateLoad
) -> tuple[Any, list[str]] | None:
    """Loads what a keeper has; ``None`` if it has nothing, or nothing that can be used, which is logged.

    Raises:
        UnsafePickle: an object is not on the allow-list
        InvalidArgument: ``map_location`` cannot be used
        StateMismatch: it does not fit, which is logged as well
    """
    try:
        stored = prefer(path, rank, world_size)
        return None if stored is None else loading.from_container(stored)
    except (UnsafePickle, InvalidArgument):
        raise
    except TensorferryError as e:
        logger.warning(
            "%s is loaded from its folder, because the state in the keeper cannot be used: %s", path, message_of(e)
        )
        if isinstance(e, StateMismatch):
            raise
        return None


@dataclass
class _StateLoad:
    """One load; the attributes are the arguments of :func:`read`."""

    state_dict: Any
    map_location: Any
    strict: bool
    rank: int
    world_size: int
    allowed: Allowed
    threads: int | None
    save_id: str | None = None

    def __post_init__(self) -> None:
        self._relocate = relocation(self.map_location)

    def run(self, path: AnyPlace) -> tuple[Any, list[str]]:
        """Loads the folder or file ``path``, again if saves replace it; returns the state and the missing keys."""
        if (not isinstance(path, ObjectPlace) or path.may_be_file) and is_file(path):
            return self.from_file(path)
        for _ in range(ATTEMPTS):
            try:
                index = read_index(path)
            except IncompleteCheckpoint:
                file = path / f"checkpoint_{self.rank}.pt"
                if self.save_id is None and is_file(file):
                    return self._from_archive(file)
                other_formats.refuse(path)
                raise
            if self.save_id not in (None, index.save_id):
                raise SourceChanged(
                    f"{path} holds another save than the one that latest() has found, which other ranks may load: call "
                    "latest() again on all ranks"
                )
            if (found := self._of_index(path, index)) is not None:
                return found
        raise SourceChanged(f"{path}: saves replace the checkpoint faster than it can be loaded: load again")

    def _of_index(self, path: AnyPlace, index: Index) -> tuple[Any, list[str]] | None:
        """Loads the checkpoint that ``index`` describes; ``None`` if a save has replaced it meanwhile."""
        try:
            if missing := missing_files(path, index):
                raise IncompleteCheckpoint(
                    f"{path} holds an incomplete checkpoint of {index.world_size} ranks: {', '.join(missing)} "
                    "is missing. Load another checkpoint, or restore the file"
                )
            name, header = index.files.get(self.rank, index.files[0])
            stored = Stored.open(path / name, threads=self.threads, header=header)
            resharding = Resharding(path, index, self.rank, self.world_size, self.threads)
            return self.from_container(stored, resharding)
        except (IncompleteCheckpoint, SystemRefused, CorruptCheckpoint) as e:
            if is_outdated(path, index.commit, e):
                return None
            raise

    def from_file(self, path: AnyPlace) -> tuple[Any, list[str]]:
        """Loads a single file."""
        if foreign.is_archive(path):
            return self._from_archive(path)
        stored = Stored.open(path, threads=self.threads, checksums=False)
        foreign.refuse_parts(path, stored)
        if not stored.is_verified:
            logger.warning("%s has no checksums: it is loaded without being verified", path)
        return self.from_container(stored)

    def from_container(self, stored: Stored, resharding: Resharding | None = None) -> tuple[Any, list[str]]:
        """Loads a container, and tensors with other parts by ``resharding``."""
        bounce = BounceBuffers(ACCELERATOR)
        # With resharding, a ShardedTensor of other ranks is replaced by what they have of it.
        allowed = self.allowed if resharding is None else self.allowed.detached()
        try:
            if self.state_dict is None:
                return self._whole_state(stored, resharding, allowed, bounce), []
            kept = () if resharding is None else resharding.plan(self.state_dict, stored)
            relocate = None if self.map_location is None else self._relocate
            found, missing = receive_part(stored, allowed, self.state_dict, bounce, relocate, self.strict, kept)
            if resharding is not None:
                resharding.fill()
            return part.merged(self.state_dict, found, kept), missing
        finally:
            bounce.close()

    def _whole_state(
        self, stored: Stored, resharding: Resharding | None, allowed: Allowed, bounce: BounceBuffers
    ) -> Any:
        """Returns all that a container holds; with resharding, what only other ranks have as well."""

        def read_file(file: Stored, allowed: Allowed) -> Any:
            # Without devices, there is nothing to be done, and with 100,000 tensors that takes long.
            is_placed = self.map_location is not None or b'"devices"' in (file.manifest or b"")
            return receive(file, allowed, None, bounce, self._relocate if is_placed else None)[0]

        state = read_file(stored, allowed)
        if resharding is None:
            return state
        taken: list[int] = []

        def read_rank(rank: int) -> Any:
            taken.append(rank)
            # What this rank has itself is not taken of the others, and may be of any class there.
            return read_file(resharding.open_file(rank), allowed.sparing())

        state = resharding.with_keys_of_all_ranks(state, read_rank)
        if taken:
            refuse_unlisted([state])
        return resharding.with_whole_tensors(state)

    def _from_archive(self, path: AnyPlace) -> tuple[Any, list[str]]:
        """Loads what ``torch.save`` wrote."""
        if isinstance(path, ObjectPlace):
            with local_file(path) as copied:
                return self._of_archive(copied, str(path))
        return self._of_archive(path, str(path))

    def _of_archive(self, path: Path, name: str) -> tuple[Any, list[str]]:
        """Loads the archive ``path``, which messages call ``name``."""
        if self.state_dict is None:
            return torch_archives.load_file(path, self.allowed, self.map_location, name=name), []
        # Its own tensors stay where they are.
        others = "cpu" if self.map_location is None else self.map_location
        # What is not asked for may be of any class.
        state = torch_archives.load_file(path, self.allowed.sparing(), others, name=name)
        return part.fill(self.state_dict, state, self.strict)
