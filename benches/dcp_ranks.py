"""The ranks of benches/dcp.py: they build a state, save it, load it, and return the costs."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import mmap
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tensorferry.dcp import FileReader, FileWriter, PeerReader, PeerWriter

MIB = 1 << 20
TIMEOUT = timedelta(minutes=5)
#: Rows and columns of each tensor of a row, and how many.
SHAPES = {"large": ((2048, 8192), 8), "small": ((8,), 1000), "reshard": ((4096, 4096), 8)}
#: Contenders that support only one rank.
FLOOR = "a plain copy"
ALONE = (FLOOR, "torch.save", "safetensors")
#: Contenders that map files, so that the bytes they read cannot be counted.
MAPPED = ("HuggingFaceStorage", "HuggingFaceStorage threads", "torch.save", "safetensors")
_CORES = os.cpu_count() or 1


def state(row: str, scale: float, seed: int) -> dict[str, torch.Tensor]:
    """Return the state of a row: float32 tensors, sharded by rows over all ranks if there are several."""
    shape, count = SHAPES[row]
    if len(shape) == 2:
        shape = (max(4, int(shape[0] * scale)), shape[1])
    generator = torch.Generator().manual_seed(seed)
    whole = {f"t{i}": torch.randn(shape, generator=generator) for i in range(count)}
    if dist.get_world_size() == 1:
        return whole
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None).clone() for name, value in whole.items()
    }


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _writer(contender: str, path: Path, names: list[str]) -> Any:
    """Return one of torch's writers; with "threads" it writes as many files as there are cores at a time."""
    threads = _CORES if contender.endswith("threads") else 1
    if contender.startswith("FileSystemWriter"):
        return dcp.FileSystemWriter(path, thread_count=threads)
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    known = inspect.signature(HuggingFaceStorageWriter.__init__).parameters
    sharded = next((name for name in ("save_distributed", "save_sharded") if name in known), None)
    options: dict[str, Any] = {sharded: True} if sharded else {}
    if threads > 1:
        files = {name: 1 + number % threads for number, name in enumerate(names)}
        options |= {"thread_count": threads, "fqn_to_index_mapping": files}
    return HuggingFaceStorageWriter(str(path), **options)


def _reader(contender: str, path: Path) -> Any:
    if contender.startswith("FileSystemWriter"):
        return dcp.FileSystemReader(path)
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(path), **({"thread_count": _CORES} if contender.endswith("threads") else {}))


class Rank:
    """One rank of one job, with the state it saves or loads into."""

    def __init__(self, rank: int, world: int) -> None:
        del rank
        torch.set_num_threads(max(1, _CORES // world))
        # Nobody compares it when it loads.
        torch.serialization.set_crc32_options(False)
        # torch imports many modules when its checkpoints are first used, which must not be measured.
        if world > 1:
            state("small", 1.0, 0)
        self.held: dict[str, Any] = {}
        self.built: tuple[str, float] = ("small", 1.0)
        self.writer: PeerWriter | None = None

    def build(self, row: str, scale: float, seed: int) -> int:
        """Make the state; return its bytes on this rank."""
        self.held, self.built = state(row, scale, seed), (row, scale)
        return sum(_local(value).nbytes for value in self.held.values())

    def save(self, contender: str, path: Path) -> dict[str, Any]:
        """Save the state; return the costs."""
        with watched() as measured:
            if contender == "tensorferry files":
                dcp.save(self.held, storage_writer=FileWriter(path))
            elif contender == "tensorferry peers":
                self.writer = PeerWriter(TIMEOUT, interface="127.0.0.1")
                dcp.save(self.held, storage_writer=self.writer)
            elif contender.startswith(("FileSystemWriter", "HuggingFaceStorage")):
                dcp.save(self.held, storage_writer=_writer(contender, path, list(self.held)))
                for file in path.iterdir() if contender.startswith("HuggingFaceStorage") else ():
                    _synchronise(file)
            elif contender == "torch.save":
                torch.save(self.held, path)
                _synchronise(path)
            elif contender == "safetensors":
                from safetensors.torch import save_file

                save_file(self.held, path)
                _synchronise(path)
        measured["metadata"] = self.writer.metadata() if self.writer else None
        if contender == FLOOR:
            measured["s"] = 0.0
        return measured

    def load(self, contender: str, path: Path, metadata: str | None) -> dict[str, Any]:
        """Load into the state; return the costs."""
        report = None
        saved = state(*self.built, 1) if contender == FLOOR else {}
        with watched() as measured:
            _copy_plainly([(value, saved[name]) for name, value in self.held.items() if name in saved])
            if contender == "tensorferry files":
                reader = FileReader(path)
                dcp.load(self.held, storage_reader=reader)
                report = reader.report
            elif contender == "tensorferry peers":
                peers = PeerReader(metadata, timeout=TIMEOUT)
                dcp.load(self.held, storage_reader=peers)
                report = peers.report
            elif contender.startswith(("FileSystemWriter", "HuggingFaceStorage")):
                dcp.load(self.held, storage_reader=_reader(contender, path))
            elif contender == "torch.save":
                self._copy(torch.load(path, weights_only=True, mmap=True))
            elif contender == "safetensors":
                from safetensors.torch import load_file

                self._copy(load_file(path))
        # Peers' bytes go through sockets, which the kernel does not count as read.
        if contender == "tensorferry peers" and report is not None:
            measured["read"] = report["bytes"]
        return measured

    def _copy(self, loaded: dict[str, torch.Tensor]) -> None:
        for name, value in self.held.items():
            value.copy_(loaded[name])

    def equals(self, row: str, scale: float, seed: int) -> bool:
        """Return whether the state is now that of `seed`."""
        expected = state(row, scale, seed)
        return all(torch.equal(_local(self.held[name]), _local(value)) for name, value in expected.items())

    def end(self) -> None:
        """End the publication."""
        if self.writer is not None:
            self.writer.withdraw()
            self.writer.shutdown()


def _copy_plainly(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first one, 4 MiB at a time, with as many threads as FileReader has."""
    chunk = 4 * MIB
    work = [
        (target.data_ptr() + at, source.data_ptr() + at, min(chunk, target.nbytes - at))
        for target, source in pairs
        for at in range(0, target.nbytes, chunk)
    ]

    def copy() -> None:
        with contextlib.suppress(IndexError):
            while True:
                ctypes.memmove(*work.pop())

    threads = [threading.Thread(target=copy) for _ in range(min(8, max(2, os.cpu_count() or 2), len(work)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def share_in_cache(files: list[Path]) -> float:
    """Return the share of the files that the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = pages = 0
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        count = -(-size // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * count)()
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE) as mapped:
            # Private, so that Python gives its address; a page that was not written to is the page cache's.
            start = ctypes.c_char.from_buffer(mapped)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), flags)
            del start
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        held, pages = held + sum(flag & 1 for flag in flags), pages + count
    return held / pages if pages else 0.0


def drop_from_cache(files: list[Path]) -> None:
    """Drop the files, which are on the disk, from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _synchronise(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def watched() -> Any:
    """Yield a dict that gets the seconds, those of CPU, the bytes read by system calls, and the rise of peak memory."""
    Path("/proc/self/clear_refs").write_text("5")
    before, read = _memory("VmRSS"), _read_bytes()
    measured: dict[str, Any] = {}
    begin, busy = time.perf_counter(), time.process_time()
    yield measured
    measured["s"] = time.perf_counter() - begin
    measured["cpu"] = time.process_time() - busy
    measured["read"] = _read_bytes() - read
    measured["extra"] = max(0, _memory("VmHWM") - before)


def _memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])
