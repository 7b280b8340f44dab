"""The base class of ``FileReader`` and ``PeerReader``: torch's side of a load."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..state.allowlist import Allowed
from ..storage.slices import SliceTuple
from .load_plan import Reading


class SliceReader(StorageReader):  # type: ignore[misc]  # mypy does not follow torch
    """Loads a checkpoint by slices of containers, which a subclass reads.

    Args:
        allowed: the globals that pickled objects may name
    """

    def __init__(self, allowed: Allowed) -> None:
        super().__init__()
        self._allowed = allowed
        self._metadata: Metadata | None = None

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
        Reading(self._metadata, planner, self._fetch, self._allowed).run(plan)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @abstractmethod
    def _fetch(self, parts: dict[str, list[SliceTuple]]) -> None:
        """Reads slices of several containers, given by source, to their memory addresses."""
