"""The connection over which a trainer offers snapshots to its keeper, and hears what becomes of them."""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..._native import Secret
from ..._reentry import CallLock
from ...errors import SystemRefused, TensorferryError, TransportClosed, message_of
from .. import handover
from ..handover import Handover, Message
from . import connecting
from .connecting import connect, not_at_work
from .same_secret import difference

logger = logging.getLogger("tensorferry")

#: Most offers that it may leave unanswered: it answers at once, and what it has not answered takes memory.
_MOST_UNANSWERED = 2


@dataclass
class Offer:
    """A snapshot that was offered, and whom to tell when its memory is free; ``sent`` has an item once it has gone."""

    save_id: str
    rank: int
    released: Callable[[], None]
    is_answered: bool = False
    sent: list[int] = field(default_factory=list)

    def tell(self) -> None:
        """Tells whoever made the offer that the keeper does not need the memory any more; raises nothing."""
        try:
            self.released()
        except Exception:
            logger.exception("a buffer could not be taken back")


class Offers:
    """What a trainer has offered to the keeper called ``name``, and the thread that reads its answers.

    Args:
        name: the keeper's name
        secret: the trainer's, which is to be the keeper's
    """

    def __init__(self, name: str, secret: Secret | None) -> None:
        self._name, self._secret = name, secret
        self._is_warned = False
        self._call = CallLock("offer() or let_go()")
        #: The same lock, which a signal handler in the middle of such a call may enter for what does not wait.
        self._lock = self._call.reentrant
        self._changed = threading.Condition(self._lock)
        self._released = 0
        self._sock: socket.socket | None = None
        self._offers: collections.deque[Offer] = collections.deque()
        #: Whether an offer has waited in vain for answers to those before it: the next one does not wait.
        self._is_late = False
        self._is_closed = False

    def add(self, offer: Offer, given: Handover) -> None:
        """Sends ``given``, once the keeper has answered earlier offers; waits for that for two seconds at most.

        Raises:
            TransportClosed: it was closed
            ConnectError: there is no keeper, or it does not answer
            TensorferryError, OSError: nothing could be sent
        """
        with self._call.held():
            self._is_late = not self._changed.wait_for(self._are_answered, 0.0 if self._is_late else connecting.OFFER_S)
            if self._is_closed:
                raise TransportClosed("this connection to a keeper was closed: make a new Keeper")
            if self._is_late:
                raise not_at_work(self._name)
            sock = self._sock or self._open()
            self._offers.append(offer)
            try:
                handover.send(sock, given, offer.sent)
            except BaseException:
                # What a signal handler raises after that changes nothing: the keeper has the memory.
                if not offer.sent:
                    with contextlib.suppress(ValueError):
                        self._offers.remove(offer)
                raise

    def _are_answered(self) -> bool:
        return sum(not one.is_answered for one in self._offers) < _MOST_UNANSWERED

    def _open(self) -> socket.socket:
        """Connects to the keeper, and starts the thread that reads its answers."""
        sock = connect(self._name)
        sock.settimeout(connecting.OFFER_S)
        try:
            # A timeout would be one of reading, too: that has a descriptor of its own.
            reading = sock.dup()
        except OSError as e:
            sock.close()
            raise SystemRefused(f"the keeper {self._name!r} cannot be reached, no socket can be opened: {e}") from e
        connecting.watch(reading)
        reading.settimeout(None)
        self._sock = sock
        threading.Thread(target=self._listen, args=(sock, reading), name="tensorferry-keeper", daemon=True).start()
        return sock

    def _listen(self, sock: socket.socket, reading: socket.socket) -> None:
        """Reads what the keeper says about offers, until it is gone."""
        with reading:
            try:
                while isinstance(message := handover.receive(reading), Message):
                    self._handle(message)
            except (OSError, TensorferryError) as e:
                logger.debug("the keeper %s is gone: %s", self._name, message_of(e))
        with self._lock:
            self._sock = None
            # After close(), the keeper holds what it was given: the memory is not to be used again.
            offers = [] if self._is_closed else list(self._offers)
            if not self._is_closed:
                self._offers.clear()
        sock.close()
        if offers:
            logger.warning("the keeper %s is gone; checkpoints are not in memory any more", self._name)
        for offer in offers:
            offer.tell()
            self._note_release()

    def _note_release(self) -> None:
        with self._changed:
            self._released += 1
            self._changed.notify_all()

    def _handle(self, message: Message) -> None:
        """Finds the offer that the keeper's ``message`` is about, and tells whoever made it if its memory is free."""
        save_id, rank = message.fields.get("save_id"), message.fields.get("rank")
        with self._lock:
            offer = next(
                (
                    one
                    for one in self._offers
                    if (save_id is None or one.save_id == save_id)
                    and (rank is None or one.rank == rank)
                    and one.is_answered == (message.kind == "released")
                ),
                None,
            )
            if offer is None:
                return
            offer.is_answered = True
            self._changed.notify_all()
            if message.kind != "kept":
                self._offers.remove(offer)
        if message.kind == "kept" and not self._is_warned and (wrong := difference(self._secret, message.fields)):
            self._is_warned = True
            logger.warning("%s", wrong)
        if message.kind == "refused":
            logger.warning("a checkpoint is not kept in memory: %s", message.fields.get("error"))
        if message.kind != "kept":
            offer.tell()
            self._note_release()

    def let_go(self, patience: float) -> bool:
        """Has the keeper evict the oldest snapshot; returns whether one was released within ``patience`` seconds."""
        if self._call.is_mine:
            return False
        with self._lock:
            sock, before = self._sock, self._released
            if sock is None or not self._offers:
                return False
            if not self._are_answered():
                # It is not at work.
                return False
            try:
                handover.send(sock, Message("let_go"))
            except (OSError, TensorferryError):
                return False
            return self._changed.wait_for(lambda: self._released > before, patience)

    def close(self) -> None:
        """Ends the connection; what was offered stays with the keeper, and its memory is not used again."""
        with self._lock:
            self._is_closed = True
            if (sock := self._sock) is not None:
                with contextlib.suppress(OSError, TensorferryError):
                    handover.send(sock, Message("farewell"))
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
