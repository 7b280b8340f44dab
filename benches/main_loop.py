"""A stand-in for a training loop: short steps on the main thread, with the end of each one on record."""

from __future__ import annotations

import array
import itertools
import threading
import time

import torch

_STEP_S = 0.2e-3


class MainLoop:
    """Runs steps of about 0.2 ms, each one torch operator, until told to stop."""

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._running = threading.Event()
        self._stop = False
        self._ends = array.array("q")

    @staticmethod
    def _calibrate() -> tuple[torch.Tensor, torch.Tensor]:
        torch.set_num_threads(1)
        elements = 4096
        for _ in range(4):
            work = torch.linspace(0.0, 1.0, elements)
            out = torch.empty_like(work)
            begin = time.perf_counter_ns()
            for _ in range(200):
                torch.sin(work, out=out)
            took_s = (time.perf_counter_ns() - begin) / 200e9
            elements = max(64, int(elements * _STEP_S / took_s))
        return work, out

    def run(self) -> None:
        """Wait for `begin`, then step until `stop`; belongs on the main thread."""
        self._wanted.wait()
        if self._stop:
            return
        work, out = self._calibrate()
        ends, clock = self._ends, time.perf_counter_ns
        self._running.set()
        while not self._stop:
            torch.sin(work, out=out)
            ends.append(clock())

    def begin(self) -> None:
        """Start stepping; return once it does."""
        self._wanted.set()
        self._running.wait()

    def stop(self) -> None:
        """End `run`."""
        self._stop = True
        self._wanted.set()

    def during(self, windows: list[tuple[int, int]]) -> dict[str, float]:
        """Return the longest gap between two step ends that touches a window, and the steps per second inside them."""
        while self._ends[-1] < max(end for _, end in windows):
            time.sleep(_STEP_S)  # the step that a window ends in is not over yet, and may be the longest
        ends = self._ends[:]
        worst, steps = 0, 0
        for begin, end in windows:
            steps += sum(begin <= at < end for at in ends)
            gaps = (b - a for a, b in itertools.pairwise(ends) if b > begin and a < end)
            worst = max(worst, max(gaps, default=0))
        length = sum(end - begin for begin, end in windows)
        return {"worst_s": worst / 1e9, "steps_per_s": steps / length * 1e9 if length else 0.0}
