"""A load takes no memory beside its targets, and one window for what cannot be read in place."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from placed import Job

pytestmark = pytest.mark.nightly


MIB = 1 << 20


def resident(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


def large(rank, world, halved, make):
    from megatron.core.dist_checkpointing import ShardedTensor

    state = {}
    for number in range(6):
        if halved:
            shard = ShardedTensor.from_rank_offsets(f"w{number}", make(4096 // world), (0, rank, world))
        else:
            shard = ShardedTensor.from_rank_offsets(f"w{number}", make(4096), replica_id=rank)
        state[f"w{number}"] = shard
    return state


def save(kept, folder):
    import tensorferry.megatron as ours

    del kept
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ours.save(large(rank, world, True, lambda rows: torch.full((rows, 1024), 2.0)), folder)


#: For what cannot be read in place: as much as that, instead of 256 MiB.
WINDOW = 24 * MIB
#: Ranks, and bytes at most beside the targets, by what cannot be read in place and how it is loaded. Those that fetch
#: from each other share 1 MiB for each connection, at either end.
MOST = {
    "plain": (2, 8 * MIB),
    "two-stage": (2, 20 * MIB),
    "cast": (2, WINDOW + 6 * MIB),
    "cast, two-stage": (2, WINDOW + 8 * MIB),
    "columns": (2, WINDOW + 6 * MIB),
    "columns, two-stage": (4, WINDOW + 4 * MIB),
    "cast columns, two-stage": (2, WINDOW + 8 * MIB),
}


def load(kept, folder, how):
    import tensorferry.megatron as ours
    from tensorferry.dcp import load_plan
    from tensorferry.megatron import spreading

    del kept
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    strategy = ours.load_strategy()
    if "two-stage" in how:
        strategy = ours.TwoStageDataParallelLoadShardedStrategy(
            torch.distributed.group.WORLD, spread=True, interface="127.0.0.1"
        )
    # A first load, of nothing, so that threads and modules are there.
    ours.load({}, folder, strategy)
    dtype = torch.half if "cast" in how else torch.float
    if "columns" in how:
        make = lambda rows: torch.full((1024, rows), 1.0, dtype=dtype).T  # noqa: E731
    else:
        make = lambda rows: torch.full((rows, 1024), 1.0, dtype=dtype)  # noqa: E731
    state = large(rank, world, False, make)
    load_plan._SCRATCH = spreading._WINDOW = WINDOW
    # Large blocks that are freed go back at once (M_MMAP_THRESHOLD), and so do those that were kept before.
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, MIB)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, files = resident("VmRSS"), resident("RssFile")
    found = ours.load(state, folder, strategy)
    load_plan._SCRATCH = spreading._WINDOW = 256 * MIB
    # Pages of libraries that were touched again are not the load's.
    more = resident("VmHWM") - before - max(0, resident("RssFile") - files)
    return more, all(bool((tensor == 2).all()) for tensor in found.values())


def test_a_load_takes_no_memory_beside_its_targets(host, tmp_path):
    host.job(2).run(save, str(tmp_path))
    for how, (ranks, most) in MOST.items():
        # Of its own: what other tests have left in the heap of a process is taken again, and not given back.
        job = Job(host, ranks)
        for more, right in job.run(load, str(tmp_path), how):
            assert right
            # Of 96 MiB that are loaded.
            assert more < most, f"{how}: {more / MIB:.1f} MiB"
        job.end()
