"""Processes that are always ended: started from a fork server that has torch loaded, ended by their pid."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
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
from .scenario import LeftOut
from .traps import Trap
from .workers import NAMES_ASKED, REPLACED, Received, Setting, log_tail, receiver_main, source_main

__all__ = ["Child", "ChildGone", "ChildHung", "Children", "Orphan", "Right"]

Right: TypeAlias = tuple[int, int]
"""A state a receive may end with: the seed of its tensors, and that of its other objects."""

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


class Orphan:
    """A process that a child has forked; it outlives that, and is ended by a descriptor that means no other.

    Args:
        pid: of the process, which lives and whose parent waits for nobody
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def alive(self) -> bool:
        """Whether it runs."""
        return not select.select([self._descriptor], [], [], 0)[0]

    def end(self) -> None:
        """Kills it if it still runs, and waits."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        select.select([self._descriptor], [], [], 10)
        os.close(self._descriptor)


class Children:
    """The processes of one cell; all are ended when the block is left.

    Args:
        nbytes: size of the state
        timeout: of the transports, seconds
        bound: seconds after which a process ends itself, whatever becomes of us
        setting: what the row asks of them
    """

    def __init__(self, nbytes: int, timeout: float, bound: float, setting: Setting) -> None:
        self._nbytes = nbytes
        self._timeout = timeout
        self._bound = bound
        self._setting = setting
        self._children: list[Child] = []
        self._orphans: list[Orphan] = []
        self._files = tempfile.TemporaryDirectory(prefix="tensorferry-faults-")
        self.marker = Path(self._files.name) / "code-ran"
        """A file that is there if code of a hostile source ran."""
        self.names_asked = self.marker.with_name(NAMES_ASKED)
        """And one that is there if a silent name server was asked."""

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for child in self._children:
            child.end()
        for orphan in self._orphans:
            orphan.end()
        self._files.cleanup()

    def adopt(self, pid: int) -> Orphan:
        """A process that one of the children has forked; it is ended with them."""
        orphan = Orphan(pid)
        self._orphans.append(orphan)
        return orphan

    def source(self, candidate: Candidate, step: int, seed: int, trap: Trap | None = None) -> tuple[Child, str]:
        """A source that has published a state, or a trap, and its metadata."""
        child = self._start(source_main, candidate)
        metadata = child.ask(("publish_trap", step, trap, self.marker) if trap else ("publish", step, seed), _START)
        if metadata is None:
            raise ChildGone(f"the source could not publish: {child.ask(('report',), _START)}")
        return child, str(metadata)

    def receiver(self, candidate: Candidate, plain: bool = False) -> Child:
        """A receiver that is ready.

        Args:
            candidate: the transport it has
            plain: it gets nothing of what the row asks for

        Raises:
            LeftOut: the system does not allow what the row asks for
        """
        child = self._start(receiver_main, candidate, Setting() if plain else self._setting)
        answer = child.answer(_START)
        if isinstance(answer, LeftOut):
            raise answer
        return child

    def receive(
        self, receiver: Child, metadata: str, step: int, right: list[Right], timeout: float, grace: float
    ) -> Received:
        """Has a receiver receive within ``timeout`` seconds; one that hangs is killed ``grace`` seconds after it."""
        receiver.tell((metadata, step, right, timeout))
        return self.received(receiver, timeout + grace)

    def received(self, receiver: Child, within: float) -> Received:
        """What came of the receive that was asked for."""
        answer = receiver.answer(within)
        replaced = answer == REPLACED
        if replaced:
            answer = receiver.answer(within)
        assert isinstance(answer, Received)
        answer.replaced = replaced
        if not answer.error:
            answer.wrong_bytes, answer.newer = receiver.answer(_COMPARE)
        return answer

    def _start(self, main: Callable[..., None], candidate: Candidate, setting: Setting | None = None) -> Child:
        ours, theirs = multiprocessing.Pipe()
        log = Path(self._files.name) / f"{len(self._children)}.log"
        setting = setting or self._setting
        arguments = (theirs, candidate, self._nbytes, self._timeout, setting, str(log), self._bound)
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
