"""The base class of ``FileReader`` and ``PeerReader``: torch's side of a load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..state.allowlist import Allowed
from ..storage.slices import SliceTuple
from ..storage.source import Source
from . import index
from .load_plan import Reading


class SliceReader(StorageReader):  # type: ignore[misc]  # mypy does not follow torch
    """Loads a checkpoint by slices of its containers. A subclass chooses the source, in ``read_metadata``.

    Args:
        allowed: the globals that pickled objects may name
        counts: the names of the counts in ``report``

    Attributes:
        report: what the last load read, without the index
    """

    def __init__(self, allowed: Allowed, counts: Iterable[str]) -> None:
        super().__init__()
        self._allowed = allowed
        self._metadata: Metadata | None = None
        self._source: Source | None = None
        self.report: dict[str, int] = dict.fromkeys(counts, 0)

    def _open(self, source: Source, name: str) -> Metadata:
        """Reads the index of ``source``, from which the load will read; ``name`` is its name in messages.

        Raises:
            TensorferryError: as for :meth:`Source.read_index` and :func:`index.decode`
        """
        self.report = dict.fromkeys(self.report, 0)
        self._source = source
        return index.decode(source.read_index(), name, self._allowed)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keeps the metadata from the index."""
        del is_coordinator, args, kwargs
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns ``plan`` unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns ``plans`` unchanged: each rank reads what it needs, even if other ranks read the same."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items of ``plan`` into their targets.

        Raises:
            CorruptCheckpoint: a block of a file does not match its checksum; file, tensor and block are named
            StateMismatch: a target has another shape than the plan says, or cannot be written to
            UnsafePickle: an object needs something that is not on the allow-list
            InvalidArgument: a graph is being captured on a device that is to be written to
            TensorferryError: with peers, as for ``HTTPTransport.recv_checkpoint``
        """
        assert self._metadata is not None
        Reading(self._metadata, planner, self._read, self._allowed).run(plan)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, slices: Mapping[str, list[SliceTuple]]) -> None:
        """Reads slices from the source, and counts them in ``report``."""
        assert self._source is not None
        for name, count in self._source.read(slices).items():
            self.report[name] += count
