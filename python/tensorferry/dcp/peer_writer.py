"""Publishes a checkpoint from memory: every rank of a job serves its part from where it is."""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .. import _gc
from .._reentry import CallLock
from ..errors import InvalidArgument, TransportClosed
from ..memory.accelerator import ACCELERATOR
from ..memory.staging import HostStager
from ..net.certificates import Tls
from ..net.network import Network, network_of
from ..net.serve import metrics_url, serve, withdraw
from ..pickles.allowlist import Allowed
from ..state.snapshot import SnapshotMode, snapshot_mode
from ..storage import reserved
from ..storage.container import Container
from ..storage.peers import container_name, publication_metadata
from . import index
from .failures import fail_without_numpy
from .save_plan import ABOUT, PlanSnapshot, check_left_to_others, objects_of

logger = logging.getLogger("tensorferry")

#: The writers of this process, by URL.
_writers: weakref.WeakValueDictionary[str, PeerWriter] = weakref.WeakValueDictionary()
_NOTHING = (
    "nothing is published, or the last save has failed: call torch.distributed.checkpoint.save with this writer first"
)
_CLOSED = "this PeerWriter was shut down and no longer serves anything: make a new one"
_IN_BETWEEN = (
    "another save or withdraw() of this PeerWriter was made in the middle of this save, in another thread or by a "
    "signal handler: nothing is published"
)


class _Done(StorageMeta):  # type: ignore[misc]  # mypy does not follow torch
    """Notifies every rank of a successful save when it is unpickled there.

    After ``write_data``, torch calls no more methods of the writers on ranks other than the coordinator. But if no rank
    has failed, it sends all of them the metadata that ``finish`` was given, and they unpickle this object with it.
    """

    def __init__(self, step: int, urls: list[str]) -> None:
        super().__init__()
        self._step, self._urls = step, urls

    def __reduce__(self) -> Any:
        return _notify_writers, (self._step, self._urls)


def _notify_writers(step: int, urls: list[str]) -> StorageMeta:
    """Has those of the writers at ``urls`` that are in this process publish ``step``; unpickles a :class:`_Done`."""
    for url in urls:
        writer = _writers.get(url)
        if writer is not None:
            writer._succeeded(step)
    return StorageMeta()


class PeerWriter(StorageWriter):  # type: ignore[misc]  # mypy does not follow torch
    """Publishes with ``torch.distributed.checkpoint.save`` what each rank would save, for readers in other jobs.

    Each rank serves its own part from its own server, once all ranks have succeeded. A save that fails publishes
    nothing on any rank, and the previous publication stays. If a rank cannot publish its part after all have succeeded,
    it logs that, and its ``metadata()`` raises; whoever loads waits for the part, and fails. By default tensors in host
    memory are not copied: they must not change until ``withdraw`` returns. Make one writer and keep it: every save
    replaces the publication.

    Args:
        timeout: how long a request waits for a checkpoint, and how long ``withdraw`` waits for readers of borrowed
            memory
        snapshot: ``"borrow"`` serves CPU tensors from where they are; ``"copy"`` takes a private copy during the save,
            after which they may change. Accelerator tensors are always copied.
        safe_globals, trust_pickle: what loads will be given; a save warns, once for each, of classes and functions that
            its objects need and a load would refuse
        network, secret, tls, interface: as for ``HTTPTransport``; readers of the same slices are told of one another

    Raises:
        SystemRefused: no port can be opened
        InvalidArgument: an argument cannot be used; the message names it
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(minutes=5),
        *,
        snapshot: SnapshotMode = "borrow",
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
        network: Network | None = None,
        secret: str | bytes | None = None,
        tls: Tls = None,
        interface: str | None = None,
    ) -> None:
        super().__init__()
        self._timeout = timeout
        self._copy = snapshot_mode(snapshot) == "copy"
        self._stager = HostStager(ACCELERATOR)
        self._allowed = Allowed(safe_globals, trust_pickle)
        network = network_of(network, secret=secret, tls=tls, interface=interface)
        self._server, self._url = serve(timeout, network)
        self._urls: list[str] = []
        self._step = 0
        self._objects: set[MetadataIndex] = set()
        self._snapshot: PlanSnapshot | None = None
        self._coordinates = False
        self._saved = False
        self._is_closed = False
        self._saving = CallLock("a save with this PeerWriter")
        self._failure: Exception | None = None
        _writers[self._url] = self

    def metadata(self) -> str:
        """Returns the string that a ``PeerReader`` needs; after a save it is the same on every rank.

        It has random parts: without a shared secret, anyone who knows the string can read the state.

        Raises:
            InvalidArgument: nothing is published, the last save has failed, or this rank could not publish its part
        """
        self._check_saved()
        return publication_metadata(self._step, self._urls)

    def metrics_url(self) -> str:
        """Returns the URL of this rank's counters, as ``HTTPTransport.metrics_url`` does.

        Raises:
            ForkedProcess: this process was forked from the one that made the writer
        """
        return metrics_url(self._server, self._url)

    def withdraw(self) -> None:
        """Withdraws the publication of this rank; from now on requests wait.

        With private copies this returns at once, and running transfers finish from them. With borrowed memory it waits
        for running transfers, at most for the timeout, and then cuts them off. When this returns, the state is not read
        any more and may be changed. Errors are logged and not raised, except ``ForkedProcess``.
        """
        self._snapshot = None
        self._saved = False
        self._failure = None
        withdraw(self._server, self._timeout)

    def shutdown(self) -> None:
        """Stops the server and all transfers; afterwards, saves with this writer raise ``TransportClosed``.

        Raises:
            ForkedProcess: this process was forked from the one that made the writer
        """
        self._is_closed = True
        self._snapshot = None
        self._saved = False
        self._server.shutdown(5.0)
        self._stager.close()

    def __getstate__(self) -> Any:
        """Always raises: a copy in another process would publish that process's memory, under another address.

        Raises:
            InvalidArgument: always
        """
        raise InvalidArgument(
            "a PeerWriter serves the memory of its own process and cannot be sent to another one: use async_save with "
            "AsyncCheckpointerType.THREAD, or save"
        )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a publication has no name."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save; until it has succeeded, :meth:`metadata` raises.

        Raises:
            InvalidArgument: this thread is taking the snapshot of another save with this writer
        """
        del args
        self._saving.check()
        if kwargs.get("use_collectives", True):
            fail_without_numpy()
        self._coordinates = is_coordinator
        self._saved = False
        self._failure = None
        self._snapshot = None
        # Every rank counts every save, so the step is the same on all ranks.
        self._step += 1

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds this rank's URL to the plan, for the coordinator.

        Raises:
            TransportClosed: the writer was shut down
        """
        if self._is_closed:
            raise TransportClosed(_CLOSED)
        self._objects = objects_of(plan)
        return dataclasses.replace(plan, storage_data=self._url)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Adds the URLs of all ranks to every plan, the coordinator's first."""
        urls = [plan.storage_data for plan in plans]
        if not all(isinstance(url, str) for url in urls):
            # Planners that cache plans leave some of them out; the URLs are the same as before then.
            urls = self._urls
        urls = [self._url, *(url for url in urls if url != self._url)]
        return [dataclasses.replace(plan, storage_data=urls) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Takes the snapshot of this rank's part; it is published when all ranks have succeeded.

        Raises:
            UnsupportedLeaf: an item cannot be sent; the message names it
            InvalidArgument: the planner reuses a plan that was made for another writer, another save with this
                writer was made in the middle of this one, or a graph is being captured on a device that holds an item
            SystemRefused: there is no memory for a copy
            Exception: whatever the device raises when a copy fails
        """
        urls = plan.storage_data
        if not isinstance(urls, list) or self._url not in urls:
            raise InvalidArgument(
                "the plan was made for another PeerWriter: with enable_plan_caching, make one writer and keep it"
            )
        if self._saved:
            raise InvalidArgument(_IN_BETWEEN)
        self._urls = urls
        check_left_to_others(self._objects, plan, planner)
        with self._saving.held(), _gc.gc_paused():
            self._snapshot = snapshot = PlanSnapshot(plan, planner, ACCELERATOR, self._copy)
            snapshot.complete(self._stager)
        snapshot.warn_of_refusals(self._allowed)
        done: Future[list[WriteResult]] = Future()
        part = snapshot.part(container_name(self._step, self._url))
        done.set_result(part.results(snapshot.rows.nbytes))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the index along with the coordinator's part, in place of what was published before.

        Raises:
            InvalidArgument: the planner's metadata names what no rank has written or not all of a tensor, a key is not
                a string, or another save or :meth:`withdraw` was made in the middle of this save; nothing is published
                then
            TransportClosed: the writer was shut down meanwhile
            Exception: what pickling the planner's data raises
        """
        containers = [container_name(self._step, url) for url in self._urls]
        self._publish(index.encode(index.stamp(metadata), index.parts_of(results), containers))
        metadata.storage_meta = _Done(self._step, self._urls)

    def _succeeded(self, step: int) -> None:
        """Publishes this rank's part of the save ``step``, which has succeeded on all ranks."""
        try:
            if step == self._step and not self._saved and self._snapshot is not None:
                self._publish(None)
        except Exception as e:
            # Not raised: this is called while torch unpickles metadata, when the save has succeeded already.
            self._failure = e
            logger.exception(
                "cannot publish what was saved: this rank's part of the checkpoint will be missing for readers"
            )

    def _check_saved(self) -> None:
        """Raises ``InvalidArgument`` if this rank publishes nothing."""
        if self._failure is not None:
            raise InvalidArgument(
                "the last save has succeeded, but this rank could not publish its part of it "
                f"({type(self._failure).__name__}: {self._failure}): whoever loads waits for that part and fails. "
                "Save again"
            ) from self._failure
        if not self._saved:
            raise InvalidArgument(_NOTHING)

    def _publish(self, encoded_index: bytes | None) -> None:
        """Publishes the snapshot of this rank's part, on the coordinator with the index of all ranks."""
        snapshot = self._snapshot
        if snapshot is None:
            raise TransportClosed(_CLOSED) if self._is_closed else InvalidArgument(_IN_BETWEEN)
        parts = [] if encoded_index is None else [(reserved.INDEX, encoded_index)]
        container = Container(snapshot.rows, snapshot.owner, snapshot.private, parts, ABOUT)
        container.publish(self._server, self._step)
        self._snapshot = None
        self._saved = True

    def storage_meta(self) -> StorageMeta:
        """Returns an empty ``StorageMeta``."""
        return StorageMeta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns ``False``: a publication is not chosen by a ``checkpoint_id``."""
        del checkpoint_id
        return False
