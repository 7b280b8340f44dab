"""The base class of ``FileReader`` and ``PeerReader``: torch's side of a load."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .. import _validate
from .._native import Server
from .._reentry import CallMark
from ..errors import InvalidArgument
from ..pickles.allowlist import Allowed
from ..state.optimizers import warn_of_missing
from ..storage.slices import SliceTuple
from ..storage.source import Progress, Source
from . import index
from .load_plan import Reading, Values
from .targets import checked


class Load(threading.local):
    """The load of the calling thread: one reader may run several loads at once, each in its own thread.

    Attributes:
        checkpoint: which checkpoint is loaded, once ``reset`` was called in this thread
        metadata: the metadata from the index
        coordinates: whether this rank is the coordinator
        source: what the load reads from
        values: returns values that the source builds, by their entries; ``None`` if it builds none
        report: what it has read
        digest: identifies what the load reads from, its index for one
        shared: whether that is the index of all ranks
        failed: why the index could not be read
        allowed: the globals that its pickles may name, until its deadline; ``None`` if it has none
        server: gives other ranks what this one has read for them; ``None`` if there is none
    """

    def __init__(self) -> None:
        self.checkpoint: Any = None
        self.metadata: Metadata | None = None
        self.coordinates = False
        self.source: Source | None = None
        self.values: Values | None = None
        self.report: dict[str, int] = {}
        self.digest: str | None = None
        self.shared = False
        self.failed: Exception | None = None
        self.allowed: Allowed | None = None
        self.server: Server | None = None
        self._end: threading.Timer | None = None

    def keep_server(self, server: Server, seconds: float) -> None:
        """Has ``server`` until it is closed, or for so many seconds: a load that fails elsewhere does not come back."""
        self.server = server
        self._end = threading.Timer(seconds, server.shutdown, (0.0,))
        self._end.daemon = True
        self._end.start()

    def close_server(self) -> None:
        """Ends the server, if there is one."""
        server, self.server = self.server, None
        if self._end is not None:
            self._end.cancel()
        if server is not None:
            server.shutdown(0.0)


def _loading() -> CallMark:
    return CallMark("a load with this reader")


class SliceReader(StorageReader):  # type: ignore[misc]  # mypy does not follow torch
    """Loads a checkpoint by slices of its containers. A subclass chooses the source, in ``read_metadata``.

    Loads in several threads at once do not affect each other; all calls of one load are made in one thread.

    Args:
        allowed: the globals that pickled objects may name
        counts: the names of the counts in ``report``
        progress: reports how far a load is; ``None`` if nobody wants to know

    Attributes:
        report: what the last load read, without the index; of several at once, the one that began last
    """

    #: The errors of ``read_metadata`` after which there may still be an index of the rank alone.
    _absent: tuple[type[Exception], ...] = ()

    def __init__(self, allowed: Allowed, counts: Iterable[str], progress: Progress | None) -> None:
        super().__init__()
        self._allowed = allowed
        self._progress = _validate.function("progress", progress)
        self._load, self._loading = Load(), _loading()
        self.report: dict[str, int] = dict.fromkeys(counts, 0)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what another process needs to load with a copy of this reader; running loads are left out."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_load", "_loading")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, which has no running load."""
        self.__dict__.update(state)
        self._load, self._loading = Load(), _loading()

    def _read_from(self, source: Source, values: Values | None = None) -> None:
        """Begins to read from ``source``, with a new ``report``; for ``values`` see :class:`Load`.

        Raises:
            InvalidArgument: this thread is in the middle of a read
        """
        self._loading.check()
        self.report = self._load.report = dict.fromkeys(self.report, 0)
        self._load.source, self._load.values = source, values

    def _begin(self, source: Source) -> bytes:
        """Begins to read from ``source``; returns its index, still encoded.

        Raises:
            InvalidArgument: this thread is in the middle of a read
            TensorferryError: as for :meth:`Source.read_index`
        """
        self._read_from(source)
        return source.read_index()

    def _open(self, source: Source, name: str) -> Metadata:
        """Reads the index of ``source``, from which the load will read; ``name`` is its name in messages.

        Raises:
            TensorferryError: as for :meth:`Source.read_index` and :func:`index.decode`
        """
        return index.decode(self._begin(source), name, self._load.allowed or self._allowed)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keeps the metadata from the index."""
        del args, kwargs
        self._load.metadata, self._load.coordinates = metadata, is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns ``plan`` unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns ``plans`` unchanged: each rank reads what it needs, even if other ranks read the same."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items of ``plan`` into their targets. If it fails, some of them may have new values.

        Raises:
            CorruptCheckpoint: a block of a file does not match its checksum; file, tensor and block are named
            StateMismatch: a target has another shape than the plan says, or cannot be written to; no target is
                overwritten then
            IncompleteCheckpoint: the checkpoint does not have all of a target, and no target is overwritten; or a file
                is gone
            UnsafePickle: an object needs something that is not on the allow-list
            ProtocolError: plan, index and containers contradict each other, or an object is damaged
            SystemRefused: a file cannot be read, or the index announces more than this machine has memory for
            SourceChanged: a save has replaced the checkpoint meanwhile
            InvalidArgument: a graph is being captured on a device that is to be written to; or another load with this
                reader has begun in the middle of this one, in the same thread
            TensorferryError: with peers, as for ``HTTPTransport.recv_checkpoint``; the store does not answer in time,
                or refuses
            Exception: what ``progress`` or the planner raises
        """
        load = self._load
        assert load.metadata is not None
        told = plan.storage_data
        digest = told if isinstance(told, str) else getattr(told, "digest", None)
        if digest is not None and digest != load.digest:
            raise InvalidArgument(
                "another load with this reader has begun in the middle of this one, in the same thread, by a signal "
                "handler for example: give each load a reader of its own"
            )
        if load.coordinates:
            stored = load.metadata.state_dict_metadata
            warn_of_missing([item.storage_index.fqn for item in plan.items], lambda: stored)
        plan, targets = checked(plan, getattr(planner, "state_dict", None), load.metadata)
        with self._loading.held():
            Reading(
                load.metadata,
                planner,
                self._read,
                load.allowed or self._allowed,
                load.values,
                self._progress,
                targets,
            ).run(plan)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @contextlib.contextmanager
    def through(self, wrap: Callable[[Source], Source]) -> Iterator[None]:
        """While the block runs, the load reads from what ``wrap`` makes of its source."""
        source = self._load.source
        assert source is not None
        self._load.source = wrap(source)
        try:
            yield
        finally:
            self._load.source = source

    def _read(self, slices: Mapping[str, list[SliceTuple]], progress: Progress | None = None) -> None:
        """Reads slices from the source, and counts them in ``report``."""
        assert self._load.source is not None
        for name, count in self._load.source.read(slices, progress).items():
            self._load.report[name] += count
