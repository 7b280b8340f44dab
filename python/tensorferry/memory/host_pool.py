"""Host memory for bytes on their way to or from an accelerator.

It is kept and used again: pinning it costs far more than filling it.
"""

from __future__ import annotations

import logging
import threading

import torch

from .accelerator import Accelerator

logger = logging.getLogger("tensorferry")

#: A kept buffer may be this many times larger than what is asked for.
_SLACK = 1.25
#: Held while it is decided who warns.
_warning = threading.Lock()


class HostMemory:
    """Makes host memory.

    Args:
        accelerator: gives page-locked memory, from which it copies at full speed; where there is none, pageable memory,
            and where the system refuses, that. One warning tells so, however much memory is refused to whomever.
            Nothing is asked of it before memory is. ``None``: pageable memory from the beginning.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        """Nothing is made yet."""
        self._accelerator = accelerator

    def make(self, nbytes: int) -> torch.Tensor:
        """Memory of ``nbytes`` bytes, 1-D uint8; what it holds is arbitrary."""
        locked = self._locked(nbytes)
        if locked is not None:
            return locked
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def lend(self, nbytes: int) -> tuple[int, torch.Tensor] | None:
        """Address and owner of page-locked memory of ``nbytes`` bytes; ``None`` where there is none."""
        locked = self._locked(nbytes)
        return None if locked is None else (locked.data_ptr(), locked)

    def _locked(self, nbytes: int) -> torch.Tensor | None:
        # Another thread may be refused meanwhile, and forget it.
        accelerator = self._accelerator
        if accelerator is None:
            return None
        try:
            if not accelerator.is_available():
                self._accelerator = None
                return None
            # Kept memory outlives the mode of who first needs it: torch refuses to write to an inference tensor later.
            with torch.inference_mode(False):
                return accelerator.pinned(nbytes)
        except RuntimeError as e:
            self._accelerator = None
            with _warning:
                told, accelerator.refused = accelerator.refused, True
            if not told:
                logger.warning(
                    "cannot pin %d bytes of host memory for checkpoints (%s): copies to and from the accelerator "
                    "will be slower; raise the limit on locked memory (ulimit -l)",
                    nbytes,
                    e,
                )
            return None


class HostPool:
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

    def __init__(self, pool: HostPool, memory: torch.Tensor) -> None:
        """See :meth:`HostPool.take`."""
        self._pool = pool
        self.memory = memory
        self.sound = True

    def __del__(self) -> None:
        if self.sound:
            self._pool.give_back(self.memory)
