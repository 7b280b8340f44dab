"""The ranks of a job that saves or loads checkpoints, in processes of their own.

They are forked from a process that has imported torch, which would take each of them 2 s of CPU.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranks import context

import rank_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Rank:
    """A process, and what it prints."""

    def __init__(self, log: Path, work: Callable[..., None], *arguments: Any) -> None:
        self._log = log
        log.touch()
        self.process = context().Process(target=_be, args=(log, dict(os.environ), work, arguments))
        self.process.start()

    def said(self) -> list[str]:
        """Returns the lines that it has printed so far."""
        return self._log.read_text().splitlines()

    def end(self, expected: int = 0) -> list[str]:
        """Waits until it exits, which must be with ``expected``, and returns what it has printed."""
        self.process.join(100)
        assert self.process.exitcode == expected, "\n".join(self.said()[-60:])
        return self.said()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def ranks_of(world: int, work: Callable[..., None], *arguments: Any) -> Iterator[list[Rank]]:
    """Calls ``work(rank, *arguments)`` in ``world`` processes, which are killed at the end of the block."""
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        ranks = [Rank(Path(logs) / str(rank), work, rank, *arguments) for rank in range(world)]
        for rank in ranks:
            stack.callback(rank.kill)
        yield ranks


def run(what: str, world: int, folder: Path, expected: int = 0) -> None:
    """Runs ``rank_worker.main`` in ``world`` processes, which exit with ``expected``."""
    with ranks_of(world, rank_worker.main, what, world, str(folder)) as ranks:
        for rank in ranks:
            rank.end(expected)


def _be(log: Path, environment: dict[str, str], work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Is a rank, with the environment of the test instead of that of the process it is forked from."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    work(*arguments)
