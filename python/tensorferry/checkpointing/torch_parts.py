"""Parts that torch's own experimental checkpointers take, and ``dcp.async_save``: stager, writer and process.

Their base classes are torch's where torch has them (from 2.9 on).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeAlias, overload

from .. import _validate
from .._reentry import CallLock
from ..errors import InvalidArgument, TransportClosed
from ..memory.accelerator import ACCELERATOR
from ..memory.staging import HostStager
from ..pickles.allowlist import REFUSED_LATER, Allowed, RefusalWarnings
from ..state.snapshot import StateSnapshot
from ..storage.container import Container
from ..storage.places import any_place
from .futures import Staged
from .keepers import StateKeeper
from .orders import Options, Order, perform
from .ranks import Ranks
from .saving import Saver
from .shared_stager import SharedStager

try:
    from torch.distributed.checkpoint._experimental.checkpoint_process import CheckpointProcess as _TorchProcess
    from torch.distributed.checkpoint._experimental.checkpoint_writer import CheckpointWriter as _TorchWriter
    from torch.distributed.checkpoint._experimental.checkpointer import Checkpointer
    from torch.distributed.checkpoint._experimental.staging import CheckpointStager as _TorchStager
except ImportError:  # torch 2.8 has none
    _TorchProcess = _TorchWriter = _TorchStager = Checkpointer = object

__all__ = ["CheckpointProcess", "CheckpointWriter", "Checkpointer", "Stager", "state_and_path"]


StrPath: TypeAlias = str | os.PathLike[str]


def state_and_path(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Tells path and state apart, which are given by position in either order, or by name.

    Returns:
        The path, the state, and the other keyword arguments.

    Raises:
        InvalidArgument: they cannot be told apart
        TypeError: one is missing, or there are too many
    """
    given = [*args]
    options = dict(kwargs)
    named = {key: options.pop(key) for key in ("path", "state_dict") if key in options}
    if len(given) + len(named) != 2:
        raise TypeError(f"{name}() takes a path and a state, not {len(given) + len(named)} arguments")
    if not named:
        paths = [isinstance(value, (str, os.PathLike)) for value in given]
        if paths[0] == paths[1]:
            raise InvalidArgument(
                f"{name}() cannot tell path and state apart: {_validate.brief(given[0])} and "
                f"{_validate.brief(given[1])}; pass them as path= and state_dict="
            )
        path, state = given if paths[0] else reversed(given)
        return path, state, options
    if "path" not in named:
        named["path"] = given.pop()
    if "state_dict" not in named:
        named["state_dict"] = given.pop()
    return named["path"], named["state_dict"], options


class StagedFuture(Staged):
    """What :meth:`Stager.stage` returns: a future of the staged state.

    A process of this package takes the snapshot; for all others the state is built, over the shared memory.
    """

    def __init__(self, snapshot: StateSnapshot, stager: SharedStager) -> None:
        super().__init__(snapshot, stager)
        self._building = CallLock("the result of a staged state")
        self._built: Any = None

    def result(self, timeout: float | None = None) -> Any:
        """Returns the staged state, of which no tensor is on an accelerator; each call returns the same one.

        Raises:
            TimeoutError: the copy is not complete within ``timeout`` seconds
            InvalidArgument: it is called in the middle of such a call of the same thread
            Exception: what the copy has failed with
        """
        super().result(timeout)
        with self._building.held():
            if self._built is None:
                self._built = self.snapshot.rebuild()
            return self._built


class Stager(_TorchStager):  # type: ignore[misc]  # mypy does not follow torch
    """Stages states in shared memory: torch's ``CheckpointStager``, and the ``AsyncStager`` of ``dcp.async_save``.

    Args:
        memory_limit: bytes of shared memory that there may be at a time; a state that does not fit is refused at once.
            ``None`` is as for ``AsyncCheckpointer``

    Raises:
        InvalidArgument: the limit cannot be used
    """

    #: What ``dcp.async_save`` asks for: it has nothing to wait for behind ``stage``.
    _synchronize_after_execute = False

    def __init__(self, memory_limit: int | None = None) -> None:
        self._stager: SharedStager | None = SharedStager(memory_limit, ACCELERATOR)

    def stage(self, state_dict: Any, **kwargs: Any) -> StagedFuture:
        """Copies a state.

        Args:
            state_dict: the state
            kwargs: what torch hands on to all parts; not used

        Returns:
            A future, which is done when the state may change. Its result is the state, whose tensors lie in shared
            memory that is not used for anything else while one of them exists.

        Raises:
            TransportClosed: it was closed
            TensorferryError: the state cannot be copied, for want of memory for example
        """
        del kwargs
        if self._stager is None:
            raise TransportClosed("this stager was closed: make a new one")
        snapshot = self._stager.stage(state_dict)
        staged = StagedFuture(snapshot, self._stager)
        staged.set_running_or_notify_cancel()
        if snapshot.is_complete:
            staged.set_result(None)
        else:
            threading.Thread(target=_complete, args=(staged,), name="tensorferry-stage", daemon=True).start()
        return staged

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: the future that ``stage`` returns says when the state may change."""
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Does nothing: the future that ``stage`` returns says when the state may change."""

    def close(self) -> None:
        """Releases the memory that is not in use."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def _complete(staged: StagedFuture) -> None:
    """Makes the copies off accelerators, and settles the future."""
    try:
        staged.snapshot.complete()
    except Exception as e:
        staged.set_exception(e)
    else:
        staged.set_result(None)


class CheckpointProcess(_TorchProcess):  # type: ignore[misc]  # mypy does not follow torch
    """The process that writes, for torch's ``AsyncCheckpointer(checkpoint_process=...)``.

    It takes what :class:`Stager` stages as it is, and stages other states itself.

    Args:
        rank_info: torch's ``RankInfo``; by default that of ``torch.distributed``
        agree: as for ``SyncCheckpointer``
        process_group: as for ``AsyncCheckpointer``
        threads: as for ``AsyncCheckpointer``
        cached: as for ``AsyncCheckpointer``
        keep_last: as for ``AsyncCheckpointer``
        patience: as for ``AsyncCheckpointer``
        memory_limit: as for ``AsyncCheckpointer``, for the states that it stages itself
        keeper: as for ``AsyncCheckpointer``

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
        SystemRefused: the process cannot be started
    """

    def __init__(
        self,
        rank_info: Any = None,
        *,
        agree: Callable[[Any], Any] | None = None,
        process_group: Any = None,
        threads: int | None = None,
        cached: bool | None = None,
        keep_last: int | None = None,
        patience: float = 600.0,
        memory_limit: int | None = None,
        keeper: StateKeeper | None = None,
    ) -> None:
        ranks = _ranks(rank_info, agree, process_group)
        options = Options(threads=threads, cached=cached, keep_last=keep_last, patience=patience)
        self._saver = Saver(ranks, options, SharedStager(memory_limit, ACCELERATOR), keeper)

    @overload
    def write(self, state_dict: Any, path: StrPath, *, step: int | None = None, **kwargs: Any) -> Future[None]: ...
    @overload
    def write(self, path: StrPath, state_dict: Any, *, step: int | None = None, **kwargs: Any) -> Future[None]: ...
    def write(self, *args: Any, step: int | None = None, **kwargs: Any) -> Future[None]:
        """Writes a staged state: ``write(state_dict, path)`` or ``write(path, state_dict)``.

        Args:
            args: the path of the folder, and a state, a future of one, which is waited for, or what a ``Stager``
                returned
            step: a number that is saved with the state
            kwargs: ``path`` and ``state_dict``; others, which torch hands on to all parts, are not used

        Returns:
            A future of ``None``, done when the checkpoint is on the disk and committed.

        Raises:
            TensorferryError: as ``AsyncCheckpointer.save``
            TypeError: path or state is missing
            Exception: what a future of a state raises
        """
        path, state, _ = state_and_path("write", args, kwargs)
        if isinstance(state, StagedFuture):
            return self._saver.write_staged(state, path, step)
        return self._saver.save(state.result() if isinstance(state, Future) else state, path, step)[1]

    def close(self) -> None:
        """Waits for all saves, ends the process, and closes the keeper.

        Raises:
            InvalidArgument: a callback of a future calls it while another save is unfinished
            Exception: the error of a save that has failed, whose future's result nobody has read
        """
        self._saver.close()


class CheckpointWriter(_TorchWriter):  # type: ignore[misc]  # mypy does not follow torch
    """Writes states in the calling process, for torch's ``SyncCheckpointer(writer=...)``.

    Args:
        config: torch's ``CheckpointWriterConfig``, of which ``write_barrier_timeout_secs`` is used
        rank_info: torch's ``RankInfo``; by default that of ``torch.distributed``
        barrier: torch's ``Barrier``, executed when this rank's file is written
        commit_hook: torch's ``WriterHook``
        ranks: instead of ``rank_info``
        options: how states are written; then ``config`` is not used
        allowed: what a load will allow; globals that it does not are warned of

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self,
        config: Any = None,
        rank_info: Any = None,
        barrier: Any = None,
        commit_hook: Any = None,
        *,
        ranks: Ranks | None = None,
        options: Options | None = None,
        allowed: Allowed | None = None,
    ) -> None:
        self._ranks = ranks or _ranks(rank_info, None, None)
        if options is None:
            patience = 600.0 if config is None else float(config.write_barrier_timeout_secs)
            options = Options(patience=patience)
        self._options = options
        self._barrier, self._commit_hook = barrier, commit_hook
        self._stager = HostStager(ACCELERATOR)
        self._refusals = RefusalWarnings(allowed or Allowed(), REFUSED_LATER)

    @overload
    def write(self, path: StrPath, state_dict: Any, **kwargs: Any) -> None: ...
    @overload
    def write(self, state_dict: Any, path: StrPath, **kwargs: Any) -> None: ...
    def write(self, *args: Any, **kwargs: Any) -> None:
        """Writes a state and commits the checkpoint with the other ranks.

        In torch's order: the file of this rank, ``pre_commit`` of the hook, the barrier, the commit, ``post_commit``.

        Args:
            args: the path of the folder and the state, in either order
            kwargs: ``path`` and ``state_dict``; ``step``, a number that is saved with the state; all others, and
                ``step``, go to the hook

        Raises:
            InvalidArgument: what is the path and what the state cannot be told apart
            TypeError: one of them is missing
            TensorferryError: the state cannot be saved
            Exception: what the hook or the barrier raises; the checkpoint is committed if that was ``post_commit``
        """
        path, state, options = state_and_path("write", args, kwargs)
        step = None if (given := options.get("step")) is None else _validate.step_number(given)
        folder = any_place(path, timeout=timedelta(seconds=self._options.patience))
        perform(
            Order(folder, self._ranks.new_save(step, folder), self._options),
            lambda: self._container(state),
            lambda: self._before_commit(path, options),
            leaves_folder=True,
        )
        if self._commit_hook is not None:
            self._commit_hook.post_commit(path, **options)

    def _container(self, state: Any) -> Container:
        snapshot = StateSnapshot(state, self._stager, "borrow")
        self._refusals.warn(snapshot.globals)
        snapshot.complete()
        return snapshot.container()

    def _before_commit(self, path: Any, options: dict[str, Any]) -> None:
        """Runs what torch runs between a rank's write and the commit: ``pre_commit`` of the hook, then the barrier."""
        if self._commit_hook is not None:
            self._commit_hook.pre_commit(path, **options)
        if self._barrier is not None:
            self._barrier.execute_barrier()

    def close(self) -> None:
        """Releases the memory that is not in use."""
        self._stager.close()


def _ranks(rank_info: Any, agree: Callable[[Any], Any] | None, group: Any) -> Ranks:
    if rank_info is None:
        return Ranks(agree=agree, group=group)
    return Ranks(rank_info.global_rank, rank_info.global_world_size, agree, group)
