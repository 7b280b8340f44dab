"""Loops for a main thread: short steps with the end of each one on record, and training as a job does it."""

from __future__ import annotations

import array
import itertools
import os
import resource
import threading
import time
from collections.abc import Callable

import torch

_STEP_S = 0.2e-3


def _account() -> Callable[[], tuple[int, int]]:
    """Return a function that reports how long the calling thread has run or waited for a core, in ns, and its sleeps.

    A step without a sleep that took longer than that was halted together with the whole (virtual) machine: the
    kernel does not count a host's pauses as running time of a thread.
    """
    queue = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)  # ns run, ns waited, number of turns

    def read() -> tuple[int, int]:
        waited_ns = int(os.pread(queue, 64, 0).split()[1])
        return time.thread_time_ns() + waited_ns, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    return read


class _Loop:
    """Work for a main thread that another thread begins and stops."""

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._running = threading.Event()
        self._stop = False

    def run(self) -> None:
        """Wait for `begin`, then work until `stop`; belongs on the main thread."""
        self._wanted.wait()
        if not self._stop:
            self._work()

    def _work(self) -> None:
        """Set `_running` once the loop runs, and return when `_stop` is true."""
        raise NotImplementedError

    def begin(self) -> None:
        """Start the work; return once it runs."""
        self._wanted.set()
        self._running.wait()

    def stop(self) -> None:
        """Make `run` return."""
        self._stop = True
        self._wanted.set()


class MainLoop(_Loop):
    """Runs steps of about 0.2 ms, each of one torch operator, until `stop` is called."""

    def __init__(self) -> None:
        super().__init__()
        self._ends = array.array("q")
        self._charged = array.array("q")
        self._sleeps = array.array("q")

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

    def _work(self) -> None:
        work, out = self._calibrate()
        clock, account = time.perf_counter_ns, _account()
        self._running.set()
        while not self._stop:
            torch.sin(work, out=out)
            charged, sleeps = account()
            self._charged.append(charged)
            self._sleeps.append(sleeps)
            self._ends.append(clock())

    def during(self, windows: list[tuple[int, int]]) -> dict[str, float]:
        """Return the gaps and the rate of the steps that overlap some windows of time.

        Returns:
            worst_s: the longest gap between the ends of two steps.
            worst_awake_s: the same, less the time in which the whole machine was halted.
            steps_per_s: steps that ended inside the windows, by the windows' length.
        """
        while self._ends[-1] < max(end for _, end in windows):
            time.sleep(_STEP_S)  # the step that a window ends in is not over yet, and may be the longest
        ends = self._ends[:]
        worst, worst_awake, steps = 0, 0, 0
        for begin, end in windows:
            steps += sum(begin <= at < end for at in ends)
            for i, (a, b) in enumerate(itertools.pairwise(ends)):
                if b > begin and a < end:
                    worst = max(worst, b - a)
                    worst_awake = max(worst_awake, self._awake(i, b - a))
        length = sum(end - begin for begin, end in windows)
        return {
            "worst_s": worst / 1e9,
            "worst_awake_s": worst_awake / 1e9,
            "steps_per_s": steps / length * 1e9 if length else 0.0,
        }

    def _awake(self, step: int, gap: int) -> int:
        if self._sleeps[step + 1] > self._sleeps[step]:
            return gap
        return min(gap, self._charged[step + 1] - self._charged[step])


class TrainingLoop(_Loop):
    """Trains a small model of its own with one thread until `stop` is called: forward, backward, AdamW."""

    def _work(self) -> None:
        torch.set_num_threads(1)
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batch = torch.linspace(-1.0, 1.0, 64 * 256).view(64, 256)
        while not self._stop:
            optimizer.zero_grad()
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            self._running.set()
