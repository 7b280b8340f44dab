"""The trainer of benches/checkpointing.py: a loop that steps, saves with one of the contenders, and loads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from checkpointers import MAKERS, PlainCopy, Saver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Tensors of a state: so many large ones, and small ones beside each.
_LARGE, _SMALL = 32, 16
_CORES = os.cpu_count() or 1


def state(mib: int, seed: int, kib_each: int = 0) -> dict[str, torch.Tensor]:
    """Returns a flat state of float32 tensors, ``mib`` MiB in all, as a model with small norms and biases has it.

    With ``kib_each``, all tensors have so many KiB.
    """
    generator = torch.Generator().manual_seed(seed)
    if kib_each:
        return {
            f"layers.{i}.weight": torch.randn(kib_each * 256, generator=generator)
            for i in range((mib << 10) // kib_each)
        }
    each = (mib << 20) // 4 // _LARGE
    tensors = {f"layers.{i}.weight": torch.randn(each // 1024, 1024, generator=generator) for i in range(_LARGE)}
    small = {
        f"layers.{i}.norm.{k}": torch.randn(1024, generator=generator) for i in range(_LARGE) for k in range(_SMALL)
    }
    return {**tensors, **small}


def _process_tree() -> list[int]:
    """Returns this process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                after_name = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(after_name[1]), []).append(int(entry))
    found, new = [], [os.getpid()]
    while new:
        found += new
        new = [child for parent in new for child in children.get(parent, [])]
    return found


def _memory(pids: list[int]) -> int:
    """Returns the bytes of memory of these processes; what they share is counted once (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


class Peak:
    """Samples the memory of this process, its descendants and `others` in a thread, ten times a second."""

    def __init__(self, others: list[int]) -> None:
        self._stop = threading.Event()
        self._others = others
        self._before = self.bytes = _memory([*_process_tree(), *others])
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.bytes = max(self.bytes, _memory([*_process_tree(), *self._others]))

    def extra(self) -> int:
        """Stops; returns by how many bytes the memory grew at most."""
        self._stop.set()
        self._thread.join()
        return max(0, self.bytes - self._before)


def _on_disk(path: Path) -> None:
    """Synchronises a checkpoint, for contenders that leave that to the system."""
    for file in [path, *path.rglob("*"), path.parent]:
        opened = os.open(file, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextlib.contextmanager
def _neighbours(count: int) -> Iterator[None]:
    """While the block runs, so many processes keep a core busy each, as those that load data do."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        yield


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """While the block runs, torch has a thread for each core; the loop has one, which leaves cores for a write."""
    torch.set_num_threads(_CORES)
    try:
        yield
    finally:
        torch.set_num_threads(1)


class Trainer:
    """A rank of one: a state, a training loop, and a contender."""

    def __init__(self, rank: int, world: int) -> None:
        del rank, world
        torch.set_num_threads(1)
        self._weight = torch.randn(256, 256)
        self._input = torch.randn(64, 256)
        self.held: dict[str, torch.Tensor] = {}
        self._saver: Saver | None = None

    def build(self, mib: int, seed: int, kib_each: int) -> int:
        """Makes the state; returns its bytes."""
        self.held = state(mib, seed, kib_each)
        return sum(value.nbytes for value in self.held.values())

    def open(self, contender: str, sockets: str | None) -> list[str]:
        """Makes the contender's checkpointer; `sockets` is the folder by which a keeper is found, if there is one.

        Returns the names of its ways to load.
        """
        self._saver = MAKERS[contender](sockets)
        return list(self._saver.loads())

    def _step(self) -> None:
        """One step of training: some milliseconds of arithmetic and a small update."""
        for _ in range(8):
            self._input = torch.tanh(self._input @ self._weight)
        self._weight.add_(1e-6)

    def _steps(self, until: Callable[[], bool]) -> tuple[int, float]:
        """Steps until the condition holds; returns how many steps it took, and how many seconds."""
        started, count = time.perf_counter(), 0
        while not until():
            self._step()
            count += 1
        return count, time.perf_counter() - started

    def save(self, paths: list[Path], unloaded_s: float, warm_up: int, neighbours: int) -> list[dict[str, Any]]:
        """Saves to each path in turn, training on meanwhile and before; returns the costs of each save.

        The memory is sampled during the first `warm_up` saves only: to sum it up takes a good part of a core.
        """
        with _neighbours(neighbours):
            return [self._save(path, unloaded_s, number < warm_up) for number, path in enumerate(paths)]

    def _save(self, path: Path, unloaded_s: float, watched: bool) -> dict[str, Any]:
        assert self._saver is not None
        ends = time.perf_counter() + unloaded_s
        steps, seconds = self._steps(lambda: time.perf_counter() > ends)
        unloaded = steps / seconds
        peak = Peak(self._saver.others) if watched else None
        began = time.perf_counter()
        with _all_cores():
            written = self._saver.save(self.held, path)
        stood_still = time.perf_counter() - began
        sample: dict[str, Any] = {"stand_still_s": stood_still}
        if written is not None:
            steps, seconds = self._steps(written.done)
            written.result()
            sample["rate"] = steps / seconds / unloaded if seconds > 0.05 else None
        if not isinstance(self._saver, PlainCopy):
            if not self._saver.durable:
                _on_disk(path)
            sample["durable_s"] = time.perf_counter() - began
        if peak is not None:
            sample["extra"] = peak.extra()
        return sample

    def load(self, path: Path, way: str) -> float:
        """Loads into the state in one of the contender's ways; returns the seconds."""
        assert self._saver is not None
        load = self._saver.loads()[way]
        with _all_cores():
            began = time.perf_counter()
            load(self.held, path)
            return time.perf_counter() - began

    def equals(self, mib: int, seed: int, kib_each: int) -> bool:
        """Returns whether the state is now that of `seed`."""
        return all(torch.equal(self.held[name], value) for name, value in state(mib, seed, kib_each).items())

    def close(self) -> None:
        """Closes the contender's checkpointer."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def end(self) -> None:
        """Called by the job when it ends."""
        self.close()
