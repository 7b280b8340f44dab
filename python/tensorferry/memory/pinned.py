"""Page-locked host memory of exactly the size that is asked for.

torch's own allocator of such memory rounds up to a power of two: a state of 5 GiB would hold 8 GiB that nobody else can
use. So where the CUDA runtime (or ROCm's, under the same names) can lock memory that is there already, it is mapped and
locked here.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from typing import Any

import torch

#: ``cudaHostRegisterPortable``: locked for all devices of the process.
_PORTABLE = 1


def pinned(nbytes: int) -> torch.Tensor:
    """Page-locked host memory, 1-D uint8 of ``nbytes`` bytes; unlocked when its storage is gone.

    Raises:
        RuntimeError: the system refuses
    """
    if nbytes and torch.cuda.is_available():
        with contextlib.suppress(_Refused):
            return torch.frombuffer(_Pinned.of(nbytes), dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class _Refused(Exception):
    """The runtime does not lock memory that it did not make."""


class _Pinned(mmap.mmap):
    """Zeros of this process alone, locked, and unlocked before they are unmapped."""

    _address = 0
    _device = 0
    _process = 0

    @classmethod
    def of(cls, nbytes: int) -> _Pinned:
        try:
            memory = cls(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # As with the memory CUDA makes: after a fork one side's pages would not be those a device was told of.
            memory.madvise(mmap.MADV_DONTFORK)
        except OSError as e:
            raise RuntimeError(f"cannot map {nbytes} bytes: {e}") from e
        # Advice, which a kernel without huge pages refuses: fewer pages are locked faster.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        device = _device()
        with torch.cuda.device(device):
            if int(_cudart().cudaHostRegister(address, nbytes, _PORTABLE)):
                _forget_failure()
                raise _Refused
        memory._address, memory._device, memory._process = address, device, os.getpid()
        return memory

    def __del__(self) -> None:
        # While the interpreter exits, the memory goes with the process.
        if not self._address or sys.is_finalizing():
            return
        if self._process != os.getpid():
            # A forked child has neither the mapping nor the device. Never unmapped there: what it has mapped since may
            # be at the same address.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        with torch.cuda.device(self._device):
            _cudart().cudaHostUnregister(self._address)


def _cudart() -> Any:
    return torch.cuda.cudart()


def _device() -> int:
    """A device on which this process has a context: this thread's own if it has one there.

    The runtime makes a context, of some hundred megabytes, on whichever device the calling thread has. That is device 0
    for a thread that nobody has told, as those are in which receives take memory and publications let go of it.
    """
    own: int = torch.cuda.current_device()
    devices = (own, *range(torch.cuda.device_count()))
    return next((device for device in devices if torch._C._cuda_hasPrimaryContext(device)), own)


def _forget_failure() -> None:
    """The runtime keeps its last error for whoever asks next: better a kernel that nobody needs than the trainer's."""
    with contextlib.suppress(RuntimeError):
        # Zeros would be no kernel: newer torch has the driver clear them, which asks for no error but its own.
        torch.ones(1, device="cuda")
