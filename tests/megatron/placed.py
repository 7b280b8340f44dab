"""Jobs whose ranks use one release of megatron-core, and sharded states as Megatron makes them, for any placement.

Importing Megatron takes 6 s of CPU after torch's 7. So each release has a host process, which imports both once, and
from which the ranks of all jobs are forked.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing.connection
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path

import pytest
import ranks
import torch

RELEASES = tuple(os.environ.get("TENSORFERRY_MEGATRON_RELEASES", "0.16.1,0.19.2").split(","))
_PATIENCE_S = 60


def folder_of(release):
    """Where the Makefile puts a release of megatron-core."""
    return Path(sys.prefix) / f"megatron-{release}"


class Host:
    """A process with a release of megatron-core, from which ranks are forked."""

    def __init__(self, release):
        if not folder_of(release).is_dir():
            pytest.skip(f"megatron-core {release} is not installed: make build")
        self.release = release
        self._folder = tempfile.TemporaryDirectory()
        self._listener = Listener(f"{self._folder.name}/host", "AF_UNIX")
        # No script and no module: processes that Megatron spawns would import it again.
        code = (
            f"import sys; sys.path[:] = {[str(folder_of(release)), *sys.path]!r}\n"
            f"import placed; placed.serve({self._listener.address!r})"
        )
        self._process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdin=subprocess.DEVNULL)
        self._orders = None
        self._jobs = {}

    def _started(self):
        """Waits until the host has imported everything; a test without time for that leaves it to the next."""
        while self._orders is None:
            if multiprocessing.connection.wait([self._listener._listener._socket], 1):
                self._orders = self._listener.accept()
            assert self._process.poll() is None, f"the host of {self.release} has ended with {self._process.poll()}"

    def job(self, world):
        """The job of so many ranks, made when it is first asked for."""
        if world not in self._jobs or not self._jobs[world].alive:
            self._jobs[world] = Job(self, world)
        return self._jobs[world]

    def fork(self, world, store, patience):
        """Forks the ranks of a job; returns a connection to each, and its process id."""
        self._started()
        self._orders.send((world, store, patience))
        told = {}
        for _ in range(world):
            pipe = self._listener.accept()
            rank, pid = pipe.recv()
            told[rank] = (pipe, pid)
        return [told[rank] for rank in range(world)]

    def end_jobs(self):
        """Ends all ranks; the next call of :meth:`job` forks new ones."""
        for job in self._jobs.values():
            job.end()

    def end(self):
        """Ends all ranks and the host."""
        self.end_jobs()
        if self._orders is None:
            self._process.kill()
        else:
            self._orders.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.close()
        self._folder.cleanup()


def serve(address):
    """Runs in the host: forks ranks as they are asked for."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    import tensorferry.megatron  # noqa: F401

    # Megatron's own strategy would start a process for it on each rank, which imports torch once more.
    filesystem_async._results_queue = queue.Queue()

    # Megatron calls these without asking for a GPU.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with Client(address) as orders, contextlib.suppress(EOFError):
        while True:
            world, store, patience = orders.recv()
            for rank in range(world):
                if os.fork() == 0:
                    orders.close()
                    _be(rank, world, store, patience, address)


def _be(rank, world, store, patience, address):
    """Is a rank, and ends the process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Client(address) as pipe:
        pipe.send((rank, os.getpid()))
        with contextlib.suppress(EOFError, OSError):
            if isinstance(store, tuple):
                hosts, port = store
                store = torch.distributed.TCPStore("127.0.0.1", port, is_master=rank == hosts, wait_for_workers=False)
            ranks._serve(pipe, rank, world, store, patience, _Rank)
    os._exit(0)


class _Rank:
    def __init__(self, rank, world):
        del rank, world
        self.kept = {}

    def run(self, function, *arguments):
        return function(self.kept, *arguments)

    def end(self):
        pass


class Job(ranks.Job):
    """``world`` ranks; a call gives what each rank returns. :meth:`Host.job` makes those that are used again.

    ``patience`` is the time-out of the process group; with ``over_tcp``, its store is in this process, as torchrun has
    it in its own, or in that of the rank ``hosts``. A rank that is stopped while it holds the lock of a store in a file
    stops all.
    """

    def __init__(self, host, world, patience=_PATIENCE_S, over_tcp=False, hosts=None):
        self._name, self._patience = f"{world} ranks", _PATIENCE_S
        self._folder = tempfile.TemporaryDirectory()
        store = self._store = None
        if hosts is not None:
            with socket.create_server(("127.0.0.1", 0)) as taken:
                store = (hosts, taken.getsockname()[1])
        elif over_tcp:
            self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store = (None, self._store.port)
        forked = host.fork(world, store or f"{self._folder.name}/store", patience)
        self._pipes = [pipe for pipe, _ in forked]
        self.pids = [pid for _, pid in forked]
        self.alive = True

    def run(self, function, *arguments):
        """Calls a function on all ranks; if one of them fails, the job is ended, since others may hang."""
        try:
            return self("run", function, *arguments)
        except BaseException:
            self.kill()
            raise

    def start(self, function, *arguments):
        """Calls a function on all ranks without waiting for it."""
        for pipe in self._pipes:
            pipe.send(("run", (function, *arguments)))

    def kill(self):
        """Kills all ranks."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.end()

    def end(self):
        """Ends the ranks; those that do not answer are killed."""
        if not self.alive:
            return
        self.alive = False
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
                pipe.close()
        deadline = time.monotonic() + 10
        for pid in self.pids:
            while _is_there(pid):
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
        self._folder.cleanup()


def _is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Placement:
    """Where one rank is: tensor, pipeline and data parallel."""

    def __init__(self, tp, pp, dp):
        rank = torch.distributed.get_rank()
        self.tp, self.pp, self.dp = tp, pp, dp
        self.tp_rank, self.dp_rank, self.pp_rank = rank % tp, rank // tp % dp, rank // tp // dp

    def group(self):
        """The ranks that hold the same shards; all ranks call it."""
        made = None
        for pp_rank in range(self.pp):
            for tp_rank in range(self.tp):
                members = [tp_rank + self.tp * (i + self.dp * pp_rank) for i in range(self.dp)]
                group = torch.distributed.new_group(members)
                if (tp_rank, pp_rank) == (self.tp_rank, self.pp_rank):
                    made = group
        return made


LAYERS, WIDTH = 4, 24


def whole(shape, dtype, seed=0):
    """The whole tensor of which ranks hold shards; every element tells where it belongs."""
    numbers = (torch.arange(math.prod(shape)) + seed) % 251
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return numbers.to(torch.uint8).view(dtype).reshape(shape)
    return numbers.to(dtype).reshape(shape)


def sharded_state(place, dtype=torch.float32, value=0, empty=False, gap=False):
    """A state of every kind of leaf.

    ``value`` shifts all numbers; with ``empty`` the data are zeros, to be loaded; with ``gap`` one of several ranks has
    no element of the optimizer's tensor, which Megatron's own strategy cannot save: it loses the next rank's then.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensorFactory,
    )

    def data(of):
        return torch.zeros_like(of) if empty else of.clone()

    replicas = (0, 0, place.dp_rank)
    per_stage = LAYERS // place.pp
    layers = []
    for i in range(per_stage):
        layer = place.pp_rank * per_stage + i
        column = whole((LAYERS, 2 * WIDTH, WIDTH), dtype, value)[layer].chunk(place.tp, 0)[place.tp_rank]
        row = whole((LAYERS, WIDTH, 2 * WIDTH), dtype, value + 1)[layer].chunk(place.tp, 1)[place.tp_rank]
        bias = whole((LAYERS, WIDTH), dtype, value + 2)[layer]
        at = (0, layer, LAYERS)
        layers.append(
            {
                "column": ShardedTensor.from_rank_offsets(
                    "layers.column",
                    data(column),
                    at,
                    (1, place.tp_rank, place.tp),
                    replica_id=replicas,
                    prepend_axis_num=1,
                ),
                # Not contiguous, as it is cut.
                "row": ShardedTensor.from_rank_offsets(
                    "layers.row",
                    torch.zeros_like(row) if empty else row,
                    at,
                    (2, place.tp_rank, place.tp),
                    replica_id=replicas,
                    prepend_axis_num=1,
                ),
                "bias": ShardedTensor.from_rank_offsets(
                    "layers.bias", data(bias), at, replica_id=(0, place.tp_rank, place.dp_rank), prepend_axis_num=1
                ),
                "extra": ShardedObject(
                    "layers.extra",
                    None if empty else {"layer": layer, "value": value},
                    (LAYERS,),
                    (layer,),
                    replica_id=(0, place.tp_rank, place.dp_rank),
                ),
            }
        )
    # The distributed optimizer: a 1-D tensor cut anywhere among all ranks of the job.
    world = place.tp * place.pp * place.dp
    rank = place.tp_rank + place.tp * (place.dp_rank + place.dp * place.pp_rank)
    cuts = [0, *(31 * i + 7 * (i % 2) for i in range(1, world)), 31 * 17]
    if gap and world > 2:
        cuts[2] = cuts[1]
    flat = whole((31 * 17,), dtype, value + 3)[cuts[rank] : cuts[rank + 1]]
    uneven = ShardedTensor(
        "optimizer.flat", data(flat), dtype, tuple(flat.shape), (31 * 17,), (cuts[rank],), None, replica_id=0
    )

    half = whole((2 * WIDTH, 8), dtype, value + 4).view(2, WIDTH, 8).chunk(place.tp, 1)[place.tp_rank].reshape(-1, 8)

    def build(key, tensor, replica_id, flattened_range):
        del flattened_range
        parts = tensor.chunk(2, 0)
        return [
            ShardedTensor.from_rank_offsets(
                key, part, (0, place.tp_rank + i * place.tp, 2 * place.tp), replica_id=replica_id
            )
            for i, part in enumerate(parts)
        ]

    gated = ShardedTensorFactory(
        "gated", data(half), build, lambda parts: torch.cat(parts), (0, place.pp_rank, place.dp_rank)
    )
    outside = (0, place.tp_rank, place.pp_rank * 99 + place.dp_rank)
    padded = ShardedTensor.from_rank_offsets(
        "vocabulary", data(whole((20, 3), dtype, value + 5)), replica_id=outside, allow_shape_mismatch=True
    )
    scalar = ShardedTensor.from_rank_offsets("scalar", data(whole((1,), dtype, value + 6)[0]), replica_id=outside)
    return {
        "layers": layers,
        "optimizer": {0: uneven, "gated": gated},
        "padded": padded,
        "scalar": scalar,
        "iteration": 100 + value,
        "args": {"lr": 0.1, "names": ["a", "b"]},
        "local": LocalNonpersistentObject(f"rank {rank}"),
    }


def digest(state):
    """Whatever a loaded state holds, as text that can be compared."""
    if isinstance(state, dict):
        return {str(key): digest(part) for key, part in state.items()}
    if isinstance(state, list):
        return [digest(part) for part in state]
    if isinstance(state, torch.Tensor):
        raw = state.detach().contiguous().reshape(-1).view(torch.uint8) if state.numel() else state.reshape(-1)
        return f"{state.dtype} {list(state.shape)} {raw.tolist()}"
    return repr(state)


def expected(place, dtype=torch.float32, value=0, gap=False):
    """The digest of the state that a load must give: that of the state itself."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedTensorFactory

    def plain(part):
        if isinstance(part, dict):
            return {key: plain(inner) for key, inner in part.items()}
        if isinstance(part, list):
            return [plain(inner) for inner in part]
        if isinstance(part, (ShardedBase, ShardedTensorFactory)):
            return part.data
        return part.unwrap() if isinstance(part, LocalNonpersistentObject) else part

    return digest(plain(sharded_state(place, dtype, value, gap=gap)))


def perform(request, keep):
    """Has Megatron's queue perform a save in the background, while the trainer goes on and changes ``keep``."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    calls = AsyncCallsQueue()
    calls.schedule_async_request(request)
    keep.fill_(99)
    while not calls.maybe_finalize_async_calls(blocking=False):
        time.sleep(0.01)
    calls.close()


def save(kept, folder, value=3):
    """Saves the state of two ranks, which keep their placement."""
    import tensorferry.megatron as ours

    kept["place"] = Placement(1, 1, 2)
    ours.save(sharded_state(kept["place"], value=value), folder)
