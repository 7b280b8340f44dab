"""The connections of a keeper to the processes of its node.

A message of a client arrives whole or not at all. What goes to a client that does not read is queued up to a limit, and
beyond it the client is disconnected: nothing here waits for anyone.
"""

from __future__ import annotations

import functools
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ...errors import TensorferryError
from .. import handover
from ..handover import Arrived, Handover, Message, OtherVersion
from .clients import Client
from .loop import Loop

logger = logging.getLogger("tensorferry")

#: Most clients at a time; each trainer has one connection, or two while it loads.
MOST_CLIENTS = 256
#: Seconds that a new client has to say something.
_GREETING_S = 5.0
#: Messages handled for one client, and clients accepted, before others have a turn.
_TURN = 16
#: Most messages queued for a client that does not read.
_MOST_QUEUED = 4096
#: Seconds between the end of a trainer's connection and that of the trainer.
_ENDING_S = 2.0


class Desk(Protocol):
    """Answers the messages of clients."""

    def handle(self, client: Client, message: Message | Arrived) -> None:
        """Handles a message of ``client``; an error that it raises ends that connection."""

    def drop_given(self, client: Client) -> None:
        """Gives up the snapshots that ``client`` gave: from now on the client may write to their memory."""

    def take_all_back(self, client: Client) -> None:
        """Takes back what ``client``, whose connection has ended, has borrowed."""


class Connections:
    """Accepts the processes of this node, and passes their messages to ``desk``.

    Args:
        loop: the loop of the keeper's thread, on which everything is to be called
        path: where to listen; nothing is there
        desk: answers the messages

    Raises:
        OSError: the system refuses
    """

    def __init__(self, loop: Loop, path: Path, desk: Desk) -> None:
        self._loop, self._desk = loop, desk
        self._open: set[Client] = set()
        #: Clients whose connection has ended and whose process has not.
        self._suspects: dict[Client, float] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(os.fspath(path))
            os.chmod(path, 0o600)
            self._listener.listen(128)
            self._listener.setblocking(False)
        except BaseException:
            self._listener.close()
            raise

    def __len__(self) -> int:
        return len(self._open)

    def start(self) -> None:
        """Accepts clients from now on."""
        self._loop.watch(self._listener, lambda _: self._accept())

    def watched(self) -> Iterator[Client]:
        """Iterates over the connected clients, and the disconnected ones that may still write to what they gave."""
        return iter([*self._open, *self._suspects])

    @property
    def has_suspects(self) -> bool:
        """Whether the end of a process is waited for."""
        return bool(self._suspects)

    def send(self, client: Client, message: Message | Handover) -> None:
        """Sends ``message`` as soon as the client reads; nothing if it is not connected any more.

        A client that has left too many messages unread is cast out.
        """
        if not client.is_open:
            return
        if len(client.queue) >= _MOST_QUEUED:
            logger.warning("process %d is disconnected: it does not read its answers", client.pid)
            self.cast_out(client)
            return
        client.queue.append(message)
        if len(client.queue) == 1:
            self._flush(client)

    def cast_out(self, client: Client) -> None:
        """Gives up what a process gave, and disconnects it: from then on it may write to that memory.

        What a process gave that has promised not to write to it is kept.
        """
        client.queue.clear()
        if not client.has_left:
            client.is_cast_out = True
            self._desk.drop_given(client)
        self._disconnect(client)

    def look_at_clocks(self, now: float) -> None:
        """Disconnects clients, and gives up on suspects, that have taken too long."""
        self._look_at_suspects(now)
        for client in [c for c in self._open if not c.has_spoken and now - c.since > _GREETING_S]:
            self._disconnect(client)

    def stop_accepting(self) -> None:
        """Accepts nobody any more."""
        self._listener.close()

    def close(self) -> None:
        """Disconnects all clients, and watches none of the processes any more that may write to what they gave."""
        for client in list(self._open):
            client.has_left = True
            self._disconnect(client)

    def _accept(self) -> None:
        for _ in range(_TURN):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """Accepts a connection that waits; returns whether another one may be waiting.

        One of another user is closed. So is one beyond ``MOST_CLIENTS``, unless a client that has said nothing yet is
        there to be disconnected for it.
        """
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError as e:
            # Out of descriptors, mostly. One that has said nothing makes room.
            logger.warning("a client could not be accepted: %s", e)
            if not self._disconnect_silent():
                time.sleep(0.02)
            return False
        sock.setblocking(False)
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid != os.geteuid():
            logger.warning("process %d of user %d was turned away: this keeper is user %d's", pid, uid, os.geteuid())
            sock.close()
            return True
        if len(self._open) >= MOST_CLIENTS and not self._disconnect_silent():
            sock.close()
            return True
        client = Client(sock, pid)
        self._open.add(client)
        self._loop.watch(sock, functools.partial(self._serve, client))
        return True

    def _disconnect_silent(self) -> bool:
        """Disconnects the client that has said nothing for the longest time; false if all have said something."""
        silent = [client for client in self._open if not client.has_spoken]
        if silent:
            self._disconnect(min(silent, key=lambda client: client.since))
        return bool(silent)

    def _serve(self, client: Client, events: int) -> None:
        """Sends what is queued, and handles a few of the client's messages, as far as its socket is ready.

        Raises nothing: a client whose connection or message is broken is cast out, which is logged.
        """
        if not client.is_open:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ:
                for _ in range(_TURN):
                    if not client.is_open or not self._read(client):
                        break
        except BlockingIOError:
            pass
        except (OSError, TensorferryError) as e:
            if isinstance(e, OtherVersion):
                # It cannot read that either, and says so.
                self.send(client, Message("refused", {"save_id": None, "error": str(e)}))
            # Whatever a client does ends its own connection and nothing else.
            logger.warning("process %d is disconnected: %s", client.pid, e)
            self.cast_out(client)
        except Exception:
            logger.exception("process %d is disconnected", client.pid)
            self.cast_out(client)

    def _read(self, client: Client) -> bool:
        """Handles one message of ``client``; returns whether there may be more."""
        message = handover.arrive(client.sock)
        if message is None:
            self._disconnect(client)
            return False
        client.has_spoken = True
        self._desk.handle(client, message)
        return True

    def _flush(self, client: Client) -> None:
        """Sends queued messages, as many as the client's socket takes now."""
        while client.queue:
            try:
                handover.send(client.sock, client.queue[0])
            except BlockingIOError:
                break
            except (OSError, TensorferryError) as e:
                logger.debug("process %d is gone: %s", client.pid, e)
                self._disconnect(client)
                return
            client.queue.popleft()
        self._loop.watch_writing(client.sock, bool(client.queue))

    def _look_at_suspects(self, now: float) -> None:
        """Finds out of each process whose connection ended whether it has died, or lives and may still write."""
        for client, deadline in list(self._suspects.items()):
            if client.arriving:
                continue
            if not client.has_ended():
                if now < deadline:
                    continue
                if client.can_write_to({file for kept in client.given for file in kept.body.files}):
                    logger.warning("process %d left without a word and lives: what it gave is not kept", client.pid)
                    self._desk.drop_given(client)
            del self._suspects[client]
            client.forget()
            client.given.clear()

    def _disconnect(self, client: Client) -> None:
        """Closes a client's connection; its process is watched on if it may still write to what it gave."""
        if not client.is_open:
            return
        client.is_open = False
        self._open.discard(client)
        self._loop.forget(client.sock)
        client.sock.close()
        client.queue.clear()
        for kept in client.given:
            kept.live = False
        if (client.given or client.arriving) and not (client.has_left or client.is_cast_out or client.has_ended()):
            self._suspects[client] = time.monotonic() + _ENDING_S
        else:
            client.forget()
            client.given.clear()
        self._desk.take_all_back(client)
