"""Page-locked host memory of exactly the requested size.

torch's allocator of page-locked memory rounds up to a power of two: a state of 5 GiB would lock 8 GiB. So where the
CUDA runtime (or ROCm's, under the same names) can lock existing memory, this module maps memory and locks it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

#: ``cudaHostRegisterPortable``: locked for all devices of the process.
_PORTABLE = 1


def pinned(nbytes: int) -> torch.Tensor:
    """Returns ``nbytes`` bytes of page-locked host memory as a 1-D uint8 tensor; unlocked when its storage is gone.

    Raises:
        RuntimeError: the system refuses
    """
    if nbytes and torch.cuda.is_available():
        with contextlib.suppress(_Refused):
            return torch.frombuffer(_Pinned.of(nbytes), dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class _Refused(RuntimeError):
    """The runtime does not lock memory that it did not allocate."""


def lock(address: int, nbytes: int) -> Callable[[], None]:
    """Page-locks mapped memory for all devices.

    Returns:
        Unlocks it; does nothing in a forked child, which has no device, and while the interpreter exits, since the
        memory goes with the process.

    Raises:
        RuntimeError: the runtime refuses
    """
    device, process = _device(), os.getpid()
    with torch.cuda.device(device):
        if int(_cudart().cudaHostRegister(address, nbytes, _PORTABLE)):
            _forget_failure()
            raise _Refused(f"the runtime does not lock {nbytes} bytes of memory")

    def unlock() -> None:
        if process == os.getpid() and not sys.is_finalizing():
            with torch.cuda.device(device):
                _cudart().cudaHostUnregister(address)

    return unlock


class _Pinned(mmap.mmap):
    """A private anonymous mapping that is page-locked, and is unlocked before it is unmapped."""

    _unlock: Callable[[], None] | None = None
    _process = 0

    @classmethod
    def of(cls, nbytes: int) -> _Pinned:
        """Maps ``nbytes`` bytes, which forked children do not inherit, and page-locks them.

        Raises:
            RuntimeError: the system refuses to map them; :class:`_Refused` if the runtime does not lock them
        """
        try:
            memory = cls(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Not inherited by forked children, like memory that CUDA allocates: with copy-on-write, one side's pages
            # would no longer be the ones that the device knows.
            memory.madvise(mmap.MADV_DONTFORK)
        except OSError as e:
            raise RuntimeError(f"cannot map {nbytes} bytes: {e}") from e
        # With huge pages there are fewer pages to lock, which is faster. A kernel without them refuses the advice.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory._unlock = lock(torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), nbytes)
        memory._process = os.getpid()
        return memory

    def __del__(self) -> None:
        if self._unlock is None or sys.is_finalizing():
            return
        if self._process != os.getpid():
            # A forked child has neither the mapping nor the device. The extra reference keeps the object from ever
            # being unmapped there: another mapping of the child may be at the same address.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        self._unlock()


def _cudart() -> Any:
    return torch.cuda.cudart()


def _device() -> int:
    """Returns a device on which this process has a context: the calling thread's current one if it has.

    The runtime creates a context, of some hundred megabytes, on the calling thread's current device. That is device 0
    in a thread that never set one, such as those in which receives allocate memory and publications release it.
    """
    own: int = torch.cuda.current_device()
    devices = (own, *range(torch.cuda.device_count()))
    return next((device for device in devices if torch._C._cuda_hasPrimaryContext(device)), own)


def _forget_failure() -> None:
    """Clears the runtime's last error, which the next kernel launch would report: a dummy kernel, not the trainer's."""
    with contextlib.suppress(RuntimeError):
        # Not zeros: newer torch lets the driver clear the memory, which launches no kernel and leaves the last error.
        torch.ones(1, device="cuda")
