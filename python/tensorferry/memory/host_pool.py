"""Host memory for copies of a state and for bytes on their way to an accelerator, and pools that keep it for reuse.

It is kept because pinning memory costs far more than filling it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

from .._fork import ForkSafeLock
from .accelerator import Accelerator
from .tensors import pageable

logger = logging.getLogger("tensorferry")

_T = TypeVar("_T")

#: A kept buffer is reused if it is at most this many times larger than the requested size.
_SLACK = 1.25
#: Held while a thread checks and sets ``Accelerator.refused``, so that only one thread logs the warning.
_warning = ForkSafeLock()


class HostMemory:
    """Allocates host memory: page-locked if possible, pageable otherwise.

    Args:
        accelerator: allocates page-locked memory, from which it copies at full speed. Memory is pageable if there is no
            accelerator, or if the system refuses; one warning in all is logged for refusals. The accelerator is not
            used before the first allocation. With ``None``, all memory is pageable.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator

    def make(self, nbytes: int) -> torch.Tensor:
        """Returns ``nbytes`` bytes of uninitialised memory as a 1-D uint8 tensor.

        Raises:
            SystemRefused: the system refuses it
        """
        pinned = self._pinned(nbytes)
        if pinned is not None:
            return pinned
        with torch.inference_mode(False):
            return pageable(nbytes)

    def make_pinned(self, nbytes: int) -> tuple[int, torch.Tensor] | None:
        """Returns the address and the owner of ``nbytes`` bytes of page-locked memory; ``None`` if there is none.

        This is the form in which ``_native.ArenaPool`` takes memory.
        """
        pinned = self._pinned(nbytes)
        return None if pinned is None else (pinned.data_ptr(), pinned)

    def _pinned(self, nbytes: int) -> torch.Tensor | None:
        # The memory is reused outside of the caller's inference mode, where torch refuses writes to inference tensors.
        with torch.inference_mode(False):
            return self._try_to_pin(nbytes, lambda accelerator: accelerator.pinned(nbytes))

    def _try_to_pin(self, nbytes: int, pin: Callable[[Accelerator], _T]) -> _T | None:
        """Returns what ``pin`` returns; ``None`` without an accelerator, or if the system refuses, now or before."""
        # Read once: another thread may set it to None meanwhile, when its memory is refused.
        accelerator = self._accelerator
        if accelerator is None:
            return None
        try:
            if not accelerator.is_available():
                self._accelerator = None
                return None
            return pin(accelerator)
        except RuntimeError as e:
            self._accelerator = None
            with _warning.held():
                is_first, accelerator.refused = not accelerator.refused, True
            if is_first:
                logger.warning(
                    "cannot pin %d bytes of host memory for checkpoints (%s): copies to and from the accelerator "
                    "will be slower; raise the limit on locked memory (ulimit -l)",
                    nbytes,
                    e,
                )
            return None


class HostPool:
    """Keeps host buffers from one snapshot or receive to the next, without a limit in bytes. It begins empty.

    How much it keeps follows from its use: a buffer for each snapshot or receive that was under way at the same time.
    When none of the kept buffers fits, all of them are dropped. docs/explanation/architecture.md says how it differs
    from ``_native.ArenaPool``.

    Args:
        memory: allocates a buffer if none of the kept ones fits
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._kept: deque[torch.Tensor] = deque()
        #: May be entered again by a signal handler in the same thread: it finds what is left, or nothing.
        self._lock = threading.RLock()
        self._is_open = True

    def take(self, nbytes: int) -> Buffer:
        """Returns a buffer of at least ``nbytes`` bytes; it goes back to the pool when its last reference is gone.

        Raises:
            SystemRefused: as for :meth:`HostMemory.make`
        """
        with self._lock:
            kept = [self._kept.popleft() for _ in range(len(self._kept))]
            fitting = [t for t in kept if nbytes <= t.nbytes <= nbytes * _SLACK + (1 << 20)]
            memory = min(fitting, key=lambda t: t.nbytes) if fitting else None
            # If none fits, all are dropped: a state hardly changes in size, so they will not fit later either.
            if memory is not None and self._is_open:
                self._kept.extend(t for t in kept if t is not memory)
        # What was dropped is given back before more is asked for.
        del kept, fitting
        return Buffer(self, memory if memory is not None else self._memory.make(nbytes))

    def give_back(self, memory: torch.Tensor) -> None:
        """Keeps ``memory`` for reuse; a closed pool drops it.

        It takes no lock: the garbage collector may call it in the middle of :meth:`take`, in the same thread.
        """
        if self._is_open:
            self._kept.append(memory)

    def close(self) -> None:
        """Drops all kept buffers, and from now on those that are given back."""
        with self._lock:
            self._is_open = False
            self._kept.clear()


class Buffer:
    """Memory from a pool, which gets it back when this object is gone. Made by :meth:`HostPool.take`.

    Attributes:
        memory: a 1-D uint8 CPU tensor
        address: where it starts
        sound: whether the memory may be reused; set to false if a device may still read or write it, and then the pool
            does not get it back
    """

    def __init__(self, pool: HostPool, memory: torch.Tensor) -> None:
        self._pool = pool
        self.memory = memory
        self.address = int(memory.data_ptr())
        self.sound = True

    def __del__(self) -> None:
        if self.sound:
            self._pool.give_back(self.memory)
