"""What the readers of distributed checkpoints have in common: torch's side of a load."""

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
    """Loads by slices of containers, which a subclass brings.

    Args:
        allowed: which globals pickled objects may name
    """

    def __init__(self, allowed: Allowed) -> None:
        """See the class."""
        super().__init__()
        self._allowed = allowed
        self._metadata: Metadata | None = None

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keeps the index."""
        del is_coordinator, args, kwargs
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to do."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to do: ranks read what they need, whoever reads the same."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what ``plan`` asks for.

        Raises:
            CorruptCheckpoint: a block of a file does not match its checksum; file, tensor and block are named
            StateMismatch: a target has another shape than the plan says
            UnsafePickle: an object is not on the allow-list
            InvalidArgument: a graph is being captured on a device that is to be written to
            TensorferryError: from peers, as ``HTTPTransport.recv_checkpoint`` does
        """
        assert self._metadata is not None
        Reading(self._metadata, planner, self._fetch, self._allowed).run(plan)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @abstractmethod
    def _fetch(self, parts: dict[str, list[SliceTuple]]) -> None:
        """Brings parts of several containers to their places: source to parts."""
