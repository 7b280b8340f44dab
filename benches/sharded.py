"""Megatron's sharded states: ours beside Megatron's strategy, torch_dist, and its wrappers that load once and spread.

Two tables, each from one run in which contenders take turns, forwards in even rounds and backwards in odd ones;
medians, and the smallest and largest in brackets.

- Saves and loads of a state in two tensor parallel halves, each of them by two ranks. Saves end when Megatron's
  function returns; whether the bytes are on the disk then is up to the strategy.
- A state that all ranks of a data parallel group need, loaded by 2, 4 or 8 ranks: how long it takes and how many bytes
  the group reads from storage, by the strategies' own count or, for Megatron's, by that of the system.

Files are read from the page cache. With ``--cold`` they are dropped from it before each load. With ``--storage MIB_S``
they lie on a file system of that speed, which the ranks share as if each were on a machine of its own: nothing is in a
page cache, and ranks fetch from each other through sockets (``slow_storage.c``).

Megatron writes no CRC-32, which its loads do not compare, keeps its plans from save to save, and with "threads" has
each rank write two files at a time. Its wrappers want a GPU: a few functions of torch are replaced so that they work in
host memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import facts

sys.path.append(str(Path(__file__).parents[1] / "examples" / "reshard"))
import ranks
import torch
import torch.distributed as dist

MIB = 1 << 20
TENSORS = 16
SAVES = ("tensorferry", "torch_dist", "torch_dist, threads")
SPREADS = (
    "tensorferry two-stage",
    "tensorferry alone",
    "torch_dist alone",
    "broadcast",
    "gather_rounds",
    "gather_object",
)


def without_gpu() -> None:
    """Have Megatron use host memory where it wants that of a GPU."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    empty, empty_like, init = torch.empty, torch.empty_like, ShardedTensor.init_data
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]

    def on_host(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return make(*args, **options)

        return made

    torch.empty, torch.empty_like = on_host(empty), on_host(empty_like)
    ShardedTensor.init_data = lambda self, _device, init_fn=empty: init(self, "cpu", init_fn)


def read_by_system() -> int:
    """Return the bytes that this process has read, from files and pipes."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


class Rank:
    """One rank of a measurement."""

    def __init__(self, rank: int, world: int) -> None:
        """Prepare torch for Megatron."""
        self._rank, self._world = rank, world
        self._strategies: dict[str, Any] = {}
        torch.serialization.set_crc32_options(False)
        # Megatron warns on every load that its own functions are deprecated.
        logging.disable(logging.WARNING)
        without_gpu()

    def build(self, nbytes: int, value: float, halved: bool) -> None:
        """Make a state of so many bytes in all."""
        from megatron.core.dist_checkpointing import ShardedTensor

        rows = nbytes // TENSORS // 4096
        self._state = {}
        for number in range(TENSORS):
            if halved:
                data = torch.full((rows // self._world, 1024), value + number)
                shard = ShardedTensor.from_rank_offsets(f"w{number}", data, (0, self._rank, self._world))
            else:
                shard = ShardedTensor.from_rank_offsets(
                    f"w{number}", torch.full((rows, 1024), value + number), replica_id=self._rank
                )
            self._state[f"w{number}"] = shard

    def equals(self, value: float) -> bool:
        """Whether the state has been loaded."""
        return all(bool((shard.data == value + number).all()) for number, shard in enumerate(self._state.values()))

    def save(self, contender: str, folder: str) -> float:
        """Save with a strategy; return the seconds."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        from tensorferry import megatron

        if contender not in self._strategies:
            theirs = {"thread_count": 2 if contender.endswith("threads") else 1, "cached_metadata": True}
            self._strategies[contender] = (
                megatron.save_strategy() if contender == "tensorferry" else TorchDistSaveShardedStrategy(**theirs)
            )
        dist.barrier()
        began = time.monotonic()
        dist_checkpointing.save(dict(self._state), folder, self._strategies[contender])
        return time.monotonic() - began

    def load(self, contender: str, folder: str, apart: bool = False) -> tuple[float, int]:
        """Load with a strategy; return the seconds, and the bytes that this rank has read from storage."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

        from tensorferry import Network, megatron

        strategy: Any
        counted = [0]
        if contender == "tensorferry two-stage":
            strategy = megatron.TwoStageDataParallelLoadShardedStrategy(
                dist.group.WORLD, network=Network(interface="127.0.0.1", same_host=False if apart else None)
            )
        elif contender.startswith("tensorferry"):
            strategy = megatron.load_strategy()
        else:
            strategy = base = TorchDistLoadShardedStrategy()
            plain = base.load

            def counting(*args: Any) -> Any:
                before = read_by_system()
                found = plain(*args)
                counted[0] += read_by_system() - before
                return found

            base.load = counting
            if contender in ("broadcast", "gather_rounds", "gather_object"):
                strategy = FullyParallelLoadStrategyWrapper(base, dist.group.WORLD, exchange_algo=contender)
        dist.barrier()
        began = time.monotonic()
        found = dist_checkpointing.load(dict(self._state), folder, strategy, validate_access_integrity=False)
        took = time.monotonic() - began
        for name, shard in self._state.items():
            # The wrappers load into other memory than that of the state.
            shard.data = found[name]
        report = getattr(strategy, "report", None)
        return took, counted[0] if report is None else report["bytes"]

    def end(self) -> None:
        """Does nothing."""


def told(values: list[float]) -> str:
    """Return median and spread."""
    return f"{statistics.median(values):.0f} [{min(values):.0f}-{max(values):.0f}]"


def turns(contenders: tuple[str, ...], rounds: int) -> list[str]:
    """Return who measures when."""
    return [one for number in range(rounds) for one in (contenders if number % 2 == 0 else contenders[::-1])]


def drop_from_cache(folder: Path) -> None:
    """Drop the files of a folder, which are on the disk, from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def slow_down(folder: Path, mib_s: float) -> None:
    """Have all ranks read what is below a folder at so many MiB/s together."""
    library, clock = folder / "slow_storage.so", folder / "clock"
    source = Path(__file__).with_name("slow_storage.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    clock.write_bytes(bytes(8))
    os.environ |= {"LD_PRELOAD": str(library), "SLOW_CLOCK": str(clock), "SLOW_MIB_S": str(mib_s)}
    os.environ["SLOW_FOLDER"] = f"{folder}/"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--contenders", nargs="*", default=SPREADS, choices=SPREADS)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cold", action="store_true")
    where.add_argument("--storage", type=float, metavar="MIB_S")
    parser.add_argument("--no-saves", action="store_true", help="leave out the first table")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks._PRELOAD.append("megatron.core.dist_checkpointing")
    nbytes = options.mib * MIB
    found: dict[str, Any] = {"machine": facts(), "mib": options.mib, "saves": {}, "spreads": {}}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TENSORFERRY_BENCH_FOLDER")) as folder:
        if options.storage:
            slow_down(Path(folder).resolve(), options.storage)
        with ranks.Job("two ranks", 2, Rank, daemon=False) as job:
            saves: dict[str, list[float]] = {one: [] for one in SAVES}
            loads: dict[str, list[float]] = {one: [] for one in SAVES}
            for number, contender in enumerate([] if options.no_saves else turns(SAVES, options.rounds + 1)):
                path = Path(folder) / f"{number}"
                path.mkdir()
                job("build", nbytes, float(number), True)
                saved = max(job("save", contender, str(path)))
                job("build", nbytes, -1.0, True)
                loaded = max(took for took, _ in job("load", contender, str(path)))
                assert all(job("equals", float(number)))
                # The first turn of each is for warming up.
                if number >= len(SAVES):
                    saves[contender].append(1e3 * saved)
                    loads[contender].append(1e3 * loaded)
                for file in path.iterdir():
                    file.unlink()
            if not options.no_saves:
                print(f"{options.mib} MiB in {TENSORS} tensors, two ranks | save ms | load ms")
                for contender in SAVES:
                    print(f"{contender} | {told(saves[contender])} | {told(loads[contender])}")
                found["saves"] = {"save_ms": saves, "load_ms": loads}
            for contender in SAVES:
                (Path(folder) / contender).mkdir()
                job("build", nbytes, 7.0, True)
                job("save", contender, str(Path(folder) / contender))
        for world in options.worlds:
            times: dict[str, list[float]] = {one: [] for one in options.contenders}
            read: dict[str, list[float]] = {one: [] for one in options.contenders}
            with ranks.Job(f"{world} ranks", world, Rank, daemon=False) as job:
                for number, contender in enumerate(turns(tuple(options.contenders), options.rounds + 1)):
                    job("build", nbytes, -1.0, False)
                    path = Path(folder) / ("tensorferry" if contender.startswith("tensorferry") else "torch_dist")
                    if options.cold:
                        drop_from_cache(path)
                    results = job("load", contender, str(path), options.storage is not None)
                    assert all(job("equals", 7.0)), contender
                    if number >= len(options.contenders):
                        times[contender].append(1e3 * max(took for took, _ in results))
                        read[contender].append(sum(count for _, count in results) / nbytes)
            print(f"\n{options.mib} MiB needed by each of {world} ranks | ms | read from storage / needed once")
            for contender in options.contenders:
                print(f"{contender} | {told(times[contender])} | {statistics.median(read[contender]):.3f}")
            found["spreads"][world] = {"ms": times, "read": read}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
