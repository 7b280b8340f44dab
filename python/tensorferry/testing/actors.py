"""The two processes of a cell, a healthy source and a healing receiver; each obeys what comes through its pipe."""

from __future__ import annotations

import faulthandler
import importlib
import os
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

from .sample import overwrite, sample_state, wrong_bytes

__all__ = ["BUILTIN", "Candidate", "Received", "SourceReport", "receiver_main", "source_main"]


@dataclass(frozen=True)
class Candidate:
    """A transport under test.

    Args:
        name: what the table calls it
        factory: ``module:callable``; called as ``factory(timeout, lanes)`` in each process, it gives a
            ``CheckpointTransport`` whose ``metadata()`` is a URL
        lanes: connections of a receive, or the nearest the transport has
        join: ``module:callable`` that makes one metadata string of those of several sources, where a receive can have
            several
        encrypts: what it sends cannot be read on the way: faults that need that are left out
    """

    name: str
    factory: str
    lanes: int = 4
    join: str = ""
    encrypts: bool = False

    def build(self, timeout: float) -> Any:
        """A transport of this kind."""
        return _named(self.factory)(timedelta(seconds=timeout), self.lanes)

    def joined(self, metadata: list[str]) -> str:
        """One metadata string for several sources."""
        return str(_named(self.join)(metadata))


def _named(what: str) -> Any:
    module, _, name = what.partition(":")
    return getattr(importlib.import_module(module), name)


def _tensorferry(timeout: timedelta, lanes: int) -> Any:
    from ..transport import HTTPTransport

    return HTTPTransport(timeout, lanes)


def _tensorferry_copy(timeout: timedelta, lanes: int) -> Any:
    from ..transport import HTTPTransport

    return HTTPTransport(timeout, lanes, snapshot="copy")


def _tensorferry_secret(timeout: timedelta, lanes: int) -> Any:
    from ..transport import HTTPTransport

    return HTTPTransport(timeout, lanes, secret="shared by the processes of a cell")


def _tensorferry_tls(timeout: timedelta, lanes: int) -> Any:
    from ..transport import HTTPTransport

    return HTTPTransport(timeout, lanes, tls=True)


def _torchft(timeout: timedelta, lanes: int) -> Any:
    from torchft.checkpointing import HTTPTransport

    return HTTPTransport(timeout, lanes)


_JOIN = "tensorferry:join_metadata"

BUILTIN = {
    candidate.name: candidate
    for candidate in (
        Candidate("tensorferry", f"{__name__}:_tensorferry", join=_JOIN),
        Candidate("tensorferry-copy", f"{__name__}:_tensorferry_copy", join=_JOIN),
        Candidate("tensorferry-secret", f"{__name__}:_tensorferry_secret", join=_JOIN),
        Candidate("tensorferry-tls", f"{__name__}:_tensorferry_tls", join=_JOIN, encrypts=True),
        Candidate("torchft", f"{__name__}:_torchft"),
        Candidate("torchft-unchunked", f"{__name__}:_torchft", lanes=0),
    )
}
"""Transports known by name."""


@dataclass
class SourceReport:
    """What a source's trainer noticed."""

    longest_pause: float = 0.0
    """Seconds between two iterations of its loop, calls into the transport left out."""
    calls: list[tuple[str, float, str | None]] = field(default_factory=list)
    """Method, seconds and what it raised."""


@dataclass
class Received:
    """How a receive ended, as the receiving process saw it."""

    seconds: float
    wrong_bytes: int = 0
    error: str | None = None
    """Name of the exception's class; ``None``: it returned."""
    classes: tuple[str, ...] = ()
    """The names of the exception's class and of all its bases."""
    message: str = ""
    newer: bool = False
    """Whether what arrived is the second of the states that were right."""


def _enter(log: str, seconds: float) -> None:
    """What both processes do first."""
    os.environ["TENSORFERRY_SAME_HOST"] = "0"  # a shortcut would not go through the proxy
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the runner, which ends us
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(max(int(seconds), 1))  # should the runner be gone
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # where it hangs
    torch.set_num_threads(1)


def source_main(pipe: Connection, candidate: Candidate, nbytes: int, timeout: float, log: str, bound: float) -> None:
    """Trains in a loop; prepares states, publishes, withdraws and reports when told to."""
    _enter(log, bound)
    transport = candidate.build(timeout)
    report = SourceReport()
    state: Any = None
    prepared: dict[int, Any] = {}
    weight = torch.ones(64, 64)
    last = time.monotonic()
    while True:
        weight = weight @ weight / 64
        now = time.monotonic()
        report.longest_pause = max(report.longest_pause, now - last)
        last = now
        if not pipe.poll(0.005):
            continue
        try:
            verb, *arguments = pipe.recv()
        except EOFError:
            break
        answer: Any = None
        if verb == "prepare":
            (seed,) = arguments
            prepared[seed] = sample_state(seed, nbytes)
        elif verb == "publish":
            step, seed = arguments
            # Overwritten or not, the old one is held until the new one is out, as a trainer's parameters are.
            fresh = prepared.pop(seed, None) or sample_state(seed, nbytes)
            raised = _timed(
                report, "send_checkpoint", partial(transport.send_checkpoint, [1], step, fresh, timedelta(seconds=9))
            )
            state = fresh
            answer = None if raised else transport.metadata()
        elif verb == "withdraw":
            answer = _timed(report, "disallow_checkpoint", transport.disallow_checkpoint) is None
            if answer:  # a trainer that got an exception does not go on
                overwrite(state)
        elif verb == "report":
            answer, report = report, SourceReport()
        pipe.send(answer)
        last = time.monotonic()
    os._exit(0)


def _timed(report: SourceReport, name: str, call: Callable[[], None]) -> BaseException | None:
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
    """Receives when told to, and compares with the states that are right."""
    _enter(log, bound)
    transport = candidate.build(timeout)
    pipe.send("ready")
    while True:
        try:
            metadata, step, seeds, within = pipe.recv()
        except EOFError:
            break
        started = time.monotonic()
        try:
            state = transport.recv_checkpoint(0, metadata, step, timedelta(seconds=within))
        except Exception as error:
            seconds = time.monotonic() - started
            names = tuple(c.__name__ for c in type(error).__mro__)
            pipe.send(Received(seconds, error=names[0], classes=names, message=str(error)[:500]))
            continue
        pipe.send(Received(time.monotonic() - started))
        # A mixture is held against the state it is nearest to.
        wrong = [wrong_bytes(state, sample_state(seed, nbytes)) for seed in seeds]
        pipe.send((min(wrong), wrong.index(min(wrong)) > 0))
        del state
    sys.stderr.flush()
    os._exit(0)


def log_tail(log: Path, lines: int = 12) -> str:
    """The end of what a process printed."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
