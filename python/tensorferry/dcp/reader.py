"""The base class of ``FileReader`` and ``PeerReader``: torch's side of a load."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .. import _validate
from .._native import Server
from .._reentry import CallLock
from ..errors import InvalidArgument
from ..pickles.allowlist import Allowed
from ..state.optimizers import warn_of_missing
from ..storage.places import AnyPlace
from ..storage.slices import SliceTuple
from ..storage.source import Progress, Source
from .common_slices import PlanNote
from .load_plan import Reading, Values
from .targets import checked


class Load:
    """One load.

    Attributes:
        folder: what is loaded, with the deadline of this load; ``None`` with peers
        metadata: the metadata from the index
        coordinates: whether this rank is the coordinator
        source: what the load reads from
        values: returns values that the source builds, by their entries; ``None`` if it builds none
        digest: identifies what the load reads from, its index for one
        shared: whether that is the index of all ranks
        failed: why the index could not be read
        allowed: the globals that its pickles may name, until its deadline; ``None`` if it has none
        server: gives other ranks what this one has read for them; ``None`` if there is none
    """

    def __init__(self) -> None:
        self.folder: AnyPlace | None = None
        self.metadata: Metadata | None = None
        self.coordinates = False
        self.source: Source | None = None
        self.values: Values | None = None
        self.digest: str | None = None
        self.shared = False
        self.failed: Exception | None = None
        self.allowed: Allowed | None = None
        self.server: Server | None = None
        self._end: threading.Timer | None = None

    def begin(self, source: Source) -> bytes:
        """Begins to read from ``source``; returns its index, still encoded.

        Raises:
            TensorferryError: as for :meth:`Source.read_index`
        """
        self.source = source
        return source.read_index()

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


class SliceReader(StorageReader):  # type: ignore[misc]  # mypy does not follow torch
    """Loads a checkpoint by slices of its containers. A subclass chooses the source, in ``read_metadata``.

    Args:
        allowed: the globals that pickled objects may name
        counts: the names of the counts in ``report``
        progress: reports how far a load is; ``None`` if nobody wants to know

    Attributes:
        report: what the last load read, without the index
    """

    #: The errors of ``read_metadata`` after which there may still be an index of the rank alone.
    _absent: tuple[type[Exception], ...] = ()

    def __init__(self, allowed: Allowed, counts: Iterable[str], progress: Progress | None) -> None:
        super().__init__()
        self._allowed = allowed
        self._progress = _validate.function("progress", progress)
        self._start()
        self.report: dict[str, int] = dict.fromkeys(counts, 0)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what another process needs to load with a copy of this reader; running loads are left out."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_load", "_loading")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, which has no running load."""
        self.__dict__.update(state)
        self._start()

    def _start(self) -> None:
        self._load, self._loading = Load(), CallLock("a load with this reader")

    def begin_load(self) -> None:
        """Begins a load in place of the one before.

        Raises:
            InvalidArgument: this thread is in the middle of a read
        """
        self._loading.check()
        # Of a load that has failed on another rank.
        self._load.close_server()
        self._load = Load()
        self.report = dict.fromkeys(self.report, 0)

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
        load, note = self._load, plan.storage_data
        digest = note.digest if isinstance(note, PlanNote) else None
        if load.metadata is None or digest not in (None, load.digest):
            raise InvalidArgument(
                "another load with this reader has begun in the middle of this one, in another thread or by a signal "
                "handler: give each load a reader of its own"
            )
        if load.coordinates:
            stored = load.metadata.state_dict_metadata
            warn_of_missing([item.storage_index.fqn for item in plan.items], lambda: stored)
        plan, targets = checked(plan, getattr(planner, "state_dict", None), load.metadata)
        with self._loading.held():
            Reading(
                load.metadata.storage_data,
                planner,
                partial(self._read, load, self.report),
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

    def _read(
        self,
        load: Load,
        report: dict[str, int],
        slices: Mapping[str, list[SliceTuple]],
        progress: Progress | None = None,
    ) -> None:
        """Reads slices from the source of a load, and counts them in its ``report``."""
        assert load.source is not None
        for name, count in load.source.read(slices, progress).items():
            report[name] += count
