"""Host memory that other processes can map, within a limit, and how much of it this process may still take."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from .._native import SharedBuffer, _available_memory
from .._reentry import CallLock
from ..errors import SystemRefused
from .accelerator import Accelerator
from .host_pool import HostMemory
from .staging import copying_threads


class NoRoom(SystemRefused):
    """More shared memory is needed than the limit or the machine allows."""


class Budget:
    """How much shared memory may exist at a time.

    Args:
        limit: in bytes; ``None`` allows what the machine, and the control group of this process, has available
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._made: weakref.WeakValueDictionary[int, _LockedBuffer] = weakref.WeakValueDictionary()
        self._lock = CallLock("a copy of a state")

    @property
    def held(self) -> int:
        """Bytes of all memory that exists."""
        return sum(len(memory) for memory in self._existing())

    def _existing(self) -> list[_LockedBuffer]:
        # One thread may make memory for the next save while another hands over that of the one before.
        with self._lock.held():
            return list(self._made.values())

    def make(self, nbytes: int) -> _LockedBuffer:
        """Returns ``nbytes`` bytes of new memory, whose pages are there already. One thread at a time calls it.

        Raises:
            NoRoom: the limit would be exceeded, or the machine does not have so much available
            SystemRefused: the system refuses
            InvalidArgument: this thread is in the middle of another call
        """
        held = self.held
        if self._limit is not None and held + nbytes > self._limit:
            raise NoRoom(
                f"a copy of the state needs {nbytes} bytes of shared memory, {held} are held for earlier saves, and "
                f"the limit is {self._limit}: raise memory_limit="
            )
        free = _available_memory()
        if free is not None and nbytes > free:
            raise NoRoom(
                f"a copy of the state needs {nbytes} bytes of shared memory, and this machine, or the control group of "
                f"this process, has {free} available"
            )
        memory = _LockedBuffer(nbytes, threads=copying_threads())
        with self._lock.held():
            self._made[memory.address] = memory
        return memory

    def find(self, address: int) -> SharedBuffer:
        """Returns the memory that starts at ``address``, which somebody keeps alive.

        Raises:
            KeyError: none of this budget starts there
        """
        with self._lock.held():
            return self._made[address]


class SharedHostMemory(HostMemory):
    """Allocates host memory that other processes can map.

    Args:
        accelerator: page-locks it, where the system lets us; ``None`` leaves it pageable
        budget: how much there may be
    """

    def __init__(self, accelerator: Accelerator | None, budget: Budget) -> None:
        super().__init__(accelerator)
        self._budget = budget

    def make(self, nbytes: int) -> torch.Tensor:
        """Returns ``nbytes`` bytes, at least one, as a 1-D uint8 tensor.

        Raises:
            NoRoom: the budget does not allow it
            SystemRefused: the system refuses
        """
        memory = self._budget.make(max(nbytes, 1))

        def lock(accelerator: Accelerator) -> None:
            memory.unlock = accelerator.page_lock(memory.address, len(memory))

        self._try_to_pin(nbytes, lock)
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=torch.uint8)


class _LockedBuffer(SharedBuffer):
    """Shared memory that may be page-locked, and is unlocked before it is unmapped."""

    unlock: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()
