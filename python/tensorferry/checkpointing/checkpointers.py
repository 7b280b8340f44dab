"""``SyncCheckpointer`` and ``AsyncCheckpointer``, in the shape of torch's experimental ``Checkpointer``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import _validate
from ..errors import InvalidArgument, TransportClosed
from ..memory.accelerator import ACCELERATOR
from ..memory.staging import HostStager
from ..pickles.allowlist import REFUSED_LATER, Allowed, RefusalWarnings
from ..state.snapshot import StateSnapshot
from ..storage.container import Container
from ..storage.lineage import Lineage
from ..storage.places import AnyPlace, any_place
from .latest import find_latest
from .orders import Options, Order, perform
from .ranks import Ranks
from .saving import Saver
from .shared_stager import SharedStager
from .torch_parts import Checkpointer

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .keeper.client import Keeper


class _Checkpointer(Checkpointer):  # type: ignore[misc]  # mypy does not follow torch
    """What both have in common: loading."""

    _ranks: Ranks
    _allowed: Allowed
    _keeper: Keeper | None = None

    def load(
        self,
        path: str | os.PathLike[str],
        state_dict: dict[str, Any] | None = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
    ) -> Any:
        """Loads a checkpoint: one that a checkpointer of this package has written, or torch's ``CheckpointWriter``.

        Args:
            path: the folder, or a single file
            state_dict: loads only the keys of this state, into its tensors where dtype and layout allow
            default_map_location: where tensors go, as ``torch.load`` has it
            strict: raises if the checkpoint lacks keys of ``state_dict``

        Returns:
            The state: ``state_dict`` if it was given.

        Raises:
            SourceChanged: the ranks have agreed on a save, by :meth:`latest`, that is no longer there; or saves replace
                the checkpoint faster than it can be loaded
            StateMismatch: the checkpoint does not fit into ``state_dict``; nothing was overwritten, unless the message
                says otherwise
            TensorferryError: there is no complete checkpoint, or it is damaged, cannot be read, or names what is not on
                the allow-list; some tensors of ``state_dict`` may have new values
        """
        from . import loading

        save_id = self._agreed_save(path)
        keeper = self._keeper
        prefer = None if keeper is None else partial(keeper.prefer, agreed=save_id)
        state, _ = loading.read(
            path,
            state_dict,
            map_location=default_map_location,
            strict=strict,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            allowed=self._allowed,
            prefer=prefer,
            save_id=save_id,
            timeout=self._timeout,
        )
        if save_id is not None:
            self._agreed = None
        self._ranks.go_on_from(any_place(path, timeout=self._timeout))
        if keeper is not None:
            self._ranks.note_beginning(keeper.newest_loaded)
        return state

    #: How long the requests of a load, or of the search for the newest checkpoint, may take in an object store.
    _timeout: timedelta

    #: The save that the ranks have agreed to load next, and its folder: another rank may have it in memory only.
    _agreed: tuple[AnyPlace, str] | None = None

    def latest(self, path: str | os.PathLike[str]) -> str | None:
        """Returns the newest checkpoint in a folder of checkpoints that all ranks can load, for :meth:`load`.

        All ranks call it, and get the same answer. Besides what is committed on the disk, it finds what the keepers
        hold for every rank. With several ranks, the next :meth:`load` of that path loads this very save on every rank,
        or raises, unless :meth:`save` was called before. With one, it loads what is there then.

        Args:
            path: the folder in which the checkpoints' folders lie

        Returns:
            The path of the checkpoint's folder, ``None`` if there is none.

        Raises:
            InvalidArgument: ``path`` names neither a folder of this machine nor a place in an object store
            TensorferryError: on all ranks, rank 0 finds none as :func:`latest_checkpoint` raises it, and the keepers
                have none
        """
        self._agreed = find_latest(any_place(path, timeout=self._timeout), self._ranks, self._keeper)
        return None if self._agreed is None else str(self._agreed[0])

    def _agreed_save(self, path: str | os.PathLike[str]) -> str | None:
        """Returns the id of the save that all ranks load from ``path`` now; ``None`` where each decides for itself."""
        agreed = self._agreed
        if agreed is None or self._ranks.world_size == 1 or agreed[0] != any_place(path):
            return None
        return agreed[1]


class SyncCheckpointer(_Checkpointer):
    """Saves a state into a folder, and returns when the checkpoint is on the disk and committed.

    Args:
        rank: the rank of this process, by default that of ``torch.distributed``, or 0
        world_size: how many ranks save together, by default as many as ``torch.distributed`` has, or 1
        process_group: the process group in which ranks agree
        threads: threads with which a rank writes; ``None`` chooses by the number of cores
        cached: whether large files are written through the page cache; ``None`` chooses, see ``FileWriter``
        keep_last: how many checkpoints stay of those that this run, and the runs from which it goes on, have saved
            beside each other under names that differ in the step alone, such as ``step-100`` and ``step-200``: the
            oldest others are removed after each commit. It needs ``step=`` in :meth:`save`. ``None`` keeps all
        patience: seconds without a sign of life of another rank after which a save has failed, and of the process that
            writes, then at least 10; in an object store, also seconds in which nothing is sent, and all requests of a
            load or :meth:`latest` may take as long together
        keeper: keeps the states in memory, too, as for :class:`AsyncCheckpointer`: a save then copies the state, as
            there, and waits until it is written
        safe_globals: classes and functions that pickled objects may name in a load, besides the default list
        trust_pickle: lets them name anything

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
        SystemRefused: with ``keeper``, the process that writes cannot be started
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        threads: int | None = None,
        cached: bool | None = None,
        keep_last: int | None = None,
        patience: float = 600.0,
        keeper: str | Keeper | None = None,
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
    ) -> None:
        self._ranks = Ranks(rank, world_size, process_group)
        self._allowed = Allowed(safe_globals, trust_pickle)
        self._options = Options(threads=threads, cached=cached, keep_last=keep_last, patience=patience)
        self._timeout = timedelta(seconds=self._options.patience)
        self._keeper = _connected(keeper)
        self._saver = None
        if self._keeper is not None:
            self._saver = Saver(
                self._ranks, self._options, SharedStager(None, ACCELERATOR, self._allowed), self._keeper
            )
        self._lineage = Lineage()
        self._stager = HostStager(ACCELERATOR)
        self._refusals = RefusalWarnings(self._allowed, REFUSED_LATER)
        self._is_open = True

    def save(self, path: str | os.PathLike[str], state_dict: Any, *, step: int | None = None) -> None:
        """Saves a state.

        Args:
            path: the path of the folder
            state_dict: the state
            step: a number that is saved with the state

        Raises:
            TransportClosed: it was closed
            TensorferryError: the state cannot be saved
        """
        if not self._is_open:
            raise TransportClosed("this checkpointer was closed: make a new one")
        self._agreed = None
        if self._saver is not None:
            self._saver.save(state_dict, path, step)[1].result()
            return
        number = None if step is None else _validate.step_number(step)
        folder = any_place(path, timeout=self._timeout)
        order = Order(folder, self._ranks.new_save(number, folder), self._options)
        perform(order, lambda: self._container(state_dict), self._lineage)

    def _container(self, state: Any) -> Container:
        snapshot = StateSnapshot(state, self._stager, "borrow")
        self._refusals.warn(snapshot.globals)
        snapshot.complete()
        return snapshot.container()

    def close(self) -> None:
        """Releases the memory that is not in use; with ``keeper``, ends the process that writes. Call it again freely.

        Raises:
            Exception: with ``keeper``, the error of a save that was interrupted and has failed; all is closed then
        """
        self._is_open = False
        self._stager.close()
        if self._saver is not None:
            self._saver.close()


class AsyncCheckpointer(_Checkpointer):
    """Saves states while the trainer goes on: it stands still for a copy, and another process writes.

    The copy lies in shared memory, page-locked where there is an accelerator, which is kept from save to save: as much
    as the state has, and as much again if a save begins before the one before it is written. With a keeper, there is
    more: what the keeper holds. A third save waits until the first is written.

    A save is accepted when its first future is done. From then on only the end of the machine, or SIGKILL of the
    process that writes, can stop it: it is written even if the trainer is killed. It can still fail, as for a full disk
    or a rank that has failed, which the second future tells.

    Args:
        rank: as for :class:`SyncCheckpointer`
        world_size: as for :class:`SyncCheckpointer`
        process_group: as for :class:`SyncCheckpointer`
        threads: as for :class:`SyncCheckpointer`
        cached: as for :class:`SyncCheckpointer`
        keep_last: as for :class:`SyncCheckpointer`
        patience: as for :class:`SyncCheckpointer`
        memory_limit: bytes of shared memory that there may be at a time; a save that does not fit waits for an earlier
            one, and is refused if there is none. ``None`` allows what the machine, or the control group of the
            process, has available
        keeper: keeps the states in memory, too: the name of a keeper of this machine, or a :class:`Keeper`
        safe_globals: as for :class:`SyncCheckpointer`
        trust_pickle: as for :class:`SyncCheckpointer`

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
        SystemRefused: the process that writes cannot be started
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        threads: int | None = None,
        cached: bool | None = None,
        keep_last: int | None = None,
        patience: float = 600.0,
        memory_limit: int | None = None,
        keeper: str | Keeper | None = None,
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
    ) -> None:
        self._ranks = Ranks(rank, world_size, process_group)
        self._allowed = Allowed(safe_globals, trust_pickle)
        options = Options(threads=threads, cached=cached, keep_last=keep_last, patience=patience)
        self._timeout = timedelta(seconds=options.patience)
        self._keeper = _connected(keeper)
        self._saver = Saver(self._ranks, options, SharedStager(memory_limit, ACCELERATOR, self._allowed), self._keeper)

    def save(
        self, path: str | os.PathLike[str], state_dict: Any, *, step: int | None = None
    ) -> tuple[Future[None], Future[None]]:
        """Saves a state.

        Args:
            path: the path of the folder
            state_dict: the state
            step: a number that is saved with the state

        Returns:
            Two futures of ``None``. When the first is done, the state may change, and the save is accepted. When the
            second is done, the checkpoint is on the disk, and committed by a rename. A failure is raised by the second
            one, and by the first if that was not done yet. If nobody has read the second one's result, the next call of
            ``save`` logs the failure, and saves, and :meth:`close` raises it.

        Raises:
            InvalidArgument: ``path`` or ``step`` cannot be used; a callback of a future calls it; or a signal
                handler does in the middle of a save
            TransportClosed: it was closed, or the interpreter is exiting
            ForkedProcess: this is a forked child
            TensorferryError: the state cannot be copied
            Exception: what a device reports when it copies
        """
        self._agreed = None
        return self._saver.save(state_dict, path, step)

    def close(self) -> None:
        """Waits for all saves, ends the process that writes, and closes ``keeper``. It may be called again.

        Raises:
            InvalidArgument: a callback of a future calls it
            ForkedProcess: this is a forked child
            Exception: the error of a save that has failed, whose future's result nobody has read; all is closed then
        """
        self._saver.close()


def _connected(keeper: str | Keeper | None) -> Keeper | None:
    """Returns the keeper that the argument ``keeper`` gives, by name or as a connection."""
    if keeper is None:
        return None
    from .keeper.client import Keeper as NodeKeeper

    if isinstance(keeper, NodeKeeper):
        return keeper
    if not isinstance(keeper, str):
        raise InvalidArgument(f"keeper must be the name of a keeper or a Keeper, not {_validate.brief(keeper)}")
    return NodeKeeper(keeper)
