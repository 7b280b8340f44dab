"""The process that writes checkpoints; torch-free, so that it is ready at once.

It belongs to one trainer, which starts it and hands staged states over (``handover.py``). It is in a process group of
its own: what the terminal or a launcher sends to the trainer's processes does not reach it. What it has accepted it
writes, whatever becomes of the trainer; it ends when the trainer has closed the socket, or is gone, and everything is
written. SIGTERM has the same effect; SIGKILL ends it at once.

It is not slowed down, only of less weight than the trainer: it uses what the trainer's threads leave of the cores, and
about a tenth of a core for each of its threads where they leave nothing.

Messages to it: the handover ``save``, whose fields are :class:`Order`. Messages from it, each with the ``save_id``:

    accepted    it holds the memory, and writes it even if the trainer is gone
    written     the checkpoint is on the disk and committed: ``bytes``, ``direct``
    failed      it is not: ``error``, the name of an exception in ``tensorferry.errors``, and ``text``

After ``written`` and ``failed`` it does not touch the memory any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import select
import signal
import socket
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import ProtocolError, TensorferryError
from ..storage import folder as folders
from ..storage.folder import FolderSave, SaveId
from . import handover
from .handover import Handover, Message

logger = logging.getLogger("tensorferry")

#: How much the trainer's threads go before those of this process: a tenth of a thread's weight is left to it.
_NICE = 10
#: Seconds after which it looks whether the trainer is still there: a forked child may hold the trainer's socket open.
_LOOK_S = 1.0


@dataclass(frozen=True)
class Order:
    """What is to be written where; the fields of a handover, all of which JSON can express.

    Attributes:
        path: the folder, absolute
        save_id: as :class:`SaveId` has it, like the next four
        began: likewise
        rank: likewise
        world_size: likewise
        step: likewise
        threads: threads that write; ``None`` chooses by the number of cores
        cached: whether large files are written through the page cache; ``None`` chooses
        patience: seconds without a sign of life of another rank
        keep_last: how many checkpoints of the folder's series stay; ``None`` keeps all
    """

    path: str
    save_id: str
    began: int
    rank: int
    world_size: int
    step: int | None
    threads: int | None = None
    cached: bool | None = None
    patience: float = 600.0
    keep_last: int | None = None

    @property
    def save(self) -> SaveId:
        """Which save it is."""
        return SaveId(self.save_id, self.began, self.rank, self.world_size, self.step)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a handover."""
        return asdict(self)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Order:
        """Returns the order that a handover has; fields that are not an order's are left out.

        Raises:
            ProtocolError: a field is missing or has another type
        """
        known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        numbers = [known.get(name) for name in ("began", "rank", "world_size")]
        texts = [known.get(name) for name in ("path", "save_id")]
        if not all(type(number) is int for number in numbers) or not all(isinstance(text, str) for text in texts):
            raise ProtocolError("a handover does not say what is to be saved where")
        # It becomes a part of names of files.
        if not re.fullmatch("[0-9a-f]{12}", known["save_id"]):
            raise ProtocolError("a handover has no valid id of its save")
        return cls(**known)


def perform(order: Order, given: Handover) -> dict[str, int]:
    """Writes a state and commits it with the other ranks.

    Returns:
        The fields of ``written``.

    Raises:
        TensorferryError: the save has failed, and nothing of it can be loaded
        OSError: likewise
    """
    save = FolderSave(Path(order.path), order.save, order.patience)
    try:
        written = save.write(given.container(), order.threads, order.cached)
        save.commit()
    except BaseException as e:
        save.fail(f"{type(e).__name__}: {e}")
        raise
    finally:
        save.close()
    if order.keep_last is not None and order.rank == 0:
        folders.keep_last(order.keep_last, save.folder)
    return {"bytes": written.bytes, "direct": written.direct}


class _Process:
    """Receives orders on one thread and carries them out, one after the other, on another."""

    def __init__(self, sock: socket.socket, trainer: int) -> None:
        self._sock, self._trainer = sock, trainer
        self._orders: queue.SimpleQueue[tuple[Order, Handover] | None] = queue.SimpleQueue()
        self._sending = threading.Lock()

    def run(self) -> None:
        worker = threading.Thread(target=self._work, name="tensorferry-writer")
        worker.start()
        try:
            while (order := self._next()) is not None:
                self._orders.put(order)
        finally:
            self._orders.put(None)
            worker.join()

    def end(self) -> None:
        """Accepts nothing any more; what has arrived is accepted still."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def _next(self) -> tuple[Order, Handover] | None:
        # Not select(), which refuses descriptors of 1024 and more: the trainer may have had as many when it made ours.
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            if not poll.poll(_LOOK_S * 1000):
                if os.getppid() != self._trainer:
                    return None
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
            self._tell("accepted", save_id=order.save_id)
            return order, message

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                result = perform(*order)
            except Exception as e:  # Whatever it is, the trainer learns it, and the next order is carried out.
                result = {}
                self._tell("failed", save_id=order[0].save_id, error=_name(e), text=str(e))
            save_id = order[0].save_id
            # The memory goes first: the trainer may use it for something else at once.
            del order
            if result:
                self._tell("written", save_id=save_id, **result)

    def _tell(self, kind: str, **fields: Any) -> None:
        # A trainer that is gone needs no answer.
        with self._sending, contextlib.suppress(OSError):
            if isinstance(text := fields.get("text"), str):
                fields["text"] = text[:8000]
            handover.send(self._sock, Message(kind, fields))


def _name(error: Exception) -> str:
    """Returns the name of the closest class of ``error`` in ``tensorferry.errors``."""
    names = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in errors.__all__)
    return next(names, "SystemRefused" if isinstance(error, OSError) else "TensorferryError")


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
