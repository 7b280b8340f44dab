"""Whatever befalls one rank, wherever it is: the others raise Megatron's exception, and the checkpoint before stays."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
from placed import Job
from test_errors import outcome, tensor

#: By hand, they repeat it for minutes.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

#: How long ranks wait for those that never come, and collectives for those that are stopped.
SHORT, GROUP_S = timedelta(seconds=2), 5
PHASES = ("save", "save in the background", "load", "load two-stage")
SIGNALS = {
    "killed": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "interrupted": signal.SIGINT,
    "raises": signal.SIGUSR1,
}


#: Of each tensor, whatever the number of ranks.
ROWS = 16384


def states(count):
    """The state of this rank in the save number ``count``, whose tensors hold that number."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    made = {name: tensor(name, rank, world, ROWS // world) for name in ("w", "v")}
    for shard in made.values():
        shard.data.fill_(count)
    made["o"] = ShardedObject("o", count, (1,), (0,), replica_id=rank)
    return made | {"count": count}


def save(kept, folder):
    import tensorferry.megatron as ours

    del kept
    ours.save(states(1), folder)


def in_background(ours, state, folder, strategy):
    """What Megatron's queue does, without its own collectives, which wait as long as those of the process group."""
    request = ours.save(state, folder, strategy, async_sharded_save=True)
    job, _, nothing = request.async_fn_args
    values = request.preload_fn()
    writer = os.fork()
    if writer == 0:
        with contextlib.suppress(BaseException):
            request.async_fn(job, values, nothing)
        os._exit(0)
    os.waitpid(writer, 0)
    for function in request.finalize_fns:
        function()


def go_on(kept, phase, folder):
    """Does one thing again and again, until something befalls a rank."""
    import tensorferry.megatron as ours

    del kept
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def run():
        if phase == "load two-stage":
            # Two groups, where there are ranks enough.
            groups = [torch.distributed.new_group(members) for members in (range(world // 2), range(world // 2, world))]
            group = torch.distributed.group.WORLD if world == 2 else groups[rank >= world // 2]
            replicas = {name: tensor(name, 0, 1, ROWS, replica_id=rank) for name in ("w", "v")}
        count = 1
        while True:
            count += 1
            if phase == "save":
                ours.save(states(count), folder, ours.save_strategy(timeout=SHORT))
            elif phase == "save in the background":
                in_background(ours, states(count), folder, ours.save_strategy(timeout=SHORT))
            elif phase == "load":
                ours.load(states(0), folder, ours.load_strategy(timeout=SHORT))
            else:
                strategy = ours.TwoStageDataParallelLoadShardedStrategy(group, interface="127.0.0.1", timeout=SHORT)
                ours.load(dict(replicas), folder, strategy)

    return until_struck(run)


def until_struck(run):
    """What ends a call that a signal may end."""

    def be_struck(*_):
        raise RuntimeError("struck")

    signal.signal(signal.SIGUSR1, be_struck)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return outcome(run)
    finally:
        for number in (signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def check(kept, folder):
    """Mends what may be mended; the state is that of one save, whichever."""
    import tensorferry.megatron as ours

    del kept
    if torch.distributed.get_rank() == 0:
        ours.restore_common(folder)
    torch.distributed.barrier()
    found = ours.load(states(0), folder)
    return {float(number) for name in ("w", "v") for number in found[name].unique()} | {found["o"], found["count"]}


def strike(job, victim, way):
    """Strikes a rank, and waits for what all others say, and it, if it can: their texts by rank."""
    began = time.monotonic()
    waits_for = [rank for rank in range(len(job.pids)) if rank != victim]
    if way in ("interrupted", "raises"):
        waits_for = [*waits_for, victim]
    told = {}
    os.kill(job.pids[victim], SIGNALS[way])
    for rank in waits_for:
        while not job._pipes[rank].poll(0.5):
            assert time.monotonic() - began < 40, f"rank {rank} waits, {victim} was {way}"
            if rank == victim:
                # An exception may have been raised where it is lost, in a destructor, say.
                os.kill(job.pids[victim], SIGNALS[way])
        fine, told[rank] = job._pipes[rank].recv()
        assert fine, told[rank]
    return told


def try_to_strike(host, folder, job, phase, victim, way, at_once=False):
    """Has ranks do something until one of them is struck; returns what each says, once the checkpoint was looked at."""
    folder.mkdir()
    try:
        job.run(save, str(folder))
        if at_once:
            os.kill(job.pids[victim], SIGNALS[way])
        job.start(go_on, phase, str(folder))
        time.sleep(0.1 + random.random() * 0.4)
        told = strike(job, victim, way)
        if way == "stopped":
            # It finds out when it goes on.
            os.kill(job.pids[victim], signal.SIGCONT)
            assert job._pipes[victim].poll(40)
            told[victim] = job._pipes[victim].recv()[1]
    finally:
        job.kill()
    for rank, text in told.items():
        own = {"interrupted": "KeyboardInterrupt", "raises": "struck"}.get(way) if rank == victim else None
        assert re.search(own or "^cannot (save|load|write|spread)", text), (phase, way, victim, rank, text)
    (numbers,) = {frozenset(one) for one in host.job(2).run(check, str(folder))}
    assert len(numbers) == 1, (phase, way, numbers)
    return told


def test_all_others_raise_and_the_checkpoint_before_stays(host, tmp_path, pytestconfig):
    random.seed(pytestconfig.getoption("--fuzz-seed"))
    rounds = max(1, pytestconfig.getoption("--kills") * 6 // 10)
    # Each phase and each way come up before any of them does again.
    for number in range(rounds):
        phase, way = PHASES[number % len(PHASES)], list(SIGNALS)[(number + number // len(PHASES)) % len(SIGNALS)]
        world = random.choice((2, 4))
        job = Job(host, world, GROUP_S, over_tcp=True)
        try_to_strike(host, tmp_path / str(number), job, phase, random.randrange(world), way)


def hurry(kept):
    from tensorferry.megatron import together

    del kept
    together._GRACE = 0.5


def test_a_stopped_rank_that_hosts_the_store_makes_nobody_wait_for_ever(host, tmp_path, pytestconfig):
    """As without torchrun: the store does not answer either, whatever its time-out."""
    random.seed(pytestconfig.getoption("--fuzz-seed"))
    for number in range(max(2, pytestconfig.getoption("--kills") // 5)):
        job = Job(host, 2, GROUP_S, hosts=0)
        job.run(hurry)
        # Before it comes, the others cannot even ask the store whether it has.
        told = try_to_strike(host, tmp_path / str(number), job, PHASES[number % 4], 0, "stopped", number % 2 == 1)
        assert number % 2 == 0 or "the store of the process group has not answered within 7 s" in told[1]
