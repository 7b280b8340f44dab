"""The strategy that saves: into tensorferry's files, or, behind a ``PeerWriter``, from memory to other jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import weakref
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from .. import _validate
from ..dcp.file_reader import FileReader
from ..dcp.file_writer import FileWriter
from ..dcp.peer_writer import PeerWriter
from ..errors import TensorferryError
from ..storage.boxes import Box
from ..storage.places import AnyPlace
from . import common
from .interfaces import AsyncSaveShardedStrategy
from .loading import common_in
from .release import (
    COMMON,
    CheckpointingException,
    TorchDistSaveShardedStrategy,
    async_request_class,
)
from .save_job import FileJob, HeldData, remove_folder, write
from .save_plan import SaveData, items_of, metadata_of
from .together import PATIENCE, OfRanks, Together

#: What ``metadata.json`` says of a checkpoint that this strategy has written.
BACKEND = "tensorferry"
VERSION = 1


class SaveStrategy(OfRanks, TorchDistSaveShardedStrategy, AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Saves a sharded state: for ``dist_checkpointing.save(..., sharded_strategy=save_strategy())``, in every release.

    It derives from Megatron's own strategy because releases since 0.17 silently replace every other class.

    Args:
        peers: publish the state from memory with this writer, for jobs that load it with ``load_strategy(peers=)``,
            instead of writing files
        threads: as for ``FileWriter``
        cached: as for ``FileWriter``
        process_group: the ranks that save together; ``None`` means all. It may be of gloo where the default one is of
            NCCL
        timeout: how long a rank waits for the others to begin the same save, and to finish one in the background
        store_options: options of obstore for a store, as for ``FileWriter``

    Raises:
        InvalidArgument: an argument cannot be used; the message names it

    Attributes:
        peers: publishes the state, if it is not written to files
        process_group: the ranks that save together
        timeout: how long a rank waits for the others to begin, and to finish a save in the background
    """

    def __init__(
        self,
        *,
        peers: PeerWriter | None = None,
        threads: int | None = None,
        cached: bool | None = None,
        process_group: Any = None,
        timeout: timedelta = PATIENCE,
        store_options: Mapping[str, Any] | None = None,
    ) -> None:
        if peers is not None:
            _validate.instance("peers", peers, PeerWriter, "a PeerWriter")
        FileWriter(".", threads=threads, cached=cached)
        _validate.seconds("timeout", timeout)
        TorchDistSaveShardedStrategy.__init__(self, BACKEND, VERSION)
        self.peers = peers
        self._threads = threads
        self._cached = cached
        self._store_options = store_options
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
            InvalidArgument: ``checkpoint_dir`` cannot be used; it is raised on this rank alone
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
            checkpoint_dir: the folder, or the URL of a place in an object store
            async_strategy: which of Megatron's queues the request is for: ``"mcore"``, which ``None`` means as well, or
                ``"nvrx"``

        Raises:
            CheckpointingException: as for :meth:`save`; or there is no such queue, or it needs a package that is not
                installed. The request's last function raises it on all ranks if the file of one of them could not be
                written
            InvalidArgument: as for :meth:`save`
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
        job = FileJob(saving.writer.rank_file(), saving.plan, *folders)
        # If nobody calls the last function.
        weakref.finalize(saving, remove_folder, job.folder, os.getpid())
        held = HeldData(saving.data.values)

        def written() -> list[WriteResult]:
            results = job.results()
            saving.writer.go_on()
            return results

        def finish() -> None:
            # Since the write began, ranks have run on their own: one that has failed meanwhile does not come here.
            ranks = Together(self.process_group, self.timeout)
            with ranks.counting_on_each_other():
                saving.finish(ranks, written)

        return request(write, (job, None, None), [finish], preload_fn=held.on_host)

    def _begin(
        self, ranks: Together, sharded_state_dict: Any, checkpoint_dir: str | Path, folders: list[str] | None = None
    ) -> _Saving:
        """Plans a save together with the other ranks; adds to ``folders`` one for the results of another process.

        If that fails, the folder is removed.

        Raises:
            CheckpointingException, InvalidArgument: as for :meth:`save`
        """
        where = str(checkpoint_dir)
        writer: Any = self.peers or FileWriter(
            checkpoint_dir, threads=self._threads, cached=self._cached, store_options=self._store_options
        )
        data = SaveData()
        shared: bytes | None = None
        own: SavePlan | None = None
        decided: Metadata | None = None

        def plan_own() -> SavePlan:
            nonlocal shared, own
            writer.reset(None if self.peers else checkpoint_dir)
            writer.set_up_storage_writer(ranks.coordinates, rank=ranks.rank, use_collectives=True)
            items, state = items_of(sharded_state_dict, data)
            if ranks.coordinates:
                shared = common.encoded(state) if state is not None else common.read(self.place(checkpoint_dir))
                if shared is not None:
                    bare = torch.frombuffer(bytearray(shared), dtype=torch.uint8)
                    items.append(data.add_tensor(COMMON, Box((0,), tuple(bare.shape)), bare.shape, bare))
            own = writer.prepare_local_plan(SavePlan(items))
            if folders is not None:
                folders.append(tempfile.mkdtemp(prefix="tensorferry-"))
            return own

        def decide(plans: list[SavePlan]) -> list[Any]:
            nonlocal decided
            decided = metadata_of(plans)
            return [one.storage_data for one in writer.prepare_global_plan(plans)]

        try:
            stored = ranks.step(f"save into {where}" if self.peers is None else "publish", plan_own, decide)
        except BaseException:
            for folder in folders or ():
                remove_folder(folder, os.getpid())
            raise
        assert own is not None
        return _Saving(
            writer=writer,
            plan=dataclasses.replace(own, storage_data=stored[ranks.rank]),
            data=data,
            metadata=decided,
            common=(self.place(checkpoint_dir), shared) if self.peers is None and shared is not None else None,
        )


#: What users call, in every release.
save_strategy = SaveStrategy


@dataclasses.dataclass
class _Saving:
    """A save that is planned.

    Attributes:
        writer: writes or publishes
        plan: what this rank writes
        data: the data of its items
        metadata: describes the whole checkpoint, on the coordinator
        common: the place and the bytes of ``common.pt``, on the coordinator
    """

    writer: Any
    plan: SavePlan
    data: SaveData
    metadata: Metadata | None
    common: tuple[AnyPlace, bytes] | None

    def finish(self, ranks: Together, write: Any) -> None:
        """Calls ``write``, which returns the results of this rank, on all ranks; then commits the checkpoint."""

        def commit(results: list[list[WriteResult]]) -> Any:
            assert self.metadata is not None
            if self.common is not None:
                common.write(*self.common)
            try:
                self.writer.finish(self.metadata, results)
            except BaseException:
                if self.common is not None:
                    _write_own_common(self.common[0])
                raise
            return self.metadata.storage_meta

        # Unpickling what a PeerWriter's commit returns has every rank publish its part.
        ranks.step("write the checkpoint", write, commit)


def _write_own_common(place: AnyPlace) -> None:
    """Writes ``common.pt`` from the checkpoint that the index of a place names: after a failed commit, mostly the old.

    Without an index, or if that fails, what is there stays: loads refuse it, and ``restore_common`` says more.
    """
    with contextlib.suppress(CheckpointingException, TensorferryError, OSError):
        stored: Any = place
        reader = FileReader(stored)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, False)
        if (data := common_in(reader, metadata)) is not None:
            common.write(place, data)


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
