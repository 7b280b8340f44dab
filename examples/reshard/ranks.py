"""A job of several ranks: processes with a process group of their own, each with an object whose methods are called."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

#: Imported once, by the process that all ranks are forked from. Only installed modules: it knows no other folders.
_PRELOAD = [
    "torch._dynamo",
    "torch.distributed._shard.sharded_tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tensorferry.dcp",
]


class RankFailed(Exception):
    """A rank failed to run a method, or did not answer in time."""


def context() -> Any:
    """Return the multiprocessing context; the first call starts the process that the ranks are forked from."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOAD)
    return found


class Job:
    """The processes of a job; a call goes to all its ranks and gives what each returns.

    Args:
        name: what messages call it
        world: how many ranks it has
        make: makes the object of a rank from its number and their count
        patience: how many seconds an answer may take
        daemon: whether the ranks may have no processes of their own
    """

    def __init__(
        self, name: str, world: int, make: Callable[[int, int], Any], patience: float = 120, daemon: bool = True
    ) -> None:
        """Starts the processes."""
        forking = context()
        self._name, self._patience = name, patience
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        # The ranks log as their parent does, if it has set logging up.
        level = logging.root.level if logging.root.handlers else None
        for rank in range(world):
            ours, theirs = forking.Pipe()
            arguments = (theirs, rank, world, str(Path(self._folder.name) / "store"), patience, make, level)
            process = forking.Process(target=_serve, args=arguments, daemon=daemon)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __call__(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method` on every rank and return their results."""
        for pipe in self._pipes:
            pipe.send((method, arguments))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self._patience):
                raise RankFailed(f"rank {rank} of {self._name} does not answer to {method!r}")
            try:
                fine, result = pipe.recv()
            except EOFError:
                fine, result = False, "it is gone"
            if fine:
                results.append(result)
            else:
                failures.append(f"rank {rank} of {self._name} failed in {method!r}: {result}")
        if failures:
            raise RankFailed("\n".join(failures))
        return results

    def end(self) -> None:
        """Ends its processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> Job:
        """Return the job."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends its processes."""
        self.end()


def _serve(
    orders: Connection,
    rank: int,
    world: int,
    store: str | dist.Store,
    patience: float,
    make: Callable[[int, int], Any],
    level: int | None = None,
) -> None:
    """Run in a rank: call the requested methods until the requests end."""
    if level is not None:
        logging.basicConfig(level=level, format=f"rank {rank}: %(levelname)s:%(name)s:%(message)s")
    os.environ |= {"OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    timeout = timedelta(seconds=patience)
    if isinstance(store, str):
        store = dist.FileStore(store, world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=timeout)
    held = make(rank, world)
    with contextlib.suppress(EOFError):
        while (order := orders.recv()) is not None:
            method, arguments = order
            try:
                orders.send((True, getattr(held, method)(*arguments)))
            except BaseException:  # torch's CheckpointException is not an Exception
                orders.send((False, traceback.format_exc()))
    held.end()
    dist.destroy_process_group()
