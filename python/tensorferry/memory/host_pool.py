"""Host memory that is kept and used again: pinning it costs far more than filling it."""

from __future__ import annotations

import threading

import torch

from .host_memory import HostMemory

#: A kept buffer may be this many times larger than what is asked for.
_SLACK = 1.25


class Pool:
    """Host buffers that go from one snapshot, or one receive, to the next.

    Args:
        source: makes what is not there yet
    """

    def __init__(self, source: HostMemory) -> None:
        """An empty pool."""
        self._source = source
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._keep = True

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes`` bytes; it comes back when its last reference is gone."""
        with self._lock:
            fitting = [t for t in self._free if nbytes <= t.nbytes <= nbytes * _SLACK + (1 << 20)]
            memory = min(fitting, key=lambda t: t.nbytes) if fitting else None
            # What does not fit will not fit next time either: a state hardly changes in size.
            self._free = [t for t in self._free if fitting and t is not memory]
        return Buffer(self, memory if memory is not None else self._source.make(nbytes))

    def give_back(self, memory: torch.Tensor) -> None:
        """Keeps ``memory`` for who asks next."""
        with self._lock:
            if self._keep:
                self._free.append(memory)

    def close(self) -> None:
        """Keeps nothing from now on."""
        with self._lock:
            self._keep = False
            self._free.clear()


class Buffer:
    """Memory taken from a pool, as a 1-D uint8 CPU tensor; returned when this object is gone.

    Attributes:
        sound: whether it can be used again; not if a device may still write to it
    """

    def __init__(self, pool: Pool, memory: torch.Tensor) -> None:
        """See :meth:`Pool.take`."""
        self._pool = pool
        self.memory = memory
        self.sound = True

    def __del__(self) -> None:
        if self.sound:
            self._pool.give_back(self.memory)
