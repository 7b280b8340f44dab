"""Memory of this process: pages that were never touched, pages that the machine has ready or not, and the peak."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

_BLOCK = 4 << 20
_STEP = 32 << 20
_REPORTING = Path("/sys/module/page_reporting")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python's mmap does not name
#: Cold memory is touched at less than this share of the rate of backed memory.
_COLD = 0.5
#: So many steps in a row have to be cold: a single slow one is a pause of the machine.
_COLD_STEPS = 3


def fresh(nbytes: int, *, huge: bool = False) -> mmap.mmap:
    """Return private pages that were never touched, as huge ones if requested and available."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def touch(memory: mmap.mmap) -> None:
    """Write to every page."""
    block = b"\x5a" * min(_BLOCK, len(memory))
    for start in range(0, len(memory), _BLOCK):
        memory[start : start + _BLOCK] = block[: len(memory) - start]


def first_touch(memory: mmap.mmap) -> float:
    """Return the GB/s at which the kernel hands out all pages of that memory."""
    begin = time.perf_counter()
    memory.madvise(_POPULATE_WRITE)
    return len(memory) / (time.perf_counter() - begin) / 1e9


class AllBacked(Exception):
    """No cold memory was found."""


class Ballast:
    """Memory held between measurements, or during one, so that fresh memory is what it should be: "backed" or "cold".

    Backed memory are pages that the machine has ready. The host of a virtual machine backs a page when it is first
    touched, and may take pages back once they have been free for two seconds (free page reporting): fresh memory then
    costs 0.1 s or 6 s per GiB by that alone. Ballast that is released just before a receive makes fresh memory cost
    what it does on a machine that is not shared. It is of small and of huge pages, as the contenders use both and the
    kernel hands them out from different lists. Ballast of all that is backed leaves only cold pages to a receive.
    """

    def __init__(self) -> None:
        self._held: list[mmap.mmap] = []

    def hold(self, nbytes: int) -> None:
        """Take that much of each kind, unless it is held already."""
        if [len(memory) for memory in self._held] != [nbytes, nbytes]:
            self.release()
            self._held = [fresh(nbytes, huge=True), fresh(nbytes)]
            for memory in self._held:
                touch(memory)

    def hold_backed(self, leave: int, backed: float) -> float:
        """Take free memory until what is left is cold; return the GB/s at which that is touched first, in huge pages.

        Free memory whose host takes it back does not all go there: the kernel may keep what was freed last (1 GiB is
        usual), and hands that out first.

        Args:
            leave: bytes of free memory that have to be left
            backed: GB/s at which memory is touched that the machine has ready

        Raises:
            AllBacked: there is none; the message says why
        """
        self.release()
        if not _REPORTING.exists():
            raise AllBacked("no host takes free memory back here (no /sys/module/page_reporting)")
        rates = [backed]
        while len(rates) <= _COLD_STEPS or max(rates[-_COLD_STEPS:]) >= _COLD * backed:
            if _free() < leave + _STEP:
                held = sum(len(memory) for memory in self._held)
                raise AllBacked(f"the first {held >> 20} MiB of free memory were backed, and there is no more to spare")
            self._held.append(fresh(_STEP, huge=True))
            rates.append(first_touch(self._held[-1]))
        return sum(rates[-_COLD_STEPS:]) / _COLD_STEPS

    def release(self) -> None:
        """Give it back."""
        for memory in self._held:
            memory.close()
        self._held = []


def _free() -> int:
    """Return the bytes of memory that nothing is in, not even the page cache: that of a cache would come backed."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemFree:"):
            return int(line.split()[1]) * 1024
    raise KeyError("MemFree")


def backed_rate(nbytes: int) -> float:
    """Return how fast memory is touched first that was released just before, in GB/s and in huge pages."""
    with fresh(nbytes, huge=True) as memory:
        touch(memory)
    with fresh(nbytes, huge=True) as memory:
        return first_touch(memory)


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
