"""The processes of a cell: started from a fork server that has torch loaded, and always ended, by their pid."""

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
from typing import Any, TypeAlias

from .candidates import Candidate
from .workers import Received, log_tail, receiver_main, source_main

AllowedState: TypeAlias = tuple[int, int]
"""A state that a receive may return: the seed of its tensors, and the seed of its other objects."""

_START = 90.0
"""Seconds a process may take to start, or to be gone once it is killed, on a busy machine."""
_COMPARE = 120.0
"""Seconds that the comparison of a state may take."""
_starting = threading.Lock()


class ChildHung(Exception):
    """A process did not answer in time; it was killed."""


class ChildGone(Exception):
    """A process ended without having been asked to."""


class Child:
    """A process and the pipe to it."""

    def __init__(self, process: ForkServerProcess, pipe: Connection, log: Path) -> None:
        self.process = process
        self.log = log
        self._pipe = pipe
        self._stopped = False

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process.pid is not None
        return self.process.pid

    def alive(self) -> bool:
        """Whether the process exists, running or stopped."""
        return self.process.is_alive()

    def ask(self, request: Any, within: float) -> Any:
        """Sends a request and returns the answer.

        Raises:
            ChildGone: the process has ended
            ChildHung: no answer came within ``within`` seconds; the process was killed
        """
        self.send(request)
        return self.receive_answer(within)

    def send(self, request: Any) -> None:
        """Sends a request; :meth:`receive_answer` returns its answer.

        Raises:
            ChildGone: the process has ended
        """
        try:
            self._pipe.send(request)
        except OSError as e:
            raise ChildGone(self._end()) from e

    def has_answered(self) -> bool:
        """Whether :meth:`receive_answer` would return or raise at once."""
        return self._pipe.poll(0)

    def receive_answer(self, within: float) -> Any:
        """Returns the answer to the last request; raises like :meth:`ask`."""
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
        """Sends a signal to the process."""
        self._stopped = number == signal.SIGSTOP
        with contextlib.suppress(ProcessLookupError):
            if self.alive():
                os.kill(self.pid, number)

    def printed(self) -> str:
        """The last lines that the process printed."""
        return log_tail(self.log)

    def end(self) -> None:
        """Kills the process if it still runs, and waits for its end."""
        self._pipe.close()
        if self.alive():
            self.process.kill()
        self.process.join(_START)
        self.process.close()

    def _end(self) -> str:
        self.process.join(2)
        return f"process {self.pid} ended ({self.process.exitcode}): {self.printed()}"


class Processes:
    """The processes of one cell. A context manager: all of them are ended when the block is left.

    Args:
        nbytes: size of the state
        timeout: of the transports, seconds
        bound: seconds after which a process ends itself, in case the runner has died
    """

    def __init__(self, nbytes: int, timeout: float, bound: float) -> None:
        self._nbytes = nbytes
        self._timeout = timeout
        self._bound = bound
        self._children: list[Child] = []
        self._files = tempfile.TemporaryDirectory(prefix="tensorferry-faults-")
        self.marker = Path(self._files.name) / "code-ran"
        """A file that exists if code of a hostile source ran."""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for child in self._children:
            child.end()
        self._files.cleanup()

    def source(self, candidate: Candidate, step: int, seed: int, trap: bool = False) -> tuple[Child, str]:
        """Starts a source, which publishes a state.

        Args:
            candidate: the transport of the source
            step: the published step
            seed: of the published state
            trap: publish a state that attacks who unpickles it in place of that

        Returns:
            The source, and its metadata.

        Raises:
            ChildGone: it ended, or could not publish
            ChildHung: it did not start in time
        """
        child = self._start(source_main, candidate)
        metadata = child.ask(("publish_trap", step, self.marker) if trap else ("publish", step, seed), _START)
        if metadata is None:
            raise ChildGone(f"the source could not publish: {child.ask(('report',), _START)}")
        return child, str(metadata)

    def receiver(self, candidate: Candidate) -> Child:
        """Starts a receiver and waits until it is ready.

        Args:
            candidate: the transport of the receiver

        Raises:
            ChildGone: it ended
            ChildHung: it did not start in time
        """
        child = self._start(receiver_main, candidate)
        child.receive_answer(_START)
        return child

    def receive(
        self, receiver: Child, metadata: str, step: int, allowed: list[AllowedState], timeout: float, grace: float
    ) -> Received:
        """Runs a receive with a deadline of ``timeout`` seconds; kills the receiver ``grace`` seconds after that.

        Raises:
            ChildGone: the receiver has ended
            ChildHung: the receiver was killed
        """
        receiver.send((metadata, step, allowed, timeout))
        return self.received(receiver, timeout + grace)

    def received(self, receiver: Child, within: float) -> Received:
        """Returns the result of the receive that was requested last; raises like :meth:`Child.ask`."""
        answer = receiver.receive_answer(within)
        assert isinstance(answer, Received)
        if not answer.error:
            answer.wrong_bytes, answer.newer = receiver.receive_answer(_COMPARE)
        return answer

    def _start(self, main: Callable[..., None], candidate: Candidate) -> Child:
        ours, theirs = multiprocessing.Pipe()
        log = Path(self._files.name) / f"{len(self._children)}.log"
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
    # Has no effect on a fork server that already runs: processes then start more slowly. The server finds what is
    # installed; its processes get this one's sys.path, and find the suite and transports of one's own by it.
    context.set_forkserver_preload(["tensorferry.torchft.transport", "torchft.checkpointing"])
    return context


def wait_until(true: Callable[[], bool], within: float) -> bool:
    """Polls until ``true()`` or for ``within`` seconds; returns whether it became true."""
    end = time.monotonic() + within
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
