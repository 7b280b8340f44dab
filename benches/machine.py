"""Facts about the machine that a reader needs to judge the numbers."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any


def facts() -> dict[str, Any]:
    """Return cores, processor, memory, kernel and how it hands out huge pages."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": models[0] if models else platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "huge_pages": huge_pages.split("[")[1].split("]")[0],
        "load": os.getloadavg(),
    }


def others_busy(seconds: float = 0.5) -> float:
    """Return the share of all cores that is in use while this process sleeps: the work of other processes."""

    def ticks() -> tuple[int, int]:
        numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # all, and idle or waiting for a disk

    all_before, idle_before = ticks()
    time.sleep(seconds)
    all_after, idle_after = ticks()
    passed = max(1, all_after - all_before)
    return 1.0 - (idle_after - idle_before) / passed
