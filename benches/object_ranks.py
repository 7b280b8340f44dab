"""The ranks of benches/objects.py: they save a state to a store, load it, and return the costs."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_ranks import watched
from tensorferry.checkpointing import SyncCheckpointer
from tensorferry.dcp import FileReader, FileWriter

MIB = 1 << 20
#: Into how many blocks each tensor of the large state is cut, and the bytes of one.
BLOCKS, BLOCK = 8, 8 * MIB
#: How long the rows of a large tensor are.
COLUMNS = 8192
#: The small tensors.
SMALL_BYTES = 1024
#: What each contender needs, and the threads that it gets: those with which it was fastest, or that its name says.
OURS, BARE, CHECKPOINTER = "tensorferry", "obstore by hand", "SyncCheckpointer"
KINDS = {
    OURS: "obstore",
    CHECKPOINTER: "obstore",
    BARE: "obstore",
    "s3torchconnector": "s3torchconnector",
    "DCP on s3fs": "s3fs",
}
_BARE_THREADS, _DCP_THREADS = 8, 4
_PIECE = 8 * MIB


def blocks(row: str, count: int, seed: int, rank: int, world: int) -> dict[str, torch.Tensor]:
    """Returns the part of a state that a rank holds, of `count` tensors in all; a large one has `BLOCKS` blocks."""
    generator = torch.Generator().manual_seed(seed)
    if row == "small":
        made = torch.randint(0, 1 << 30, (count, SMALL_BYTES // 4), generator=generator, dtype=torch.int32)
        return {f"t{number}": one.clone() for number, one in enumerate(made)}
    # Of rows: torch's planner makes an index of all rows that a rank has, as large as a state of one column.
    base = torch.randint(0, 1 << 30, (BLOCK // 4 // COLUMNS, COLUMNS), generator=generator, dtype=torch.int32)
    mine = range(rank * BLOCKS // world, (rank + 1) * BLOCKS // world)
    return {f"t{number}": torch.cat([base + (number * BLOCKS + block) for block in mine]) for number in range(count)}


class Rank:
    """One rank of one job, with the state it saves or loads into."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._held: dict[str, torch.Tensor] = {}
        self._state: dict[str, torch.Tensor] = {}
        self._kind = OURS

    def open(self, kind: str, environment: dict[str, str], place: str) -> str | None:
        """Makes it a rank with this client, which saves and loads a little at `place` first: code is loaded then.

        Returns:
            Why it cannot, if the client is not installed.
        """
        os.environ.update(environment)
        torch.serialization.set_crc32_options(False)
        self._kind = kind
        try:
            __import__(KINDS[kind])
        except ImportError as e:
            return f"{KINDS[kind]} is not installed: {e}"
        self.build("small", BLOCKS, 0)
        self.save(place)
        self.load(place)
        # Ranks are forked: the collector would write to, and so copy, every page of what was imported before.
        gc.collect()
        gc.freeze()
        return None

    def build(self, row: str, count: int, seed: int) -> int:
        """Makes the state; returns its bytes on this rank."""
        self._held = blocks(row, count, seed, self._rank, self._world)
        self._state = self._held
        if row != "small" and self._world > 1:
            mesh = init_device_mesh("cpu", (self._world,))
            self._state = {name: DTensor.from_local(one, mesh, [Shard(0)]) for name, one in self._held.items()}
        return sum(one.nbytes for one in self._held.values())

    def clear(self) -> None:
        """Forgets the values of the state."""
        for one in self._held.values():
            one.zero_()

    def equals(self, row: str, count: int, seed: int) -> bool:
        """Returns whether the state is that of `seed`."""
        expected = blocks(row, count, seed, self._rank, self._world)
        return all(torch.equal(one, expected[name]) for name, one in self._held.items())

    def save(self, place: str) -> dict[str, Any]:
        """Saves the state; returns the costs."""
        dist.barrier()
        with watched() as measured:
            if self._kind == BARE:
                self._put(place)
            elif self._kind == CHECKPOINTER:
                SyncCheckpointer().save(place, self._state)
            else:
                dcp.save(self._state, storage_writer=self._writer(place))
        return measured

    def load(self, place: str) -> dict[str, Any]:
        """Loads into the state; returns the costs."""
        dist.barrier()
        with watched() as measured:
            if self._kind == BARE:
                self._get(place)
            elif self._kind == CHECKPOINTER:
                SyncCheckpointer().load(place, self._state)
            else:
                dcp.load(self._state, storage_reader=self._reader(place))
        return measured

    def _writer(self, place: str) -> Any:
        if self._kind == OURS:
            return FileWriter(place)
        if self._kind == "s3torchconnector":
            from s3torchconnector.dcp import S3StorageWriter

            return _reached(S3StorageWriter(os.environ["AWS_REGION"], place, thread_count=_DCP_THREADS, overwrite=True))
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter

        return FsspecWriter(place, thread_count=_DCP_THREADS, sync_files=False)

    def _reader(self, place: str) -> Any:
        if self._kind == OURS:
            return FileReader(place)
        if self._kind == "s3torchconnector":
            from s3torchconnector.dcp import S3StorageReader

            return _reached(S3StorageReader(os.environ["AWS_REGION"], place))
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader

        return FsspecReader(place)

    def _put(self, place: str) -> None:
        """Puts the state as objects of 8 MiB, without a list of them; small tensors are put together first."""
        import obstore

        store, prefix = _bucket(place)
        pieces = self._pieces(self._packed())
        with ThreadPoolExecutor(_BARE_THREADS) as pool:
            one = lambda piece: obstore.put(store, f"{prefix}/{piece[0]}", piece[1], use_multipart=False)  # noqa: E731
            list(pool.map(one, pieces))

    def _get(self, place: str) -> None:
        """Gets what `_put` has put, into the tensors."""
        import obstore

        store, prefix = _bucket(place)
        packed = self._packed(empty=True)

        def one(piece: tuple[str, memoryview]) -> None:
            name, into = piece
            into[:] = memoryview(obstore.get_range(store, f"{prefix}/{name}", start=0, length=len(into)))

        with ThreadPoolExecutor(_BARE_THREADS) as pool:
            list(pool.map(one, self._pieces(packed)))
        if packed[0] is not next(iter(self._held.values())):
            torch._foreach_copy_(list(self._held.values()), list(packed[0].split(SMALL_BYTES // 4)))

    def _packed(self, empty: bool = False) -> list[torch.Tensor]:
        held = list(self._held.values())
        if held[0].nbytes > SMALL_BYTES:
            return held
        return [held[0].new_empty(len(held) * held[0].numel()) if empty else torch.cat(held)]

    def _pieces(self, packed: list[torch.Tensor]) -> list[tuple[str, memoryview]]:
        views = [memoryview(one.numpy()).cast("B") for one in packed]
        pieces = chain.from_iterable((view[at : at + _PIECE] for at in range(0, len(view), _PIECE)) for view in views)
        return [(f"{self._rank}-{number}", piece) for number, piece in enumerate(pieces)]

    def end(self) -> None:
        """Nothing is left to do."""


def _bucket(place: str) -> tuple[Any, str]:
    from obstore.store import from_url

    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    # Without SHA-256 of all bytes, which would take most of its time.
    options = {"allow_http": True, "timeout": "600s"}
    return from_url(f"s3://{bucket}", unsigned_payload=True, client_options=options), prefix


def _reached(storage: Any) -> Any:
    """Has a storage of s3torchconnector reach the server of the environment, for which it has no argument."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    storage.fs._client = S3Client(
        os.environ["AWS_REGION"],
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    return storage
