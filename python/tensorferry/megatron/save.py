"""The strategy that saves: into tensorferry's files, or, behind a ``PeerWriter``, from memory to other jobs."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .. import _validate
from ..dcp.file_writer import FileWriter, RankFile
from ..dcp.index import EntryRef
from ..dcp.peer_writer import PeerWriter
from ..errors import InvalidArgument
from ..storage.whole_files import INDEX_BYTES, read_whole, write_whole
from . import common, shards
from .interfaces import AsyncSaveShardedStrategy
from .release import (
    COMMON,
    CheckpointingException,
    ShardedObject,
    TorchDistSaveShardedStrategy,
    async_request_class,
    is_main_replica,
)
from .together import PATIENCE, OfRanks, Together

logger = logging.getLogger("tensorferry")

#: What ``metadata.json`` says of a checkpoint that this strategy has written.
BACKEND = "tensorferry"
VERSION = 1


class SaveStrategy(OfRanks, TorchDistSaveShardedStrategy, AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Saves a sharded state; :func:`save_strategy` makes it.

    It derives from Megatron's own strategy because releases since 0.17 silently replace every other class.

    Attributes:
        peers: publishes the state, if it is not written to files
        process_group: the ranks that save together
        timeout: how long a rank waits for the others to begin, and to finish a save in the background
    """

    def __init__(
        self,
        peers: PeerWriter | None,
        threads: int | None,
        cached: bool | None,
        process_group: Any,
        timeout: timedelta = PATIENCE,
    ) -> None:
        TorchDistSaveShardedStrategy.__init__(self, BACKEND, VERSION)
        self.peers = peers
        self._threads = threads
        self._cached = cached
        self.process_group = process_group
        self.timeout = timeout

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Always true."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Saves the shards that this rank is the main replica of. All ranks call it.

        Raises:
            CheckpointingException: a shard is missing, is there twice or cannot be saved, or the system refuses; it is
                raised on all ranks, and the checkpoint that was in the folder before stays
        """
        ranks = self._ranks()
        with ranks.counting_on_each_other():
            saving = self._begin(ranks, sharded_state_dict, checkpoint_dir)
            saving.finish(ranks, lambda: saving.writer.write_data(saving.plan, saving.data).value())
            if self.peers is not None:
                _check_published(ranks, self.peers)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path, async_strategy: str | None = None) -> Any:
        """Plans a save, and returns the request that carries it out.

        The request writes this rank's file in another process, forked or spawned, and its last function commits the
        checkpoint. Tensors may change once the request is scheduled. With a ``PeerWriter`` there is nothing to be
        written: the state is published when this returns.

        Args:
            sharded_state_dict: the state
            checkpoint_dir: the folder
            async_strategy: which of Megatron's queues the request is for: ``"mcore"`` or ``"nvrx"``

        Raises:
            CheckpointingException: as for :meth:`save`. The request's last function raises it if the file could not be
                written
        """
        request = async_request_class(async_strategy)
        if self.peers is not None:
            self.save(sharded_state_dict, checkpoint_dir)
            return request(None, (), [])
        ranks = self._ranks()
        folders: list[str] = []
        with ranks.counting_on_each_other():
            saving = self._begin(ranks, sharded_state_dict, checkpoint_dir, folders)
        assert isinstance(saving.writer, FileWriter)
        job = _Job(saving.writer.rank_file(), saving.plan, *folders)
        # If nobody calls the last function.
        weakref.finalize(saving, _remove, job.folder, os.getpid())
        held = _Held(saving.data.values)

        def finish() -> None:
            # They have gone separate ways since: one that has failed elsewhere does not come.
            ranks = Together(self.process_group, self.timeout)
            with ranks.counting_on_each_other():
                saving.finish(ranks, job.results)

        return request(write, (job, None, None), [finish], preload_fn=held.on_host)

    def _begin(
        self, ranks: Together, sharded_state_dict: Any, checkpoint_dir: str | Path, folders: list[str] | None = None
    ) -> _Saving:
        """Plans a save together with the other ranks; adds to ``folders`` one for the results of another process."""
        where = str(checkpoint_dir)
        writer: Any = self.peers or FileWriter(checkpoint_dir, threads=self._threads, cached=self._cached)
        data = _Data()
        shared: bytes | None = None
        own: SavePlan | None = None
        decided: Metadata | None = None

        def plan() -> SavePlan:
            nonlocal shared, own
            writer.reset(None if self.peers else checkpoint_dir)
            writer.set_up_storage_writer(ranks.coordinates, rank=ranks.rank, use_collectives=True)
            items, state = _items(sharded_state_dict, data)
            if ranks.coordinates:
                shared = common.encoded(state) if state is not None else common.read(Path(where))
                if shared is not None:
                    bare = torch.frombuffer(bytearray(shared), dtype=torch.uint8)
                    items.append(data.add_tensor(COMMON, shards.Box((0,), tuple(bare.shape)), bare.shape, bare))
            own = writer.prepare_local_plan(SavePlan(items))
            if folders is not None:
                folders.append(tempfile.mkdtemp(prefix="tensorferry-"))
            return own

        def decide(plans: list[SavePlan]) -> list[Any]:
            nonlocal decided
            decided = _metadata(plans)
            return [one.storage_data for one in writer.prepare_global_plan(plans)]

        try:
            stored = ranks.step(f"save into {where}" if self.peers is None else "publish", plan, decide)
        except BaseException:
            for folder in folders or ():
                _remove(folder, os.getpid())
            raise
        assert own is not None
        return _Saving(
            writer=writer,
            plan=dataclasses.replace(own, storage_data=stored[ranks.rank]),
            data=data,
            metadata=decided,
            common=(Path(where), shared) if self.peers is None and shared is not None else None,
        )


def save_strategy(
    *,
    peers: PeerWriter | None = None,
    threads: int | None = None,
    cached: bool | None = None,
    process_group: Any = None,
    timeout: timedelta = PATIENCE,
) -> SaveStrategy:
    """Returns a strategy for ``dist_checkpointing.save(..., sharded_strategy=)``, in every release.

    Args:
        peers: publish the state from memory with this writer, for jobs that load it with ``load_strategy(peers=)``,
            instead of writing files
        threads: as for ``FileWriter``
        cached: as for ``FileWriter``
        process_group: the ranks that save together; ``None`` means all. It may be of gloo where the default one is of
            NCCL
        timeout: how long a rank waits for the others to begin the same save, and to finish one in the background

    Raises:
        InvalidArgument: an argument cannot be used; the message names it
    """
    if peers is not None and not isinstance(peers, PeerWriter):
        raise InvalidArgument(f"peers must be a PeerWriter, not a {type(peers).__name__}")
    FileWriter(".", threads=threads, cached=cached)
    _validate.seconds("timeout", timeout)
    return SaveStrategy(peers, threads, cached, process_group, timeout)


@dataclasses.dataclass
class _Saving:
    """A save that is planned.

    Attributes:
        writer: writes or publishes
        plan: what this rank writes
        data: the data of its items
        metadata: describes the whole checkpoint, on the coordinator
        common: the folder and the bytes of ``common.pt``, on the coordinator
    """

    writer: Any
    plan: SavePlan
    data: _Data
    metadata: Metadata | None
    common: tuple[Path, bytes] | None

    def finish(self, ranks: Together, write: Any) -> None:
        """Calls ``write``, which returns the results of this rank, on all ranks; then commits the checkpoint."""

        def commit(results: list[list[WriteResult]]) -> Any:
            assert self.metadata is not None
            if self.common is not None:
                common.write(*self.common)
            self.writer.finish(self.metadata, results)
            return self.metadata.storage_meta

        # Unpickling what a PeerWriter's commit returns has every rank publish its part.
        ranks.step("write the checkpoint", write, commit)


def _check_published(ranks: Together, peers: PeerWriter) -> None:
    """Has no rank publish anything if one of them could not publish its part after all had succeeded.

    Raises:
        CheckpointingException: one of them could not; it is raised on all
    """
    try:
        ranks.every("publish", peers.metadata)
    except CheckpointingException:
        # Without that part, whoever loads would wait for it.
        peers.withdraw()
        raise


class _Data:
    """The data of the items of a plan: torch's planner, as far as a writer calls it.

    Attributes:
        values: tensors and serialized objects, in the order of the items
    """

    def __init__(self, values: Sequence[torch.Tensor | bytes] = ()) -> None:
        self.values: list[torch.Tensor | bytes] = list(values)
        self._numbers: dict[int, int] = {}

    def add_tensor(self, key: str, box: shards.Box, shape: Any, data: torch.Tensor) -> WriteItem:
        """Adds a part of a tensor; returns its item. The item's index counts the items."""
        about = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)),
            properties=TensorProperties(dtype=data.dtype),
            size=torch.Size(shape),
        )
        self.values.append(data)
        index = MetadataIndex(key, torch.Size(box.offsets), len(self.values) - 1)
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=about)

    def add_object(self, key: str, data: bytes) -> WriteItem:
        """Adds a serialized object; returns its item."""
        self.values.append(data)
        index = MetadataIndex(key, None, len(self.values) - 1)
        return WriteItem(index=index, type=WriteItemType.BYTE_IO)

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Returns the data of an item."""
        value = self.values[item.index.index]
        return io.BytesIO(value) if isinstance(value, bytes) else value


def _items(state: Any, data: _Data) -> tuple[list[WriteItem], Any]:
    """Returns the items that this rank saves, and the common state if it is among the leaves."""
    items: list[WriteItem] = []
    shared = None
    for path, leaf in shards.leaves(state):
        if isinstance(leaf, ShardedObject):
            if leaf.key == COMMON:
                shared = leaf.data
            elif is_main_replica(leaf.replica_id):
                items.append(data.add_object(leaf.unique_key, common.encoded(leaf.data)))
            continue
        if leaf.key == COMMON:
            raise CheckpointingException(f"{path}: the key {COMMON!r} is reserved for the common state")
        shards.check(leaf)
        if not is_main_replica(leaf.replica_id):
            continue
        if leaf.data is None:
            raise CheckpointingException(f"{leaf.key}: the main replica of a shard has no data to save (at {path})")
        box = shards.box_of(leaf)
        if box.numel or not all(leaf.global_shape):
            items.append(data.add_tensor(leaf.key, box, leaf.global_shape, shards.with_axes(leaf)))
    return items, shared


def _metadata(plans: list[SavePlan]) -> Metadata:
    """Describes the checkpoint that the items of all ranks make up.

    Raises:
        CheckpointingException: they make up none; the key is named
    """
    found: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key = item.index.fqn
            known = found.get(key)
            if item.type == WriteItemType.BYTE_IO:
                if known is not None:
                    raise CheckpointingException(
                        f"Duplicate ShardedObject keys: {key} has two main replicas, one of them on rank {rank}: give "
                        "the others another replica_id than 0"
                    )
                found[key] = BytesStorageMetadata()
                continue
            about = item.tensor_data
            if known is None:
                known = found[key] = TensorStorageMetadata(properties=about.properties, size=about.size, chunks=[])
            if not isinstance(known, TensorStorageMetadata):
                raise CheckpointingException(f"{key} is a tensor on rank {rank} and an object on another one")
            if (known.size, known.properties.dtype) != (about.size, about.properties.dtype):
                raise CheckpointingException(
                    f"{key}: the ranks do not agree on it: it is {about.properties.dtype} {list(about.size)} on rank "
                    f"{rank}, and {known.properties.dtype} {list(known.size)} on another one"
                )
            if all(about.size) or not known.chunks:
                known.chunks.append(about.chunk)
    for key, about in found.items():
        if isinstance(about, TensorStorageMetadata):
            boxes = [shards.Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in about.chunks]
            shards.check_cover(key, tuple(about.size), boxes, "the main replicas of all ranks")
    return Metadata(found)


@dataclasses.dataclass(frozen=True)
class _Job:
    """What another process needs to write this rank's file, and how its results come back.

    Attributes:
        file: the file
        plan: the items
        folder: a folder of this process alone, in which the results appear
    """

    file: RankFile
    plan: SavePlan
    folder: str

    def results(self) -> list[WriteResult]:
        """Returns the results of :func:`write`, and removes the folder.

        Raises:
            CheckpointingException: the other process has not written the file, or this save has been finished before
        """
        if not Path(self.folder).is_dir():
            raise CheckpointingException(
                f"the save that was to write {self.file.path} has been finished before: each request is carried out "
                "once. Save again"
            )
        try:
            told = json.loads(read_whole(Path(self.folder) / "results.json", INDEX_BYTES))
        except FileNotFoundError:
            raise CheckpointingException(
                f"the process that was to write {self.file.path} has ended without writing it: its own messages say "
                "why. Save again"
            ) from None
        finally:
            shutil.rmtree(self.folder)
        if told["error"] is not None:
            raise CheckpointingException(told["error"])
        refs = [EntryRef(*ref) for ref in told["entries"]]
        return [WriteResult(item.index, ref.nbytes, ref) for item, ref in zip(self.plan.items, refs, strict=True)]


def _remove(folder: str, owner: int) -> None:
    """Removes a folder, in the process that made it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


class _Held:
    """The data of a plan on its way to the process that writes it.

    That process is forked, and has all memory of this one as it was then; or it is spawned, and the data is pickled.
    torch would move a pickled tensor's memory into a file that both processes map: what is pickled here is a copy, so
    that the tensors of the trainer stay where they are, and may change.
    """

    def __init__(self, values: Sequence[torch.Tensor | bytes]) -> None:
        self._values = list(values)

    def __getstate__(self) -> dict[str, Any]:
        """Returns copies of the tensors in host memory; others are shared as torch does it."""
        copies = [
            value.clone() if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value
            for value in self._values
        ]
        return {"_values": copies}

    def on_host(self) -> list[torch.Tensor | bytes]:
        """Returns the data, with the tensors of accelerators copied to the host."""
        return [value.to("cpu") if isinstance(value, torch.Tensor) else value for value in self._values]


def write(job: _Job, values: list[torch.Tensor | bytes], nothing: None) -> None:
    """Writes a rank's file, in a process of its own; Megatron passes three arguments and replaces the second.

    It raises nothing: Megatron's persistent worker would end, and the trainer would wait for it for ever.
    """
    del nothing
    told: dict[str, Any] = {"error": None, "entries": []}
    try:
        if job.plan.items:
            _, results = job.file.write(job.plan, _Data(values))
            told["entries"] = [list(result.storage_data) for result in results]
    except Exception as e:
        told["error"] = f"{type(e).__name__}: {e}"
    folder = Path(job.folder)
    try:
        write_whole(folder / "results.json", json.dumps(told).encode(), folder / "results.partial", synced=False)
    except OSError:
        # The last function raises then. If the folder is gone, nobody waits for the results any more.
        logger.exception("cannot tell the trainer what was written")
