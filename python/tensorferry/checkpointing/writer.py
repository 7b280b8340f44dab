"""The trainer's side of the process that writes checkpoints: starts it, hands states over, and hears how it went."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import ForkedProcess, SystemRefused, TensorferryError, WriterLost
from ..storage.folder_save import abandon
from ..storage.objects.client import client_paths
from . import handover
from .handover import Handover, Message
from .orders import Order

logger = logging.getLogger("tensorferry")

#: Seconds in which a process whose socket is closed has to be gone; after that it is killed.
_GONE_S = 5.0
#: Seconds between two looks at a process, and for how many at least one without a sign of life is waited for.
_LOOK_S, _LEAST_S = 1.0, 10.0
#: How often a state is handed over, to one process after the other, until one accepts it.
_ATTEMPTS = 2
#: Longest text of a process that failed, in bytes.
_LONGEST_TEXT = 4000

#: What the process runs. It imports from the standard library, from this package, and from the folder in which the
#: client of object stores lies, if there is one: mostly that of all packages of the trainer. It has the variables of
#: the trainer's environment.
_PROGRAM = """
import sys
sys.path += [sys.argv[1], *sys.argv[4:]]
from tensorferry.checkpointing.writer_process import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


class Delivery:
    """A state that is handed over. The functions are called at most once each, on the thread that hears the process.

    They may not raise. If :meth:`Writer.hand_over` raises, neither is called.

    Attributes:
        given: the state; ``None`` once a process has accepted it
        order: what is to be written where
        accepted: called without an argument when a process holds the memory
        done: called with the fields of ``written``, or with an exception; no process uses the memory any more
        attempts: how often it was handed over
    """

    def __init__(
        self,
        given: Handover,
        order: Order,
        accepted: Callable[[], None],
        done: Callable[[dict[str, Any] | Exception], None],
    ) -> None:
        self.given: Handover | None = given
        self.order, self.accepted, self.done = order, accepted, done
        self.attempts = 0


class Writer:
    """Processes that write checkpoints: one at a time, and another one when it is gone.

    It is used in the process that made it. A forked child closes its copies of the sockets, so that a process whose
    trainer has ended does not wait for that child, too.
    """

    def __init__(self) -> None:
        #: A ``__del__`` may enter it again, in the same thread, here and in ``_Child``.
        self._lock = threading.RLock()
        self._child: _Child | None = None
        self._all: list[_Child] = []
        self._process = os.getpid()
        self._is_closed = False
        _writers.add(self)

    def start(self) -> None:
        """Starts a process, unless one is running, and does not wait for it.

        Raises:
            SystemRefused: the system refuses
            ForkedProcess: this is a forked child
        """
        self.check_process()
        with self._lock:
            self._running_child()

    @property
    def pid(self) -> int | None:
        """The process id of the process, if one is running."""
        child = self._child
        return child.pid if child is not None and child.takes else None

    def hand_over(self, delivery: Delivery) -> None:
        """Hands a state over. ``delivery`` learns what becomes of it.

        A process that ends before it has accepted the state is replaced by another one, once.

        Raises:
            SystemRefused: no process can be started or reached, or there is no memory for the table of entries
            InvalidArgument: the message is too long, or the state lies in too many buffers
            ForkedProcess: this is a forked child
        """
        self.check_process()
        with self._lock:
            for _ in range(_ATTEMPTS):
                try:
                    child = self._running_child()
                    child.hand_over(delivery)
                except OSError as e:
                    if isinstance(e, TensorferryError):
                        raise
                    # It is just ending; a new one takes its place.
                    lost = e
                else:
                    if self._is_closed:
                        child.finish()
                    return
            raise SystemRefused(f"the process that writes checkpoints cannot be reached: {lost}") from lost

    def _lost(self, delivery: Delivery, error: WriterLost, silent: bool) -> None:
        """Hands a state over again whose process has ended before it accepted it, or ends its save with ``error``."""
        if delivery.given is not None and delivery.attempts < _ATTEMPTS:
            try:
                self.hand_over(delivery)
            except Exception as e:  # The future is told instead.
                error.add_note(f"Another process could not take its place: {e}")
            else:
                return
        # Not what the process has committed in its last moment. After silence, the folder may hang as well, and the
        # other ranks have waited as long for a sign of life.
        if not silent:
            abandon(delivery.order.path, delivery.order.save, str(error))
        delivery.done(error)

    def close(self, timeout: float | None = None) -> bool:
        """Lets the processes finish and end; returns whether all have ended within ``timeout`` seconds.

        A thread that hears a process does not wait for that one. In a forked child, nothing is done, and true returned.
        """
        if not self.is_own:
            return True
        with self._lock:
            self._is_closed = True
            children, self._all, self._child = self._all, [], None
        for child in children:
            child.finish()
        deadline = None if timeout is None else time.monotonic() + timeout
        return all([child.join(deadline) for child in children])

    def detach(self) -> None:
        """Leaves the processes to themselves, while the interpreter exits: they finish, and end."""
        for child in self._all:
            child.detach()

    @property
    def is_listening(self) -> bool:
        """Whether the calling thread is one that hears what a process says, and runs the callbacks of futures."""
        return any(child.is_listening for child in self._all)

    @property
    def is_own(self) -> bool:
        """Whether this is the process that made it, and not a forked child."""
        return self._process == os.getpid()

    def check_process(self) -> None:
        """Raises in a forked child.

        Raises:
            ForkedProcess: this is one
        """
        if not self.is_own:
            raise ForkedProcess(
                "this checkpointer was made before fork(): its process and threads are not the child's; make a new one"
            )

    def _running_child(self) -> _Child:
        """Returns the process that takes orders; starts one if there is none. The caller holds the lock.

        One that takes no more is left to finish what it has, and is forgotten once it has ended.

        Raises:
            SystemRefused: no process can be started
        """
        if self._child is None or not self._child.takes:
            self._all = [child for child in self._all if not child.ended]
            self._child = _Child(self._lost)
            self._all.append(self._child)
        return self._child

    def _close_in_child(self) -> None:
        for child in self._all:
            child.close_in_child()


class _Child:
    """One process, and a thread that hears what it says."""

    def __init__(self, lost: Callable[[Delivery, WriterLost, bool], None]) -> None:
        self._left = lost
        if not sys.executable:
            raise SystemRefused("no process can be started: sys.executable is empty; set it to the path of Python")
        with contextlib.ExitStack() as opened:
            try:
                ours, theirs = handover.pair()
                opened.callback(ours.close)
                with theirs:
                    # What it says if it fails. Not a pipe: nobody need read it, and nobody waits for its end.
                    self._said = os.memfd_create("tensorferry-writer", os.MFD_CLOEXEC)
                    opened.callback(os.close, self._said)
                    self._process = _started(theirs.fileno(), self._said)
            except OSError as e:
                raise SystemRefused(f"the process that writes checkpoints cannot be started: {e}") from e
            opened.pop_all()
        self.pid = self._process.pid
        self._sock = ours
        self._lock = threading.RLock()
        self._unconfirmed: dict[str, Delivery] = {}
        self.takes = True
        self.ended = False
        self._thread = threading.Thread(target=self._listen, name="tensorferry-writer", daemon=True)
        self._thread.start()

    def hand_over(self, delivery: Delivery) -> None:
        """Sends a state to the process.

        It also returns if the process ended meanwhile and the listening thread has found the delivery: that thread
        hands it over again.

        Raises:
            OSError: the process takes no more; or, as ``SystemRefused``, there is no memory for the table of entries
            InvalidArgument: the message is too long, or the state lies in too many buffers
        """
        key, given = delivery.order.save.save, delivery.given
        assert given is not None
        with self._lock:
            if not self.takes:
                raise BrokenPipeError("the process has ended")
            self._unconfirmed[key] = delivery
        delivery.attempts += 1
        try:
            handover.send(self._sock, given)
        except BaseException as e:
            with self._lock:
                # An error of our own, such as memory that the table cannot have, says nothing about the process.
                if isinstance(e, OSError) and not isinstance(e, TensorferryError):
                    self.takes = False
                if self._unconfirmed.pop(key, None) is None:
                    # Whoever listens has found the process gone, and has said so.
                    return
            raise

    def finish(self) -> None:
        """Tells the process that no more states come: it writes those that it has, and ends."""
        with self._lock:
            self.takes = False
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    @property
    def is_listening(self) -> bool:
        return self._thread is threading.current_thread()

    def join(self, deadline: float | None) -> bool:
        if self.is_listening:
            return False
        self._thread.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def close_in_child(self) -> None:
        """Closes what a forked child has inherited. The process is the parent's, and is not to be waited for."""
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())
        self._process.returncode = 0

    def detach(self) -> None:
        """Leaves the process to itself, while the interpreter exits."""
        if self._process.returncode is None:
            self._process.returncode = 0

    def _listen(self) -> None:
        """Reads what the process says until it has ended; then reports the deliveries that it did not confirm as lost.

        A process that refuses what it is sent, says what is no message, or shows no sign of life, is given up in the
        same way.
        """
        why: Exception | None = None
        while True:
            if silent := self._is_silent():
                self._process.kill()
                break
            try:
                message = handover.receive(self._sock)
            except (OSError, TensorferryError) as e:
                why, message = e, None
            if message is None:
                break
            if isinstance(message, Message):
                if message.kind == "refused":
                    why = _error(message.fields)
                    break
                self._handle(message)
        with self._lock:
            self.takes = False
            left, self._unconfirmed = list(self._unconfirmed.values()), {}
        lost = self._lost(why, silent)
        self._sock.close()
        os.close(self._said)
        self.ended = True
        for delivery in left:
            self._left(delivery, lost, silent)

    def _is_silent(self) -> bool:
        """Waits until the process says something; returns true if it shows no sign of life for too long.

        One that has nothing to do may be silent, until it is told to end. Looks are counted, instead of time: a machine
        that was suspended has not waited.
        """
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        looks, seen = 0, None
        while not poll.poll(_LOOK_S * 1000):
            with self._lock:
                patience = max([_LEAST_S, *(one.order.options.patience for one in self._unconfirmed.values())])
                is_idle = self.takes and not self._unconfirmed
            # The process touches it while it works.
            signs = os.fstat(self._said).st_mtime_ns
            looks = 0 if is_idle or signs != seen else looks + 1
            seen = signs
            if looks * _LOOK_S > patience:
                return True
        return False

    def _handle(self, message: Message) -> None:
        """Passes on what the process says of a delivery: that it has accepted it, or how the save went."""
        key = message.fields.get("save_id")
        if message.kind == "accepted":
            with self._lock:
                delivery = self._unconfirmed.get(str(key))
            if delivery is not None:
                delivery.given = None
                delivery.accepted()
            return
        with self._lock:
            delivery = self._unconfirmed.pop(str(key), None)
        if delivery is not None:
            delivery.done(message.fields if message.kind == "written" else _error(message.fields))

    def _lost(self, why: Exception | None, silent: bool) -> WriterLost:
        """Returns the error that says how the process has ended, and ``why`` if that is known.

        Waits for its end; a process that takes too long is killed.
        """
        code = self._ended_with()
        if code is None:
            # It has closed its socket, or says what is no message: nobody can hear from it any more.
            self._process.kill()
            code = self._ended_with()
        if code is None:
            how = "does not end although it was killed, since it waits for a disk or a file server,"
        else:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if silent:
            how = f"showed no sign of life for longer than patience= allows, and {how}"
        output = os.pread(self._said, 1 << 20, 0)[-_LONGEST_TEXT:].decode(errors="replace").strip()
        text = f"the process that writes checkpoints (pid {self.pid}) {how} before it had confirmed this save"
        if why is not None:
            text = f"{text}: {why}"
        return WriterLost(f"{text}. It said: {output}" if output else text)

    def _ended_with(self) -> int | None:
        """Waits for the end of the process; returns its exit code, ``None`` if it goes on."""
        try:
            return self._process.wait(_GONE_S)
        except subprocess.TimeoutExpired:
            return None


def _started(sock: int, said: int) -> subprocess.Popen[bytes]:
    """Starts a process that writes, which has the descriptor ``sock`` and writes what it says to ``said``."""
    package = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, package, str(sock), str(os.getpid()), *client_paths()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said,
        pass_fds=[sock],
        # Not in a session of its own: where the kernel gives each session a share (autogroups), the weight of a process
        # counts within its session only, and this one would have as much as the whole trainer.
        process_group=0,
        cwd="/",
    )


def _error(fields: dict[str, Any]) -> Exception:
    """Returns the exception that a process reports."""
    return errors.named(str(fields.get("error")), str(fields.get("text")))


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def _after_fork() -> None:
    for writer in list(_writers):
        writer._close_in_child()


os.register_at_fork(after_in_child=_after_fork)
