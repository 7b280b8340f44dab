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

    def stage(self, state_dict: Any, **kwargs: Any) -> Future[Any]:
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
        staged: Future[Any] = Future()
        staged.set_running_or_notify_cancel()
        if snapshot.is_complete:
            _settle(staged, snapshot)
        else:
            threading.Thread(target=_settle, args=(staged, snapshot), name="tensorferry-stage", daemon=True).start()
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


def _settle(staged: Future[Any], snapshot: StateSnapshot) -> None:
    """Makes the copies off accelerators, and builds the state over them."""
    try:
        snapshot.complete()
        staged.set_result(snapshot.rebuild())
    except Exception as e:
        staged.set_exception(e)
