"""Steps that all ranks of a job take together: if one of them fails, all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import TensorferryError
from .release import CheckpointingException

T = TypeVar("T")
R = TypeVar("R")


class Together:
    """The ranks that save or load a checkpoint together.

    Args:
        group: a process group; ``None`` means the default one. Without ``torch.distributed`` there is one rank

    Attributes:
        rank: the rank of this process in the group
        world: how many ranks there are
    """

    def __init__(self, group: Any = None) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self._group = group
        self.rank = dist.get_rank(group) if joined else 0
        self.world = dist.get_world_size(group) if joined else 1

    @property
    def coordinates(self) -> bool:
        """Whether this rank makes the decisions of all."""
        return self.rank == 0

    def step(self, what: str, local: Callable[[], T], decide: Callable[[list[T]], R]) -> R:
        """Calls ``local`` on every rank, and ``decide`` with what all of them have returned, on the coordinator.

        Args:
            what: what is done, for messages: "cannot ..."
            local: what each rank does
            decide: what the coordinator makes of it

        Returns:
            What ``decide`` has returned, on every rank.

        Raises:
            CheckpointingException: one of the calls has failed on one of the ranks; it is raised on all of them
        """
        value, error = _attempt(local)
        if self.world == 1:
            if error is None:
                reply, error = _attempt(lambda: decide([value]))  # type: ignore[list-item]
                if error is None:
                    return reply  # type: ignore[return-value]
            raise CheckpointingException(f"cannot {what}: {_text(error)}") from error
        sent = (None, _text(error)) if error is not None else (value, None)
        # Sent as one object to the coordinator and back as another.
        gathered: list[Any] | None = [None] * self.world if self.coordinates else None
        first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        dist.gather_object(sent, gathered, dst=first, group=self._group)
        message: list[Any] = [None]
        if gathered is not None:
            failures = {rank: text for rank, (_, text) in enumerate(gathered) if text is not None}
            reply = None
            if not failures:
                reply, error = _attempt(lambda: decide([value for value, _ in gathered]))
                if error is not None:
                    failures[self.rank] = _text(error)
            message = [(failures, None if failures else reply)]
        dist.broadcast_object_list(message, src=first, group=self._group)
        failures, received = message[0]
        if failures:
            raise CheckpointingException(_failed(what, failures, self.world)) from error
        return reply if gathered is not None else received  # type: ignore[return-value]

    def every(self, what: str, local: Callable[[], T]) -> list[T]:
        """Calls ``local`` on every rank; returns on every rank what all of them have returned.

        Raises:
            CheckpointingException: it has failed on one of the ranks; it is raised on all of them
        """
        value, error = _attempt(local)
        if self.world == 1:
            if error is not None:
                raise CheckpointingException(f"cannot {what}: {_text(error)}") from error
            return [value]  # type: ignore[list-item]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, (value, None if error is None else _text(error)), group=self._group)
        failures = {rank: text for rank, (_, text) in enumerate(gathered) if text is not None}
        if failures:
            raise CheckpointingException(_failed(what, failures, self.world)) from error
        return [value for value, _ in gathered]


def _attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return call(), None
    except Exception as e:
        return None, e


def _text(error: Exception | None) -> str:
    assert error is not None
    if isinstance(error, (TensorferryError, CheckpointingException)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _failed(what: str, failures: dict[int, str], world: int) -> str:
    """Returns the message for all ranks. Ranks that have failed for the same reason are named together."""
    by_text: dict[str, list[int]] = {}
    for rank, text in failures.items():
        by_text.setdefault(text, []).append(rank)
    named = []
    for text, ranks in list(by_text.items())[:4]:
        if len(ranks) == world:
            named.append(text)
        else:
            named.append(f"{text} (rank {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''})")
    return f"cannot {what}: {'; '.join(named)}"
