"""Copies of states in memory that other processes can map."""

from __future__ import annotations

from typing import Any

from .. import _validate
from ..memory.accelerator import ACCELERATOR, Accelerator
from ..memory.shared import Budget, SharedHostMemory
from ..memory.staging import HostStager
from ..pickles.allowlist import REFUSED_LATER, Allowed, RefusalWarnings
from ..state.snapshot import StateSnapshot
from .handover import Handover


class SharedStager:
    """Makes snapshots of states in memory that other processes can map.

    Args:
        memory_limit: bytes of shared memory that there may be at a time; ``None`` allows what is available
        accelerator: the accelerators, or a stand-in
        allowed: what a load will allow; globals that it does not are warned of

    Raises:
        InvalidArgument: ``memory_limit`` cannot be used
    """

    def __init__(
        self, memory_limit: int | None = None, accelerator: Accelerator = ACCELERATOR, allowed: Allowed | None = None
    ) -> None:
        if memory_limit is not None:
            _validate.integer("memory_limit", memory_limit, 1)
        self._budget = Budget(memory_limit)
        self._stager = HostStager(
            accelerator,
            pinned=SharedHostMemory(accelerator, self._budget),
            pageable=SharedHostMemory(None, self._budget),
        )
        self._refusals = RefusalWarnings(allowed or Allowed(), REFUSED_LATER)

    @property
    def held(self) -> int:
        """Bytes of shared memory that are used, or kept for the next save."""
        return self._budget.held

    def stage(self, state: Any) -> StateSnapshot:
        """Returns a snapshot; what lies on the host is copied, ``complete`` copies what lies on accelerators.

        Raises:
            NoRoom: there is not enough memory
            SystemRefused: the system refuses memory
            UnsupportedLeaf: a leaf cannot be saved
            InvalidArgument: a graph is being captured on a device that holds a part of the state
        """
        snapshot = StateSnapshot(state, self._stager, "copy")
        self._refusals.warn(snapshot.globals)
        return snapshot

    def handover(self, kind: str, fields: dict[str, Any], snapshot: StateSnapshot) -> Handover:
        """Returns what other processes get of a complete snapshot, which this stager has made."""
        container = snapshot.container()
        buffers = [self._budget.find(buffer.address) for buffer in snapshot.buffers()]
        return Handover(kind, fields, container.rows, container.control, buffers)

    def close(self) -> None:
        """Releases the memory that is not in use."""
        self._stager.close()
