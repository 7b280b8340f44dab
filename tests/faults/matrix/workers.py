"""The main functions of the two processes of a cell: a source and a receiver, driven by requests through a pipe."""

from __future__ import annotations

import faulthandler
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .candidates import Candidate
from .sample import sample_state, wrong_bytes
from .tensor_memory import change, free_at_once, overwrite, replace


@dataclass
class SourceReport:
    """What a source's trainer has measured since the last report."""

    longest_pause: float = 0.0
    """Longest time between two iterations of its loop, calls into the transport left out, seconds."""
    calls: list[tuple[str, float, str | None]] = field(default_factory=list)
    """For each call into the transport: method, seconds, and the exception as text if one was raised."""


@dataclass
class Received:
    """The result of a receive, as reported by the receiving process."""

    seconds: float
    wrong_bytes: int = 0
    error: str | None = None
    """Name of the exception's class; ``None`` if the receive returned."""
    classes: tuple[str, ...] = ()
    """The names of the exception's class and of all its bases."""
    message: str = ""
    newer: bool = False
    """Whether the state that arrived is the second of the two allowed ones."""


def _prepare_process(log: str, seconds: float) -> None:
    """Sets up environment, signals and output of this process, which ends itself after ``seconds``."""
    os.environ["TENSORFERRY_SAME_HOST"] = "0"  # shared memory would bypass the proxy
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the runner, which ends this process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(max(int(seconds), 1))  # in case the runner has died
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # prints where the process hangs
    free_at_once()
    torch.set_num_threads(1)


def source_main(pipe: Connection, candidate: Candidate, nbytes: int, timeout: float, log: str, bound: float) -> None:
    """Runs a source: trains in a loop and carries out the requests from ``pipe`` between two iterations.

    It ends the process once the other end of the pipe is closed.
    """
    _prepare_process(log, bound)
    trainer = _Trainer(pipe, candidate.build(timeout), nbytes)
    weight = torch.ones(64, 64)
    last = time.monotonic()
    while True:
        weight = weight @ weight / 64
        now = time.monotonic()
        trainer.measured.longest_pause = max(trainer.measured.longest_pause, now - last)
        last = now
        if not pipe.poll(0.005):
            continue
        try:
            verb, *arguments = pipe.recv()
        except EOFError:
            break
        pipe.send(getattr(trainer, verb)(*arguments))
        last = time.monotonic()
    os._exit(0)


class _Trap:
    """Is pickled as a call of ``os.system``."""

    def __init__(self, marker: Path) -> None:
        self._command = f": > {shlex.quote(str(marker))}"

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


class _Trainer:
    """The trainer of a source; each public method is a request that the runner can send."""

    def __init__(self, pipe: Connection, transport: Any, nbytes: int) -> None:
        self.measured = SourceReport()
        self._pipe = pipe
        self._transport = transport
        self._nbytes = nbytes
        self._state: Any = None
        self._prepared: dict[int, Any] = {}

    def prepare(self, seed: int) -> None:
        """Makes the state of a later :meth:`publish` or :meth:`change` in advance."""
        self._prepared[seed] = sample_state(seed, self._nbytes)

    def publish(self, step: int, seed: int) -> Any:
        """Publishes the state of a seed; returns the metadata, or ``None`` if the transport raised."""
        return self._send(step, self._prepared.pop(seed, None) or sample_state(seed, self._nbytes))

    def publish_trap(self, step: int, marker: Path) -> Any:
        """Like :meth:`publish`, with a state whose unpickling by a careless receiver writes a file."""
        return self._send(step, {"weight": torch.ones(64), "trap": _Trap(marker)})

    def withdraw(self) -> bool:
        """Withdraws the state, and writes over it unless the transport raised; returns whether it did not raise."""
        raised = _timed_call(self.measured, "disallow_checkpoint", self._transport.disallow_checkpoint)
        if raised is None:  # a trainer would not go on after an exception
            overwrite(self._state)
        return raised is None

    def drain(self) -> bool:
        """Like :meth:`withdraw`, and sends ``"draining"`` right before."""
        self._pipe.send("draining")
        return self.withdraw()

    def replace(self) -> None:
        """Gives the tensors of the published state other memory."""
        replace(self._state)

    def change(self, seed: int) -> None:
        """Writes the prepared state of a seed into the tensors that are served."""
        change(self._state, self._prepared[seed])

    def report(self) -> SourceReport:
        """Returns the measurements since the last report."""
        measured, self.measured = self.measured, SourceReport()
        return measured

    def _send(self, step: int, fresh: Any) -> Any:
        # The old state is kept until the new one is published, as a trainer keeps its parameters.
        call = partial(self._transport.send_checkpoint, [1], step, fresh, timedelta(seconds=9))
        raised = _timed_call(self.measured, "send_checkpoint", call)
        self._state = fresh
        return None if raised else self._transport.metadata()


def _timed_call(report: SourceReport, name: str, call: Callable[[], None]) -> BaseException | None:
    """Calls ``call`` and notes in ``report`` how long it took and what it raised; returns the latter."""
    started = time.monotonic()
    raised: BaseException | None = None
    try:
        call()
    except Exception as error:
        raised = error
    text = None if raised is None else f"{type(raised).__name__}: {raised}"
    report.calls.append((name, time.monotonic() - started, text))
    return raised


def receiver_main(pipe: Connection, candidate: Candidate, nbytes: int, timeout: float, log: str, bound: float) -> None:
    """Runs a receiver: receives on request, and compares the result with the allowed states.

    It ends the process once the other end of the pipe is closed.
    """
    _prepare_process(log, bound)
    transport = candidate.build(timeout)
    pipe.send("ready")
    while True:
        try:
            metadata, step, allowed, within = pipe.recv()
        except EOFError:
            break
        started = time.monotonic()
        try:
            state = transport.recv_checkpoint(0, metadata, step, timedelta(seconds=within))
        except Exception as error:
            seconds = time.monotonic() - started
            classes = tuple(c.__name__ for c in type(error).__mro__)
            received = Received(seconds, error=classes[0], classes=classes, message=str(error)[:500])
        else:
            received = Received(time.monotonic() - started)
        pipe.send(received)
        if received.error:
            continue
        # A mixture is compared with the nearest of the allowed states.
        wrong = [wrong_bytes(state, sample_state(seed, nbytes, objects)) for seed, objects in allowed]
        pipe.send((min(wrong), wrong.index(min(wrong)) > 0))
        del state
    sys.stderr.flush()
    os._exit(0)


def log_tail(log: Path, lines: int = 12) -> str:
    """Returns the last lines that a process printed."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
