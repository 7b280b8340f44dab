"""The connection over which a trainer offers snapshots to its keeper, and hears what becomes of them."""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import TensorferryError, TransportClosed, message_of
from .. import handover
from ..handover import Handover, Message, OtherVersion
from . import place
from .place import connect, not_at_work

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
    """

    def __init__(self, name: str) -> None:
        self._name = name
        #: A signal handler in the middle of a call may enter it again.
        self._changed = threading.Condition()
        self._released = 0
        self._sock: socket.socket | None = None
        self._offers: collections.deque[Offer] = collections.deque()
        #: Those whose memory is left to the keeper for good.
        self._left: list[Offer] = []
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
        with self._changed:
            self._is_late = not self._changed.wait_for(self._are_answered, 0.0 if self._is_late else place.OFFER_S)
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
        # Reading waits for ever, and sending does not.
        sock.settimeout(None)
        longest = struct.pack("ll", *divmod(int(place.OFFER_S * 1e6), 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, longest)
        self._sock = sock
        threading.Thread(target=self._listen, args=(sock,), name="tensorferry-keeper", daemon=True).start()
        return sock

    def _listen(self, sock: socket.socket) -> None:
        """Reads what the keeper says about offers, until it is gone.

        It keeps what it was given if this side ends the connection, by :meth:`close` or because the descriptor was
        closed: then the memory is not to be used again.
        """
        is_gone = False
        try:
            while isinstance(message := handover.receive(sock), Message):
                self._handle(message)
            is_gone = message is None
        except (OSError, TensorferryError) as e:
            # One of another version has taken nothing.
            is_gone = isinstance(e, OtherVersion)
            logger.warning("the connection to the keeper %s has failed: %s", self._name, message_of(e))
        with self._changed:
            self._sock = None
            offers, self._offers = self._offers, collections.deque()
            if self._is_closed or not is_gone:
                self._left += offers
                offers.clear()
        sock.close()
        if offers:
            logger.warning("the keeper %s is gone; checkpoints are not in memory any more", self._name)
        for offer in offers:
            self._tell(offer)

    def _tell(self, offer: Offer) -> None:
        offer.tell()
        with self._changed:
            self._released += 1
            self._changed.notify_all()

    def _handle(self, message: Message) -> None:
        """Finds the offer that the keeper's ``message`` is about, and tells whoever made it if its memory is free."""
        about = message.fields.get("save_id"), message.fields.get("rank")
        with self._changed:
            # Without names, it is about the oldest that was not answered.
            known = [one for one in self._offers if one.is_answered == (message.kind == "released")]
            offer = next((one for one in known if about[0] is None or (one.save_id, one.rank) == about), None)
            if offer is None:
                return
            offer.is_answered = True
            self._changed.notify_all()
            if message.kind != "kept":
                self._offers.remove(offer)
        if message.kind == "refused":
            logger.warning("a checkpoint is not kept in memory: %s", message.fields.get("error"))
        if message.kind != "kept":
            self._tell(offer)

    def let_go(self, patience: float) -> bool:
        """Has the keeper evict the oldest snapshot; returns whether one was released within ``patience`` seconds."""
        with self._changed:
            sock, before = self._sock, self._released
            # One that leaves offers unanswered is not at work.
            if sock is None or not self._offers or not self._are_answered():
                return False
            try:
                handover.send(sock, Message("let_go"))
            except (OSError, TensorferryError):
                return False
            return self._changed.wait_for(lambda: self._released > before, patience)

    def close(self) -> None:
        """Ends the connection; what was offered stays with the keeper, and its memory is not used again."""
        with self._changed:
            self._is_closed = True
            if (sock := self._sock) is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
