"""The loop of the keeper's thread: sockets that are ready, and calls that other threads hand to it."""

from __future__ import annotations

import collections
import contextlib
import selectors
import socket
from collections.abc import Callable


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
        for key, events in self._selector.select(0.0 if self._calls else max(patience, 0.0)):
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
