"""The writer of checkpoints that are no files: what the ranks of a job hold, served from where it is."""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from datetime import timedelta
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .. import _gc
from ..errors import InvalidArgument, TransportClosed
from ..memory.accelerator import ACCELERATOR
from ..memory.staging import Stager
from ..net.options import ServerOptions
from ..net.serve import serve, withdraw
from ..state.snapshot import SnapshotMode, snapshot_mode
from ..storage import reserved
from ..storage.container import Container
from . import index
from .save_plan import ABOUT, PlanSnapshot
from .torch_view import TorchView

logger = logging.getLogger("tensorferry")

#: The writers of this process by their addresses.
_writers: weakref.WeakValueDictionary[str, PeerWriter] = weakref.WeakValueDictionary()
#: How the metadata of a publication begins; then come its step and the addresses of the ranks.
SCHEME = "tensorferry-dcp/1"
_NOTHING = (
    "nothing is published, or the last save has failed: call torch.distributed.checkpoint.save with this writer first"
)


class _Done(StorageMeta):  # type: ignore[misc]  # mypy does not follow torch
    """Tells every rank that a save has succeeded.

    torch tells the writers of other ranks than the coordinator nothing after ``write_data``. But if no rank has failed,
    it sends all of them the metadata that ``finish`` was given: what is in it is unpickled there.
    """

    def __init__(self, step: int, urls: list[str]) -> None:
        super().__init__()
        self._step, self._urls = step, urls

    def __reduce__(self) -> Any:
        return _heard, (self._step, self._urls)


def _heard(step: int, urls: list[str]) -> StorageMeta:
    for url in urls:
        writer = _writers.get(url)
        if writer is not None:
            writer._succeeded(step)
    return StorageMeta()


class PeerWriter(StorageWriter):  # type: ignore[misc]  # mypy does not follow torch
    """Publishes what each rank would save, with ``torch.distributed.checkpoint.save``, for readers of other jobs.

    Each rank serves its own part from a server of its own, once all ranks have succeeded: a save that fails publishes
    nothing on any rank, and what was published before stays. Nothing is copied that is in host memory: until
    ``withdraw``, tensors may not change. Make one writer and keep it: every save replaces what is published.

    Args:
        timeout: how long a request waits for a checkpoint, and ``withdraw`` for readers of borrowed memory
        snapshot: ``"borrow"`` serves CPU tensors from where they are, ``"copy"`` takes a private copy in the save: then
            they may change at once. Accelerator tensors are always copied.
        secret, tls, same_host, interface, advertise, max_bandwidth: as for ``HTTPTransport``

    Raises:
        SystemRefused: no port can be opened
        InvalidArgument: an argument cannot be used; it is named
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(minutes=5),
        *,
        snapshot: SnapshotMode = "borrow",
        secret: str | bytes | None = None,
        tls: bool = False,
        same_host: bool | None = None,
        interface: str | None = None,
        advertise: str | None = None,
        max_bandwidth: int | None = None,
    ) -> None:
        """See the class."""
        super().__init__()
        self._timeout = timeout
        self._copy = snapshot_mode(snapshot) == "copy"
        self._stager = Stager(ACCELERATOR)
        options = ServerOptions(
            secret=secret,
            tls=tls,
            same_host=same_host,
            interface=interface,
            advertise=advertise,
            max_bandwidth=max_bandwidth,
        )
        self._server, self._url = serve(timeout, options)
        self._plain = options.secret is None and not options.tls
        self._urls: list[str] = []
        self._step = 0
        self._packed: PlanSnapshot | None = None
        self._coordinates = False
        self._saved = False
        self._is_closed = False
        _writers[self._url] = self

    def metadata(self) -> str:
        """What a ``PeerReader`` needs: one string, the same on every rank once a save is over.

        It holds random parts: without a shared secret, whoever has it can read the state.

        Raises:
            InvalidArgument: nothing was saved yet
        """
        if not self._saved:
            raise InvalidArgument(_NOTHING)
        return " ".join([SCHEME, str(self._step), *self._urls])

    def folder(self) -> str:
        """The ``checkpoint_id`` under which torch's own reader loads the state, without this package.

        It is the address of a folder that is made when it is read, the same on every rank. torch needs fsspec and
        aiohttp for it, and reads whole chunks, without checksums.

        Raises:
            InvalidArgument: nothing was saved yet, or the writer has a secret or TLS, which torch's reader cannot deal
                with
        """
        if not self._plain:
            raise InvalidArgument("torch's reader knows no shared secret and no pinned certificate: use a PeerReader")
        if not self._saved:
            raise InvalidArgument(_NOTHING)
        return f"{self._urls[0]}{self._step}/dcp"

    def withdraw(self) -> None:
        """Ends the publication on this rank; from now on requests wait.

        Private copies are let go of at once and running transfers finish from them. Borrowed memory is drained: running
        transfers may finish for at most the timeout and are cut off then. When this returns, the state may be changed:
        nothing of it is read any more. It does not raise because of a reader.
        """
        self._packed = None
        self._saved = False
        withdraw(self._server, self._timeout)

    def shutdown(self) -> None:
        """Ends the server and all transfers."""
        self._is_closed = True
        self._packed = None
        self._saved = False
        self._server.shutdown(5.0)
        self._stager.close()

    def __getstate__(self) -> Any:
        """Refused: what another process publishes would be its own memory, under an address nobody knows here.

        Raises:
            InvalidArgument: always
        """
        raise InvalidArgument(
            "a PeerWriter serves the memory of its own process and cannot be sent to another one: use async_save with "
            "AsyncCheckpointerType.THREAD, or save"
        )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a publication has no name but its address."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save."""
        del args, kwargs
        self._coordinates = is_coordinator
        self._saved = False
        self._packed = None
        # Every rank counts every save.
        self._step += 1

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tells the coordinator this rank's address.

        Raises:
            TransportClosed: the writer was shut down
        """
        if self._is_closed:
            raise TransportClosed("this PeerWriter was shut down and serves nothing any more: make a new one")
        return dataclasses.replace(plan, storage_data=self._url)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells every rank the addresses of all, the coordinator's first."""
        urls = [plan.storage_data for plan in plans]
        if not all(isinstance(url, str) for url in urls):
            # Planners that reuse plans leave some of them out; the addresses are the same as before then.
            urls = self._urls
        urls = [self._url, *(url for url in urls if url != self._url)]
        return [dataclasses.replace(plan, storage_data=urls) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Publishes this rank's part.

        Raises:
            UnsupportedLeaf: an item cannot be carried; it is named
            InvalidArgument: the planner reuses a plan that another writer took part in
        """
        urls = plan.storage_data
        if not isinstance(urls, list) or self._url not in urls:
            raise InvalidArgument(
                "the plan was made for another PeerWriter: with enable_plan_caching, make one writer and keep it"
            )
        self._urls = urls
        with _gc.gc_paused():
            self._packed = PlanSnapshot(plan, planner, self._stager, self._copy)
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._packed.results(f"{self._step} {self._url}"))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the index along with this rank's part."""
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_data = places
        self._publish(index.encode(metadata, places), len(places))
        metadata.storage_meta = _Done(self._step, self._urls)

    def _succeeded(self, step: int) -> None:
        """The save ``step`` is over on all ranks."""
        try:
            if step == self._step and not self._saved and self._packed is not None:
                self._publish(None)
        except Exception:
            # Where this is called, torch is about to tell its caller that all went well.
            logger.exception("cannot publish what was saved: readers will find that this rank's part is missing")

    def _publish(self, text: bytes | None, entries: int = 0) -> None:
        packed = self._packed
        assert packed is not None
        told = None if text is None else (text, entries)
        container = Container(
            packed.rows, packed.owner, packed.private, [] if text is None else [(reserved.INDEX, text)], ABOUT
        )
        folder = TorchView(packed, self._step, self._url, self._urls, told) if self._plain else None
        container.publish(self._server, self._step, alternate=folder)
        self._packed = None
        self._saved = True

    def storage_meta(self) -> StorageMeta:
        """Nothing that could be of use elsewhere."""
        return StorageMeta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Nothing is chosen by name."""
        del checkpoint_id
        return False
