"""The connections of a keeper to the processes of its node, and the loop of the thread that serves them.

A message of a client arrives whole or not at all. What goes to a client that does not read is queued up to a limit, and
beyond it the client is disconnected: nothing here waits for anyone.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import TensorferryError
from .. import handover
from ..handover import Handover, Message, OtherVersion
from .generations import Kept
from .kept_memory import KeptMemory
from .place import peer_of

if TYPE_CHECKING:
    from .process import KeeperProcess

logger = logging.getLogger("tensorferry")

#: Most clients at a time; each trainer has one connection, or two while it loads.
MOST_CLIENTS = 256
#: Messages handled for one client, and clients accepted, before others have a turn.
_TURN = 16
#: Most messages queued for a client that does not read.
_MOST_QUEUED = 4096


class Loop:
    """Waits for sockets, and runs what is to be done about them, on the thread that calls :meth:`turn`.

    It is no loop of asyncio, whose transports know neither sequenced packets nor descriptors beside a message:
    docs/explanation/decisions.md.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self.watch(self._woken, lambda _: self._drain_wakes())

    def watch(self, sock: socket.socket, ready: Callable[[int], object]) -> None:
        """Calls ``ready`` with the events of ``selectors`` whenever ``sock`` can be read from."""
        self._selector.register(sock, selectors.EVENT_READ, ready)

    def watch_writing(self, sock: socket.socket, wanted: bool) -> None:
        """Sets whether a watched socket is also reported when it can be written to."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        self._selector.modify(sock, events, self._selector.get_key(sock).data)

    def forget(self, sock: socket.socket) -> None:
        """Watches ``sock`` no more; to be called before it is closed."""
        self._selector.unregister(sock)

    def run_soon(self, call: Callable[[], object]) -> None:
        """Has the loop's thread run ``call``; may be called from any thread and from a signal handler."""
        self._calls.append(call)
        # A full pipe wakes as well; a closed one belongs to a keeper that has ended.
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def turn(self, patience: float) -> None:
        """Handles what is there; waits at most ``patience`` seconds for it, and not at all if there are calls.

        Raises:
            Exception: what a call raises; the others are run in the next turn
        """
        for key, events in self._selector.select(0.0 if self._calls else patience):
            key.data(events)
        # Only those that are there now: calls may add calls.
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def close(self) -> None:
        """Closes its own sockets; calls that come later are not run."""
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass


class Client:
    """A connection from a process of this node, and what it has given and borrowed."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock = sock
        self.pid = pid
        self.queue: collections.deque[Message | Handover] = collections.deque()
        #: Snapshots that it gave; it is notified when one of them is released.
        self.given: set[Kept[KeptMemory]] = set()
        #: Snapshots that it reads.
        self.borrowed: set[Kept[KeptMemory]] = set()
        self.is_open = True


class Connections:
    """Accepts the processes of this node, and passes their messages to ``desk``.

    Args:
        loop: the loop of the keeper's thread, on which everything is to be called
        path: where to listen; nothing is there
        desk: answers the messages

    Raises:
        OSError: the system refuses
    """

    def __init__(self, loop: Loop, path: Path, desk: KeeperProcess) -> None:
        self._loop, self._desk = loop, desk
        self._open: set[Client] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(os.fspath(path))
            os.chmod(path, 0o600)
            self._listener.listen(1024)
            self._listener.setblocking(False)
        except BaseException:
            self._listener.close()
            raise

    def __len__(self) -> int:
        return len(self._open)

    def start(self) -> None:
        """Accepts clients from now on."""
        self._loop.watch(self._listener, lambda _: self._accept())

    def giver_of(self, kept: Kept[KeptMemory]) -> Client | None:
        """Returns the client that gave a snapshot, if it is connected."""
        return next((client for client in self._open if kept in client.given), None)

    def send(self, client: Client, message: Message | Handover) -> None:
        """Sends ``message`` as soon as the client reads; nothing if it is not connected any more.

        A client that has left too many messages unread is cast out.
        """
        if not client.is_open:
            return
        if len(client.queue) >= _MOST_QUEUED:
            logger.warning("process %d is disconnected: it does not read its answers", client.pid)
            self._cast_out(client)
            return
        client.queue.append(message)
        if len(client.queue) == 1:
            self._flush(client)

    def _cast_out(self, client: Client) -> None:
        """Gives up what a process gave, and disconnects it: from then on it may write to that memory."""
        self._desk.drop_given(client)
        self._disconnect(client)

    def close(self) -> None:
        """Accepts nobody any more, and disconnects all clients."""
        self._listener.close()
        for client in list(self._open):
            self._disconnect(client)

    def _accept(self) -> None:
        for _ in range(_TURN):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                # Out of descriptors, mostly.
                logger.warning("a client could not be accepted: %s", e)
                time.sleep(0.02)
                return
            sock.setblocking(False)
            pid, uid = peer_of(sock)
            if uid != os.geteuid():
                logger.warning(
                    "process %d of user %d was turned away: this keeper is user %d's", pid, uid, os.geteuid()
                )
                sock.close()
            elif len(self._open) >= MOST_CLIENTS:
                sock.close()
            else:
                client = Client(sock, pid)
                self._open.add(client)
                self._loop.watch(sock, functools.partial(self._serve, client))

    def _serve(self, client: Client, events: int) -> None:
        """Sends what is queued, and handles a few of the client's messages, as far as its socket is ready.

        Raises nothing: a client whose connection or message is broken is cast out, which is logged.
        """
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            for _ in range(_TURN if events & selectors.EVENT_READ else 0):
                if not client.is_open:
                    return
                message = handover.arrive(client.sock)
                if message is None:
                    self._disconnect(client)
                    return
                self._desk.handle(client, message)
        except BlockingIOError:
            pass
        except (OSError, TensorferryError) as e:
            if isinstance(e, OtherVersion):
                # It cannot read that either, and says so.
                self.send(client, Message("refused", {"save_id": None, "error": str(e)}))
            # Whatever a client does ends its own connection and nothing else.
            logger.warning("process %d is disconnected: %s", client.pid, e)
            self._cast_out(client)
        except Exception:
            logger.exception("process %d is disconnected", client.pid)
            self._cast_out(client)

    def _flush(self, client: Client) -> None:
        """Sends queued messages, as many as the client's socket takes now."""
        while client.queue and client.is_open:
            try:
                handover.send(client.sock, client.queue[0])
            except BlockingIOError:
                break
            except ConnectionError:
                self._disconnect(client)
            except (OSError, TensorferryError) as e:
                logger.warning("process %d is disconnected: %s", client.pid, e)
                self._cast_out(client)
            else:
                client.queue.popleft()
        if client.is_open:
            self._loop.watch_writing(client.sock, bool(client.queue))

    def _disconnect(self, client: Client) -> None:
        """Closes a client's connection.

        What it gave is kept: a process that closes it itself has ended, has executed another program, or has promised
        not to write to that memory any more.
        """
        if not client.is_open:
            return
        client.is_open = False
        self._open.discard(client)
        self._loop.forget(client.sock)
        client.sock.close()
        client.queue.clear()
        for kept in client.given:
            kept.live = False
        client.given.clear()
        self._desk.take_all_back(client)
