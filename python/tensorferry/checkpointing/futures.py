"""Futures of saves: how a save went."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


class SaveFuture(Future[Any]):
    """A standard future that notes whether it has told anyone how the save went.

    Attributes:
        seen: whether somebody has read its outcome
        is_logged: whether the log has its error
    """

    seen = is_logged = False

    def result(self, timeout: float | None = None) -> Any:
        """As for ``Future``."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As for ``Future``."""
        error = super().exception(timeout)
        # Not before: a wait that a timeout or a Ctrl-C ends has told nobody anything.
        self.seen = True
        return error

    @property
    def is_settled(self) -> bool:
        """Whether its outcome needs no further report: it succeeded, or somebody has read its error."""
        return self.done() and (self.seen or self.failure is None)

    @property
    def failure(self) -> BaseException | None:
        """The error of one that is done, which this does not count as read."""
        return super().exception()
