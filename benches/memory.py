"""Memory of this process: pages that were never touched, pages that the machine has ready or not, and the peak."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

_BLOCK = 4 << 20
_REPORTING = Path("/sys/module/page_reporting")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python's mmap does not name
#: Cold memory is at least so much slower to touch than backed memory, or it is the same.
_COLD = 0.8


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


def first_touch(nbytes: int) -> float:
    """Return the GB/s at which the kernel hands out that much memory in huge pages."""
    with fresh(nbytes, huge=True) as memory:
        begin = time.perf_counter()
        memory.madvise(_POPULATE_WRITE)
        return nbytes / (time.perf_counter() - begin) / 1e9


class Ballast:
    """Memory held between measurements, so that the next one finds "backed" memory: pages that the machine has ready.

    The host of a virtual machine backs a page when it is first touched, and may take pages back once they have been
    free for two seconds (free page reporting): fresh memory then costs 0.1 s or 6 s per GiB by that alone. Ballast
    that is released just before a receive makes fresh memory cost what it does on a machine that is not shared. It is
    of small and of huge pages, as the contenders use both and the kernel hands them out from different lists.
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

    def release(self) -> None:
        """Give it back."""
        for memory in self._held:
            memory.close()
        self._held = []


def _reported() -> int | None:
    """Return how much the kernel has given to the host so far, in KiB; None for a kernel that does not count it."""
    try:
        return int((_REPORTING / "parameters/reported_kib").read_text())
    except (OSError, ValueError):
        return None


def wait_until_cold() -> None:
    """Wait until the host has taken free memory back.

    Free pages are reported two seconds after they were freed, in portions. Where the kernel counts them, this returns
    when the count hardly grows any more; elsewhere after eight seconds.
    """
    last = _reported()
    if last is None:
        time.sleep(8.0)
        return
    time.sleep(2.5)
    deadline = time.monotonic() + 8.0
    while time.monotonic() < deadline:
        time.sleep(0.5)
        now = _reported() or last
        if now - last < 16 << 10:
            return
        last = now


def probe(nbytes: int, *, cold: bool) -> dict[str, float]:
    """Return how fast memory can be touched first when it is backed and, if requested, when it is cold, in GB/s.

    "cold" is missing where there is no difference: without a host that takes free memory back, no memory is cold.
    """
    with fresh(nbytes, huge=True) as memory:
        touch(memory)
    rates = {"backed": first_touch(nbytes)}
    if cold and _REPORTING.exists():
        wait_until_cold()
        rate = first_touch(nbytes)
        if rate < _COLD * rates["backed"]:
            rates["cold"] = rate
    return rates


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
