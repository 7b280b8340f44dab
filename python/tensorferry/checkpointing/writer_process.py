"""The process that writes checkpoints; torch-free, so that it is ready at once.

It belongs to one trainer, which starts it and hands staged states over (``handover.py``). It is in a process group of
its own: what the terminal or a launcher sends to the trainer's processes does not reach it. What it has accepted it
writes, whatever becomes of the trainer; it ends when the trainer has closed the socket, or is gone, and everything is
written. SIGTERM has the same effect; SIGKILL ends it at once.

It is not slowed down, only of less weight than the trainer: it uses what the trainer's threads leave of the cores, and
about a tenth of a core for each of its threads where they leave nothing.

Messages to it: the handover ``save``, with the fields of an :class:`Order`. From it, with the ``save_id``:

    accepted    it holds the memory, and writes it even if the trainer is gone
    written     the checkpoint is on the disk and committed: ``bytes``, ``direct``
    failed      it is not: ``error``, the name of an exception in ``tensorferry.errors``, and ``text``

or, without an id and as the last one before it ends,

    refused     what has arrived is no order, or one of another version: ``error`` and ``text`` as for ``failed``

After ``written`` and ``failed`` it does not touch the memory any more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

from .. import errors
from ..errors import ProtocolError, TensorferryError
from ..storage.lineage import Lineage
from . import handover
from .handover import Handover, Message
from .orders import Order, perform

logger = logging.getLogger("tensorferry")

#: How much the trainer's threads go before those of this process: a tenth of a thread's weight is left to it.
_NICE = 10
#: Seconds after which it looks whether the trainer is still there: a forked child may hold the trainer's socket open.
_LOOK_S = 1.0
#: Nanoseconds of work of the other threads, between two looks, that are a sign of life.
_WORK_NS = 100_000
#: Longest text of an error, in bytes of what is sent.
_LONGEST_TEXT = 8000


class _Process:
    """Receives orders on one thread and carries them out, one after the other, on another."""

    def __init__(self, sock: socket.socket, trainer: int) -> None:
        self._sock, self._trainer = sock, trainer
        self._orders: queue.SimpleQueue[tuple[Order, Handover] | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._worked_ns = 0
        self._lineage = Lineage()

    def run(self) -> None:
        """Accepts states until the trainer sends no more or is gone; another thread writes them meanwhile."""
        worker = threading.Thread(target=self._work, name="tensorferry-writer")
        worker.start()
        try:
            while (order := self._accept_next()) is not None:
                self._orders.put(order)
        finally:
            self._orders.put(None)
            worker.join()

    def end(self) -> None:
        """Accepts nothing any more; what has arrived is accepted still."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def _accept_next(self) -> tuple[Order, Handover] | None:
        """Waits for the next state, and tells the trainer that it is accepted; ``None`` if no more will come.

        It is also ``None`` after a message that is no order, which the trainer is told.
        """
        # Not select(), which refuses descriptors of 1024 and more: the trainer may have had as many when it made ours.
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            if not poll.poll(_LOOK_S * 1000):
                if os.getppid() != self._trainer:
                    return None
                self._show_life()
                continue
            try:
                message = handover.receive(self._sock)
                if message is None:
                    return None
                if not isinstance(message, Handover):
                    raise ProtocolError(f"a message {message.kind!r} is not for a writer")
                order = Order.of(message.fields)
            except TensorferryError as e:
                # From a trainer of another version, say: it learns why, and this process is of no use to it.
                self._tell("refused", error=type(e).__name__, text=str(e))
                return None
            self._tell("accepted", save_id=order.save.save)
            return order, message

    def _show_life(self) -> None:
        """Touches the file of what this process says, at whose time the trainer looks, if other threads have worked.

        One that waits for a disk or a file server without end does not.
        """
        worked = time.process_time_ns() - time.thread_time_ns()
        if worked > self._worked_ns + _WORK_NS:
            self._worked_ns = worked
            with contextlib.suppress(OSError):
                os.utime(sys.stderr.fileno())

    def _work(self) -> None:
        """Writes the accepted states one after the other, and tells the trainer how each went."""
        while (order := self._orders.get()) is not None:
            try:
                result = _performed(*order, self._lineage)
            except Exception as e:  # Whatever it is, the trainer learns it, and the next order is carried out.
                result = {}
                self._tell("failed", save_id=order[0].save.save, error=errors.name_of(e), text=str(e))
            save_id = order[0].save.save
            # The memory goes first: the trainer may use it for something else at once.
            del order
            if result:
                self._tell("written", save_id=save_id, **result)

    def _tell(self, kind: str, **fields: Any) -> None:
        # A trainer that is gone needs no answer.
        with self._sending, contextlib.suppress(OSError):
            if isinstance(text := fields.get("text"), str):
                fields["text"] = _cut(text)
            handover.send(self._sock, Message(kind, fields))


def _cut(text: str) -> str:
    """Returns as much of ``text`` as fits into a message: JSON has up to twelve bytes for a character."""
    while (length := len(json.dumps(text))) > _LONGEST_TEXT:
        text = text[: len(text) * _LONGEST_TEXT // length]
    return text


def _performed(order: Order, given: Handover, lineage: Lineage) -> dict[str, int]:
    """Carries ``order`` out; returns the fields of ``written``."""
    written = perform(order, given.container, lineage)
    return {"bytes": written.bytes, "direct": written.direct}


def main(descriptor: int, trainer: int) -> None:
    """Runs the process.

    Args:
        descriptor: the descriptor of its end of the socket
        trainer: the process id of the trainer
    """
    os.nice(_NICE)
    sock = socket.socket(fileno=descriptor)
    process = _Process(sock, trainer)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: process.end())
    process.run()
