"""Memory of this process: pages nobody has touched, pages that the machine has ready, and the peak."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

_BLOCK = 4 << 20
_PASSES = 5


def fresh(nbytes: int, *, huge: bool = False) -> mmap.mmap:
    """Return private pages that nobody has touched yet, as huge ones where asked for and to be had."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def touch(memory: mmap.mmap) -> None:
    """Write to every page."""
    block = b"\x5a" * min(_BLOCK, len(memory))
    for start in range(0, len(memory), _BLOCK):
        memory[start : start + _BLOCK] = block[: len(memory) - start]


def settle(nbytes: int) -> float:
    """Take and give back memory until that gets no faster; return the last pass's GB/s.

    The host of a virtual machine backs a page when it is first touched, and may take free pages back within seconds
    (free page reporting): touching a fresh GiB has been seen to take 0.1 s or 6 s by that alone. What follows at once
    finds pages that the machine has ready, as on a machine of one's own.
    """
    took = float("inf")
    for _ in range(_PASSES):
        before, begin = took, time.perf_counter()
        with fresh(nbytes, huge=True) as memory:
            touch(memory)
        took = time.perf_counter() - begin
        if took > 0.75 * before:
            break
    return nbytes / took / 1e9


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class PeakMemory:
    """Bytes that resident memory rose above its level at construction; None where the mark cannot be reset."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._before: int | None = None
        else:
            self._before = _status("VmRSS:")

    def extra(self) -> int | None:
        """Return the highest rise so far, in bytes."""
        if self._before is None:
            return None
        return max(0, _status("VmHWM:") - self._before)
