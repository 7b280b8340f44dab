"""Host memory that other processes can map, within a limit, and how much of it this process may still take."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from .._native import SharedBuffer
from .._reentry import CallLock
from ..errors import SystemRefused
from .accelerator import Accelerator
from .host_pool import HostMemory
from .staging import copying_threads

_CGROUPS = Path("/sys/fs/cgroup")
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/proc/self/cgroup")


class NoRoom(SystemRefused):
    """More shared memory is needed than the limit or the machine allows."""


class Budget:
    """How much shared memory may exist at a time.

    Args:
        limit: in bytes; ``None`` allows what the machine, and the control group of this process, has available
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._made: weakref.WeakSet[_Memory] = weakref.WeakSet()
        self._lock = CallLock("a copy of a state")

    @property
    def held(self) -> int:
        """Bytes of all memory that exists."""
        return sum(len(memory) for memory in self._existing())

    def _existing(self) -> list[_Memory]:
        # One thread may make memory for the next save while another hands over that of the one before.
        with self._lock.held():
            return list(self._made)

    def make(self, nbytes: int) -> _Memory:
        """Returns ``nbytes`` bytes of new memory, whose pages are there already.

        Raises:
            NoRoom: the limit would be exceeded, or the machine does not have so much available
        """
        held = self.held
        if self._limit is not None and held + nbytes > self._limit:
            raise NoRoom(
                f"a copy of the state needs {nbytes} bytes of shared memory, {held} are held for earlier saves, and "
                f"the limit is {self._limit}: raise memory_limit="
            )
        free = available()
        if free is not None and nbytes > free:
            raise NoRoom(
                f"a copy of the state needs {nbytes} bytes of shared memory, and this machine, or the control group of "
                f"this process, has {free} available"
            )
        memory = _Memory(nbytes, threads=copying_threads())
        with self._lock.held():
            self._made.add(memory)
        return memory

    def find(self, address: int) -> SharedBuffer:
        """Returns the memory that starts at ``address``."""
        return next(memory for memory in self._existing() if memory.address == address)


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


class _Memory(SharedBuffer):
    """Shared memory that may be page-locked, and is unlocked before it is unmapped."""

    unlock: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def available() -> int | None:
    """Returns how many bytes this process can have before others are swapped out or killed; ``None`` if unknown.

    Shared memory counts towards the control group of whoever touches it first, like any other memory.
    """
    found = [_field(_MEMORY, "MemAvailable:", 1024), *_left_in_groups()]
    known = [nbytes for nbytes in found if nbytes is not None]
    return max(min(known), 0) if known else None


def _left_in_groups() -> list[int | None]:
    left: list[int | None] = []
    try:
        lines = _GROUP.read_text().splitlines()
    except OSError:
        return left
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, most, used, cache = _CGROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, most, used = _CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = root / name.lstrip("/")
        # Inside a container the name may be that outside of it: then the mounted group is the own one.
        for level in (group, *group.parents) if group.is_dir() else (root,):
            if not level.is_relative_to(root):
                break
            limit, now = _number(level / most), _number(level / used)
            if limit is not None and now is not None:
                # Pages of files that nobody uses are taken back before anything else happens.
                left.append(limit - now + (_field(level / "memory.stat", f"{cache} ", 1) or 0))
    return left


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str, unit: int) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line[len(name) :].split()[0]) * unit for line in lines if line.startswith(name)), None)
