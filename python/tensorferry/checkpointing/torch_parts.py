"""What is shaped as in torch: ``Stager`` for ``dcp.async_save``, and the base class of checkpointers.

The base classes are torch's where torch has them (from 2.9 on).
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from ..errors import TransportClosed
from ..memory.accelerator import ACCELERATOR
from ..pickles.allowlist import Allowed
from ..state.snapshot import StateSnapshot
from .shared_stager import SharedStager

try:
    from torch.distributed.checkpoint._experimental.checkpointer import Checkpointer
    from torch.distributed.checkpoint._experimental.staging import CheckpointStager as _TorchStager
except ImportError:  # torch 2.8 has none
    _TorchStager = Checkpointer = object

__all__ = ["Checkpointer", "Stager"]


class StagedFuture(Future[Any]):
    """What :meth:`Stager.stage` returns: a future of the staged state, which is built over the shared memory."""

    def __init__(self, snapshot: StateSnapshot) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._building = threading.RLock()
        self._built: Any = None

    def result(self, timeout: float | None = None) -> Any:
        """Returns the staged state, of which no tensor is on an accelerator; each call returns the same one.

        Raises:
            TimeoutError: the copy is not complete within ``timeout`` seconds
            Exception: what the copy has failed with
        """
        super().result(timeout)
        with self._building:
            if self._built is None:
                self._built = self._snapshot.rebuild()
            return self._built

    def complete(self) -> None:
        """Makes the copies off accelerators, and settles the future."""
        try:
            self._snapshot.complete()
        except Exception as e:
            self.set_exception(e)
        else:
            self.set_result(None)


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
        # What writes the state knows what loads will allow, and warns.
        self._stager: SharedStager | None = SharedStager(memory_limit, ACCELERATOR, Allowed(trust=True))

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
        staged = StagedFuture(snapshot)
        staged.set_running_or_notify_cancel()
        if snapshot.is_complete:
            staged.set_result(None)
        else:
            threading.Thread(target=staged.complete, name="tensorferry-stage", daemon=True).start()
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
