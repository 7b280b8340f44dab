"""The ranks of a save or load of Megatron's, and where the checkpoint is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..state import together
from ..storage.places import AnyPlace, any_place
from .release import CheckpointingException

#: How long a rank waits for the others to begin the same save or load.
PATIENCE = timedelta(minutes=5)


class Together(together.Together):
    """The ranks that save or load a checkpoint together, with the errors of Megatron's."""

    error = CheckpointingException
    hint = (
        "If it has raised an error on its own, that says why: megatron-core's save and load check some things on one "
        "rank alone, tensorferry.megatron's tell all ranks"
    )

    def __init__(self, group: Any = None, patience: timedelta = PATIENCE, within: Together | None = None) -> None:
        super().__init__(group, patience, within)


class OfRanks:
    """What the strategies share: their place, and that all ranks call them and tell each other what fails.

    Attributes:
        process_group: the ranks; ``None`` means all
        timeout: how long a rank waits for the others to begin
    """

    process_group: Any
    timeout: timedelta
    _met: Together | None = None
    _store_options: Mapping[str, Any] | None = None

    def place(self, checkpoint_dir: str | Path) -> AnyPlace:
        """Returns the folder of a checkpoint, or its place in a store.

        Raises:
            InvalidArgument: the path or the URL cannot be used
            SystemRefused: it is relative, and the current folder is gone
        """
        return any_place(checkpoint_dir, "checkpoint_dir", store_options=self._store_options)

    def _ranks(self) -> Together:
        return Together(self.process_group, self.timeout) if self._met is None else self._met

    @contextlib.contextmanager
    def among(self, ranks: Together) -> Iterator[None]:
        """While the block runs, the strategy takes its steps with ``ranks``, which need not meet again."""
        self._met = ranks
        try:
            yield
        finally:
            self._met = None
