"""Processes that are always ended: started from a fork server that has torch loaded, ended by their pid."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from .actors import Candidate, Received, log_tail, receiver_main, source_main

__all__ = ["Child", "ChildGone", "ChildHung", "Children"]

_START = 90.0
"""Seconds a process may take to start on a busy machine."""
_COMPARE = 120.0
"""Seconds that comparing a state may take."""
_starting = threading.Lock()


class ChildHung(Exception):
    """A process did not answer in time; it was killed."""


class ChildGone(Exception):
    """A process ended without being told to."""


class Child:
    """One process and the pipe to it."""

    def __init__(self, process: ForkServerProcess, pipe: Connection, log: Path) -> None:
        self.process = process
        self.log = log
        self._pipe = pipe
        self._stopped = False

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self.process.is_alive()

    def ask(self, request: Any, within: float) -> Any:
        """Sends a request and returns the answer.

        Raises:
            ChildGone: it ended
            ChildHung: no answer came in time; it was killed
        """
        self.tell(request)
        return self.answer(within)

    def tell(self, request: Any) -> None:
        """Sends a request; its answer is fetched with :meth:`answer`."""
        try:
            self._pipe.send(request)
        except OSError as e:
            raise ChildGone(self._end()) from e

    def answered(self) -> bool:
        """Whether an answer, or the end of the process, has come."""
        return self._pipe.poll(0)

    def answer(self, within: float) -> Any:
        """The answer to the last request; raises as :meth:`ask` does."""
        if not self._pipe.poll(within):
            self.signal(signal.SIGUSR1)
            time.sleep(0.5)
            self.signal(signal.SIGKILL)
            raise ChildHung(f"no answer within {within:.0f} s: {self.printed()}")
        try:
            return self._pipe.recv()
        except (EOFError, OSError) as e:
            raise ChildGone(self._end()) from e

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        self._stopped = number == signal.SIGSTOP
        with contextlib.suppress(ProcessLookupError):
            if self.alive():
                os.kill(self.pid, number)

    def printed(self) -> str:
        """The last lines it printed."""
        return log_tail(self.log)

    def end(self) -> None:
        """Kills it if it still runs, and waits."""
        self._pipe.close()
        if self.alive():
            self.process.kill()
        self.process.join(10)
        self.process.close()

    def _end(self) -> str:
        self.process.join(2)
        return f"process {self.pid} ended ({self.process.exitcode}): {self.printed()}"


class Children:
    """The processes of one cell; all are ended when the block is left.

    Args:
        nbytes: size of the state
        timeout: of the transports, seconds
        bound: seconds after which a process ends itself, whatever becomes of us
    """

    def __init__(self, nbytes: int, timeout: float, bound: float) -> None:
        self._nbytes = nbytes
        self._timeout = timeout
        self._bound = bound
        self._children: list[Child] = []
        self._logs = tempfile.TemporaryDirectory(prefix="tensorferry-faults-")

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for child in self._children:
            child.end()
        self._logs.cleanup()

    def source(self, candidate: Candidate, step: int, seed: int) -> tuple[Child, str]:
        """A source that has published a state, and its metadata."""
        child = self._start(source_main, candidate)
        metadata = child.ask(("publish", step, seed), _START)
        if metadata is None:
            raise ChildGone(f"the source could not publish: {child.ask(('report',), _START)}")
        return child, str(metadata)

    def receiver(self, candidate: Candidate) -> Child:
        """A receiver that is ready."""
        child = self._start(receiver_main, candidate)
        child.answer(_START)
        return child

    def receive(
        self, receiver: Child, metadata: str, step: int, seeds: list[int], timeout: float, grace: float
    ) -> Received:
        """Has a receiver receive within ``timeout`` seconds; one that hangs is killed ``grace`` seconds after it."""
        receiver.tell((metadata, step, seeds, timeout))
        return self.received(receiver, timeout + grace)

    def received(self, receiver: Child, within: float) -> Received:
        """What came of the receive that was asked for."""
        answer = receiver.answer(within)
        assert isinstance(answer, Received)
        if not answer.error:
            answer.wrong_bytes, answer.newer = receiver.answer(_COMPARE)
        return answer

    def _start(self, main: Callable[..., None], candidate: Candidate) -> Child:
        ours, theirs = multiprocessing.Pipe()
        log = Path(self._logs.name) / f"{len(self._children)}.log"
        arguments = (theirs, candidate, self._nbytes, self._timeout, str(log), self._bound)
        with _starting:
            process = _context().Process(target=main, args=arguments, daemon=True)
            process.start()
        theirs.close()
        child = Child(process, ours, log)
        self._children.append(child)
        return child


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Has no effect on a fork server that runs already: processes then only start more slowly.
    context.set_forkserver_preload([actor_module, "tensorferry.transport", "torchft.checkpointing"])
    return context


actor_module = source_main.__module__


def wait_until(true: Callable[[], bool], within: float) -> bool:
    """Polls until ``true()`` or the time is over; returns which of them it was."""
    end = time.monotonic() + within
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
