"""Checkpoints that are no files: what the ranks of a job hold, served from where it is."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .. import _gc, arguments
from .._native import Remote, Server, _fetch_slices
from ..addresses import advertised_host, bandwidth, listening_address, port_on, wants_same_host
from ..allowlist import Allowed
from ..errors import InvalidArgument, ProtocolError, TensorferryError
from ..secret import shared_secret
from ..staging import Stager
from ..state import Snapshot
from ..tensors import address, scratch
from ..withdrawal import withdraw
from . import index
from .folder import Folder
from .reader import SliceReader
from .reading import Part
from .writing import METADATA, Packed

logger = logging.getLogger("tensorferry")

_SCHEME = "tensorferry-dcp/1"
_NOTHING = "nothing is published: call torch.distributed.checkpoint.save with this writer first"
#: Bytes asked for along with a header. Most of what follows it is of no use to who wants slices.
_AHEAD = 64 << 10


class PeerWriter(StorageWriter):  # type: ignore[misc]  # mypy does not follow torch
    """Publishes what each rank would save, with ``torch.distributed.checkpoint.save``, for readers of other jobs.

    Each rank serves its own part from a server of its own. Nothing is copied that is in host memory: until
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
        snapshot: Snapshot = "borrow",
        secret: str | bytes | None = None,
        tls: bool = False,
        same_host: bool | None = None,
        interface: str | None = None,
        advertise: str | None = None,
        max_bandwidth: int | None = None,
    ) -> None:
        """See the class."""
        super().__init__()
        if snapshot not in ("borrow", "copy"):
            raise InvalidArgument(f'snapshot is "borrow" or "copy", not {snapshot!r}')
        patience = arguments.patience("timeout", timeout)
        self._timeout = timeout
        self._copy = snapshot == "copy"
        self._stager = Stager()
        listening = listening_address(interface)
        known = shared_secret(secret)
        self._plain = known is None and not arguments.boolean("tls", tls)
        self._server = Server(
            patience=patience,
            bind=port_on(listening),
            same_host=wants_same_host(same_host),
            max_bandwidth=bandwidth(max_bandwidth),
            secret=known,
            tls=tls,
        )
        self._url = self._server.url(advertised_host(advertise, listening))
        self._urls: list[str] = []
        self._step = 0
        self._packed: Packed | None = None
        self._coordinates = False
        self._saved = False
        self._is_closed = False

    def metadata(self) -> str:
        """What a ``PeerReader`` needs: one string, the same on every rank once a save is over.

        It holds random parts: without a shared secret, whoever has it can read the state.

        Raises:
            InvalidArgument: nothing was saved yet
        """
        if not self._saved:
            raise InvalidArgument(_NOTHING)
        return " ".join([_SCHEME, str(self._step), *self._urls])

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
        # Every rank counts every save.
        self._step += 1

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tells the coordinator this rank's address.

        Raises:
            InvalidArgument: the writer was shut down
        """
        if self._is_closed:
            raise InvalidArgument("this PeerWriter was shut down and serves nothing any more: make a new one")
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
        with _gc.held_off():
            self._packed = Packed(plan, planner, self._stager, self._copy)
        if not self._coordinates:
            self._publish(None)
        self._saved = True
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._packed.results(f"{self._step} {self._url}"))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the index along with this rank's part."""
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_data = places
        metadata.storage_meta = self.storage_meta()
        self._publish(index.encode(metadata, places), len(places))

    def _publish(self, text: bytes | None, entries: int = 0) -> None:
        packed = self._packed
        assert packed is not None
        told = None if text is None else (text, entries)
        self._server.publish(
            self._step,
            rows=packed.rows,
            control=[] if text is None else [(index.ENTRY, text)],
            metadata=METADATA,
            owner=packed.owner,
            private=packed.private,
            alternate=Folder(packed, self._step, self._url, self._urls, told) if self._plain else None,
        )

    def storage_meta(self) -> StorageMeta:
        """Nothing that could be of use elsewhere."""
        return StorageMeta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Nothing is chosen by name."""
        del checkpoint_id
        return False


class PeerReader(SliceReader):
    """Loads what a ``PeerWriter`` of another job has published, with ``torch.distributed.checkpoint.load``.

    Each rank fetches the slices its plan needs from the ranks that hold them, several at a time, straight into its
    tensors where it can. World size and placements of the two jobs do not matter to each other.

    Args:
        metadata: of the writer; ``checkpoint_id`` of a load takes its place
        timeout: the deadline of a load, from its beginning on
        lanes: connections of this rank; ``None`` chooses by the number of cores
        secret: as for ``HTTPTransport``
        same_host: as for ``HTTPTransport``
        safe_globals: classes and functions that pickled objects may name besides the default list
        trust_pickle: let pickled objects name anything; then whoever can answer as a source can run code here

    Attributes:
        report: what the last load fetched besides the index: ``bytes``, and ``wanted``, the bytes of them that had a
        destination; ``retries``
    """

    def __init__(
        self,
        metadata: str | None = None,
        *,
        timeout: timedelta = timedelta(minutes=5),
        lanes: int | None = None,
        secret: str | bytes | None = None,
        same_host: bool | None = None,
        safe_globals: Iterable[Any] = (),
        trust_pickle: bool = False,
    ) -> None:
        """See the class."""
        super().__init__(Allowed(safe_globals, trust_pickle))
        self._string = None if metadata is None else arguments.text("metadata", metadata)
        self._seconds = arguments.seconds("timeout", timeout)
        self._lanes = None if lanes is None else arguments.whole("lanes", lanes, 1)
        self._secret = shared_secret(secret)
        self._same_host = wants_same_host(same_host)
        self._failed: Exception | None = None
        self._until = 0.0
        self.report: dict[str, int] = {"bytes": 0, "wanted": 0, "retries": 0}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load, of ``checkpoint_id`` if it is given."""
        if checkpoint_id:
            self._string = str(checkpoint_id)
        self._metadata = self._failed = None
        self.report = {"bytes": 0, "wanted": 0, "retries": 0}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Fetches the index.

        Raises:
            InvalidArgument: there is no metadata string, or it is none of a ``PeerWriter``
            TensorferryError: as ``HTTPTransport.recv_checkpoint`` does
        """
        del args
        if kwargs.get("rank") is not None and self._failed is not None:
            # torch asks a second time, for an index of this rank alone. There is none, and waiting again helps nobody.
            raise self._failed
        self._until = time.monotonic() + self._seconds
        try:
            step, urls = self._sources()
            source = f"{step} {urls[0]}"
            remote = Remote.open(
                urls[:1],
                step,
                timeout=self._left(),
                lanes=1,
                same_host=self._same_host,
                secret=self._secret,
            )
            sizes = dict(zip(remote.names, remote.sizes, strict=True))
            if index.ENTRY not in sizes:
                raise ProtocolError(f"{urls[0]} serves no index of a distributed checkpoint")
            nbytes = sizes[index.ENTRY]
            memory = scratch(nbytes)
            self._fetch({source: [(index.ENTRY, "U8", nbytes, 0, nbytes, address(memory), [])]})
            self.report = dict.fromkeys(self.report, 0)
            metadata = index.decode(memory.numpy().tobytes(), "the publication", self._allowed)
        except TensorferryError as e:
            self._failed = e
            raise
        metadata.storage_meta = StorageMeta()
        return metadata

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def _sources(self) -> tuple[int, list[str]]:
        words = (self._string or "").split()
        if len(words) < 3 or words[0] != _SCHEME or not (words[1].isascii() and words[1].isdecimal()):
            raise InvalidArgument(
                "PeerReader takes what metadata() of a PeerWriter gives after a save, not "
                + arguments.shown(self._string)
            )
        return arguments.step_number(int(words[1][:20])), words[2:]

    def _fetch(self, parts: dict[str, list[Part]]) -> None:
        named = set(self._sources()[1])
        orders = []
        for source, of_source in parts.items():
            step, _, url = source.partition(" ")
            if url not in named or not step.isdecimal():
                raise ProtocolError("the index names a source that the metadata does not")
            orders.append(([url], int(step), of_source))
        report = _fetch_slices(
            orders,
            timeout=self._left(),
            lanes=self._lanes,
            same_host=self._same_host,
            ahead=_AHEAD,
            secret=self._secret,
        )
        for key in self.report:
            self.report[key] += report[key]
        for source, trouble in report["troubles"].items():
            logger.warning("parts from %s went to other connections: %s", source, trouble)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is the metadata of a ``PeerWriter``."""
        return str(checkpoint_id).startswith(_SCHEME + " ")
