"""Page-locked host memory of exactly the size that is asked for.

torch's own allocator of such memory rounds up to a power of two: a state of 5 GiB would hold 8 GiB that nobody else can
use. So where the CUDA runtime (or ROCm's, under the same names) can lock memory that is there already, it is mapped and
locked here.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Any

import torch

#: ``cudaHostRegisterPortable``: locked for all devices of the process.
_PORTABLE = 1


def locked(nbytes: int) -> torch.Tensor:
    """Page-locked host memory, 1-D uint8 of ``nbytes`` bytes; unlocked when its storage is gone.

    Raises:
        RuntimeError: the system refuses
    """
    if nbytes and torch.cuda.is_available():
        with contextlib.suppress(_Refused):
            return torch.frombuffer(_Locked.of(nbytes), dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class _Refused(Exception):
    """The runtime does not lock memory that it did not make."""


class _Locked(mmap.mmap):
    """Zeros of this process alone, locked, and unlocked before they are unmapped."""

    _address = 0

    @classmethod
    def of(cls, nbytes: int) -> _Locked:
        memory = cls(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # As with the memory CUDA makes: after a fork one side's pages would no longer be those a device was told of.
        memory.madvise(mmap.MADV_DONTFORK)
        # Advice, which a kernel without huge pages refuses: fewer pages are locked faster.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        if int(_cudart().cudaHostRegister(address, nbytes, _PORTABLE)):
            _forget_failure()
            raise _Refused
        memory._address = address
        return memory

    def __del__(self) -> None:
        # While the interpreter exits, the memory goes with the process.
        if self._address and not sys.is_finalizing():
            _cudart().cudaHostUnregister(self._address)


def _cudart() -> Any:
    return torch.cuda.cudart()


def _forget_failure() -> None:
    """The runtime keeps its last error for whoever asks next: better a kernel that nobody needs than the trainer's."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
