"""How long checkpoints take on a disk: what ``bench --save`` measures."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import rates

#: Returns the moments at which a save let its caller go on, and at which the checkpoint was on the disk.
_Save = Callable[[dict[str, Any], Path], tuple[float, float]]
_Load = Callable[[dict[str, Any], Path], Any]


class SaveTimes(NamedTuple):
    """How long the saves and loads of one kind took, in seconds.

    Attributes:
        what: the kind
        stands: medians of how long the caller stood still
        saved: of how long it took until the checkpoint was on the disk: the median, the shortest, the longest
        loaded: the median of loads right after, from the page cache
    """

    what: str
    stands: float
    saved: tuple[float, float, float]
    loaded: float


def measure(nbytes: int, count: int, folder: Path) -> list[SaveTimes]:
    """Saves and loads a state, the kinds taking turns; nothing of it stays.

    Args:
        nbytes: size of the state
        count: saves of each kind, 1 or more, without the first, which also makes buffers and starts threads
        folder: on the disk that is measured; it must exist
    """
    from ..checkpointing import AsyncCheckpointer
    from .mapped_states import typed_errors

    state = rates.sample_state(nbytes)
    with (
        # What is left where the scratch folder cannot be removed is an error of the disk, and said already.
        tempfile.TemporaryDirectory(prefix="tensorferry-bench-", dir=folder, ignore_cleanup_errors=True) as scratch,
        contextlib.closing(AsyncCheckpointer()) as checkpointer,
        warnings.catch_warnings(),
        typed_errors(),
    ):
        warnings.simplefilter("ignore")  # torch's, of a save by a single process
        return [
            _medians(what, times)
            for what, times in _time_rounds(_candidates(checkpointer), state, count, Path(scratch))
        ]


def _candidates(checkpointer: Any) -> dict[str, tuple[_Save, _Load]]:
    """Returns the ways to save and load that are compared, by name."""
    from torch.distributed import checkpoint as dcp

    from ..dcp import FileReader, FileWriter

    cores = len(os.sched_getaffinity(0))
    return {
        "AsyncCheckpointer": (
            lambda state, path: _wait_for_save(*checkpointer.save(path, state)),
            lambda state, path: checkpointer.load(path, state),
        ),
        "dcp.async_save of torch": (
            lambda state, path: _wait_for_save(None, dcp.async_save(state, storage_writer=_torch_writer(path, cores))),
            lambda state, path: dcp.load(state, storage_reader=dcp.FileSystemReader(path)),
        ),
        "dcp.save, FileWriter": (
            lambda state, path: _now(dcp.save(state, storage_writer=FileWriter(path))),
            lambda state, path: dcp.load(state, storage_reader=FileReader(path)),
        ),
        "dcp.save of torch": (
            lambda state, path: _now(dcp.save(state, storage_writer=_torch_writer(path, cores))),
            lambda state, path: dcp.load(state, storage_reader=dcp.FileSystemReader(path)),
        ),
        "torch.save, fsync": (_torch_save, _torch_load),
    }


def _time_rounds(
    kinds: dict[str, tuple[_Save, _Load]], state: dict[str, Any], count: int, scratch: Path
) -> Iterator[tuple[str, list[tuple[float, float, float]]]]:
    """Yields each way with the seconds of its rounds (trainer waits, save, load); the first round is not among them."""
    found: dict[str, list[tuple[float, float, float]]] = {what: [] for what in kinds}
    for number in range(count + 1):
        for what, (save, load) in kinds.items():
            path = scratch / str(number)
            began = time.perf_counter()
            free, written = save(state, path)
            loading = time.perf_counter()
            load(state, path)
            if number:
                found[what].append((free - began, written - began, time.perf_counter() - loading))
            shutil.rmtree(path)
    yield from found.items()


def _medians(what: str, times: list[tuple[float, float, float]]) -> SaveTimes:
    stands, saved, loaded = zip(*times, strict=True)
    median = statistics.median
    return SaveTimes(what, median(stands), (median(saved), min(saved), max(saved)), median(loaded))


def _torch_writer(path: Path, threads: int) -> Any:
    """Returns torch's writer with as many threads as there are cores, which is the fastest that it has."""
    from torch.distributed.checkpoint import FileSystemWriter

    return FileSystemWriter(path, thread_count=threads)


def _wait_for_save(staged: Any, written: Any) -> tuple[float, float]:
    """Waits for an asynchronous save; returns when the trainer could go on, and when the save was written."""
    if staged is not None:
        staged.result()
    free = time.perf_counter()
    written.result()
    return free, time.perf_counter()


def _now(_: Any) -> tuple[float, float]:
    return (now := time.perf_counter()), now


def _torch_save(state: dict[str, Any], path: Path) -> tuple[float, float]:
    import torch

    path.mkdir()
    with (path / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return _now(None)


def _torch_load(state: dict[str, Any], path: Path) -> None:
    import torch

    loaded = torch.load(path / "state.pt", mmap=True)
    for name, tensor in state.items():
        tensor.copy_(loaded[name])
