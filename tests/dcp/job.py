"""Jobs of several ranks: processes that run functions together, with a gloo process group of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

_PATIENCE_S = 90
#: Imported once and not in each rank. Only what is installed: the server that forks the ranks knows no other folders.
_PRELOAD = [
    "torch._dynamo",
    "torch.distributed._shard.sharded_tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tensorferry.dcp",
    "torchft.checkpointing",
]


def context():
    """How processes start here: forked off one that has torch already. The first one to ask starts it."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOAD)
    return found


def _rank(pipe, rank, world, store):
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world,
        store=dist.FileStore(store, world),
        timeout=timedelta(seconds=_PATIENCE_S),
    )
    kept = {}
    with contextlib.suppress(EOFError):
        while (order := pipe.recv()) is not None:
            function, arguments = order
            try:
                pipe.send((True, function(kept, *arguments)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Job:
    """``world`` processes; ``run`` has all of them call a function with a dict of their own and what it is given."""

    def __init__(self, world, daemon=True):
        forking = context()
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = forking.Pipe()
            store = os.path.join(self._folder.name, "store")
            process = forking.Process(target=_rank, args=(theirs, rank, world, store), daemon=daemon)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function, *arguments):
        """What each rank returns; an assertion error with every rank's traceback if one fails."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(_PATIENCE_S), f"rank {rank} of {self.world} does not answer in {function.__name__}"
            fine, result = pipe.recv()
            (results if fine else failures).append(result)
        assert not failures, f"{function.__name__}, ranks of {self.world}:\n" + "\n".join(failures)
        return results

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()
