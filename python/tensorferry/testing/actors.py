"""The two processes of a cell, a healthy source and a healing receiver; each obeys what comes through its pipe."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .memory import change, free_at_once, overwrite, replace
from .names import SilentNameServer
from .sample import sample_state, wrong_bytes
from .scenarios import LeftOut
from .traps import set_trap

__all__ = ["BUILTIN", "Candidate", "Received", "Setting", "SourceReport", "receiver_main", "source_main"]


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
        local: whether processes of one machine can do without the network: the factory then takes ``same_host`` and
            ``max_bandwidth`` (bytes per second), too
        in_place: whether a receiver can write into its live state: the factory then takes ``state_dict``, too
        stock: whether it receives from torchft's own transport besides its own kind
    """

    name: str
    factory: str
    lanes: int = 4
    join: str = ""
    encrypts: bool = False
    local: bool = False
    in_place: bool = False
    stock: bool = False

    def build(self, timeout: float, **more: Any) -> Any:
        """A transport of this kind; ``more`` is what only some kinds take."""
        return _named(self.factory)(timedelta(seconds=timeout), self.lanes, **more)

    def joined(self, metadata: list[str]) -> str:
        """One metadata string for several sources."""
        return str(_named(self.join)(metadata))


def _named(what: str) -> Any:
    module, _, name = what.partition(":")
    return getattr(importlib.import_module(module), name)


def _tensorferry(timeout: timedelta, lanes: int, **more: Any) -> Any:
    from ..torchft.transport import HTTPTransport

    return HTTPTransport(timeout, lanes, **more)


def _tensorferry_copy(timeout: timedelta, lanes: int, **more: Any) -> Any:
    return _tensorferry(timeout, lanes, snapshot="copy", **more)


def _tensorferry_secret(timeout: timedelta, lanes: int, **more: Any) -> Any:
    return _tensorferry(timeout, lanes, secret="shared by the processes of a cell", **more)


def _tensorferry_tls(timeout: timedelta, lanes: int, **more: Any) -> Any:
    return _tensorferry(timeout, lanes, tls=True, **more)


def _torchft(timeout: timedelta, lanes: int) -> Any:
    from torchft.checkpointing import HTTPTransport

    return HTTPTransport(timeout, lanes)


_JOIN = "tensorferry:join_metadata"

BUILTIN = {
    candidate.name: candidate
    for candidate in (
        Candidate("tensorferry", f"{__name__}:_tensorferry", join=_JOIN, local=True, in_place=True, stock=True),
        Candidate(
            "tensorferry-copy", f"{__name__}:_tensorferry_copy", join=_JOIN, local=True, in_place=True, stock=True
        ),
        Candidate("tensorferry-secret", f"{__name__}:_tensorferry_secret", join=_JOIN, local=True, in_place=True),
        Candidate(
            "tensorferry-tls", f"{__name__}:_tensorferry_tls", join=_JOIN, encrypts=True, local=True, in_place=True
        ),
        Candidate("torchft", f"{__name__}:_torchft"),
        Candidate("torchft-unchunked", f"{__name__}:_torchft", lanes=0),
    )
}
"""Transports known by name."""


@dataclass(frozen=True)
class Setting:
    """What a row asks of the processes of its cell.

    Args:
        local: do without the network where both can
        bytes_per_second: what a source may send then, since nothing else holds a receive up; 0: as much as it can
        in_place: receive into a live state
        silent_names: the receiver has a name server that never answers
    """

    local: bool = False
    bytes_per_second: int = 0
    in_place: bool = False
    silent_names: bool = False


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
    replaced: bool = False
    """Whether its live tensors got other memory meanwhile."""


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
    free_at_once()
    torch.set_num_threads(1)


def source_main(
    pipe: Connection, candidate: Candidate, nbytes: int, timeout: float, setting: Setting, log: str, bound: float
) -> None:
    """Trains in a loop; does what it is told to in between."""
    _enter(log, bound)
    more: dict[str, Any] = {"same_host": True} if setting.local else {}
    if setting.bytes_per_second:
        more["max_bandwidth"] = setting.bytes_per_second
    trainer = _Trainer(pipe, candidate.build(timeout, **more), nbytes, bound)
    weight = torch.ones(64, 64)
    last = time.monotonic()
    while True:
        weight = weight @ weight / 64
        now = time.monotonic()
        trainer.noticed.longest_pause = max(trainer.noticed.longest_pause, now - last)
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


class _Trainer:
    """What the trainer of a source can be told to do."""

    def __init__(self, pipe: Connection, transport: Any, nbytes: int, bound: float) -> None:
        self.noticed = SourceReport()
        self._pipe = pipe
        self._transport = transport
        self._nbytes = nbytes
        self._bound = bound
        self._state: Any = None
        self._prepared: dict[int, Any] = {}

    def prepare(self, seed: int) -> None:
        """Makes the state that is published next, so that it takes no time then."""
        self._prepared[seed] = sample_state(seed, self._nbytes)

    def publish(self, step: int, seed: int) -> Any:
        """The metadata, or ``None`` if the transport raised."""
        return self._send(step, self._prepared.pop(seed, None) or sample_state(seed, self._nbytes))

    def publish_unsendable(self, step: int) -> Any:
        """As :meth:`publish`, a state with something in it that cannot be pickled."""
        return self._send(step, {"weight": torch.ones(64), "lock": threading.Lock()})

    def publish_trap(self, step: int, trap: Any, marker: Path) -> Any:
        """As :meth:`publish`, a state that is a trap for who unpickles it."""
        return self._send(step, {"weight": torch.ones(64), "trap": set_trap(trap, marker)})

    def withdraw(self) -> bool:
        """Withdraws the state and writes over it."""
        raised = _timed(self.noticed, "disallow_checkpoint", self._transport.disallow_checkpoint)
        if raised is None:  # a trainer that got an exception does not go on
            overwrite(self._state)
        return raised is None

    def drain(self) -> bool:
        """As :meth:`withdraw`, and says so right before."""
        self._pipe.send("draining")
        return self.withdraw()

    def replace(self, how: Any) -> None:
        """Gives the tensors other memory."""
        replace(self._state, how)

    def change(self, seed: int) -> None:
        """Writes the tensors of the prepared state into those that are served."""
        change(self._state, self._prepared[seed])

    def fork(self) -> int:
        """Forks a child that does nothing, as a worker that waits for work does; its pid."""
        pid = os.fork()
        if pid == 0:
            self._pipe.close()  # or nobody would learn that its parent has ended
            signal.alarm(max(int(self._bound), 1))
            while True:
                signal.pause()
        return pid

    def report(self) -> SourceReport:
        """What the trainer noticed since it was asked last."""
        noticed, self.noticed = self.noticed, SourceReport()
        return noticed

    def _send(self, step: int, fresh: Any) -> Any:
        # Overwritten or not, the old one is held until the new one is out, as a trainer's parameters are.
        call = partial(self._transport.send_checkpoint, [1], step, fresh, timedelta(seconds=9))
        raised = _timed(self.noticed, "send_checkpoint", call)
        self._state = fresh
        return None if raised else self._transport.metadata()


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


def receiver_main(
    pipe: Connection, candidate: Candidate, nbytes: int, timeout: float, setting: Setting, log: str, bound: float
) -> None:
    """Receives when told to, and compares with the states that are right."""
    _enter(log, bound)
    if setting.silent_names:
        try:
            # Before the transport has threads; and what only the resolver ends is late.
            SilentNameServer(Path(log).with_name(NAMES_ASKED), timeout + 3)
        except LeftOut as error:
            pipe.send(error)
            return
    live = sample_state(0, nbytes) if setting.in_place else None
    more: dict[str, Any] = {"same_host": True} if setting.local else {}
    if setting.in_place:
        more["state_dict"] = lambda: live
    transport = candidate.build(timeout, **more)
    pipe.send("ready")
    while True:
        try:
            metadata, step, right, within = pipe.recv()
        except EOFError:
            break
        started = time.monotonic()
        try:
            with _replaced_when_told(pipe, live):
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
        # A mixture is held against the state it is nearest to.
        wrong = [wrong_bytes(state, sample_state(seed, nbytes, objects)) for seed, objects in right]
        pipe.send((min(wrong), wrong.index(min(wrong)) > 0))
        del state
    sys.stderr.flush()
    os._exit(0)


@contextlib.contextmanager
def _replaced_when_told(pipe: Connection, live: Any) -> Iterator[None]:
    """While the block runs the tensors of ``live`` get other memory when the cell says so, and it is told."""
    if live is None:
        yield
        return
    over = threading.Event()

    def obey() -> None:
        while not over.is_set():
            if pipe.poll(0.01):
                (how,) = pipe.recv()
                replace(live, how)
                pipe.send(REPLACED)
                return

    other = threading.Thread(target=obey, daemon=True)
    other.start()
    try:
        yield
    finally:
        over.set()
        other.join()


NAMES_ASKED = "names-asked"
"""The file, beside a receiver's log, that says that its silent name server was asked."""

REPLACED = "replaced"
"""What a receiver says whose live tensors have other memory."""


def log_tail(log: Path, lines: int = 12) -> str:
    """The end of what a process printed."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
