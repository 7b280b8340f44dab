"""A TCP proxy between a receiver and a source that applies a script of faults to their connections."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from urllib.parse import urlsplit

from .connection import Connection
from .faults import Fault
from .pace import Pace
from .script import ProxyCounters, Script


class FaultProxy:
    """Forwards connections to a source and applies a script of faults to them.

    It runs in a thread of its own and needs only the standard library. All it knows of HTTP is where the head of a
    response ends and its body begins. Use it as a context manager::

        with FaultProxy.before(source.metadata(), [FlipByte(at=300_000, connections=2)]) as proxy:
            receiver.recv_checkpoint(0, proxy.through(source.metadata()), step, timeout)
        assert proxy.fired["FlipByte"] == 1

    Args:
        target_host: the source's host
        target_port: the source's port
        script: the faults; several may hit one connection

    Raises:
        OSError: it cannot listen there
    """

    def __init__(self, target_host: str, target_port: int, script: Iterable[Fault] = ()) -> None:
        self._script = Script(script, (target_host, target_port))
        self._original_port = target_port
        self.counters: ProxyCounters = self._script.counters
        self.fired: Counter[str] = self._script.fired
        """How often each fault struck, by the name of its class."""
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    @classmethod
    def before(cls, metadata: str, script: Iterable[Fault] = ()) -> FaultProxy:
        """Returns a proxy in front of the source with this metadata.

        Raises:
            ValueError: the metadata is not a URL
        """
        url = urlsplit(metadata)
        if not url.hostname:
            raise ValueError(f"{metadata!r} is not a URL: no proxy can be placed in front of it")
        return cls(url.hostname, url.port or 80, script)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to connect to."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def through(self, metadata: str) -> str:
        """Returns the metadata with the source's host and port replaced by the proxy's.

        Raises:
            ValueError: the metadata does not name the source's port
        """
        host, port = self.address
        changed, count = re.subn(
            rf"//([^]/@\s]*@|)(\[[^]/]*\]|[^]/:,\s]*):{self._original_port}(?!\d)", rf"//\g<1>{host}:{port}", metadata
        )
        if not count:
            raise ValueError(
                f"{metadata!r} does not name port {self._original_port}, in front of which this proxy stands"
            )
        return changed

    def hold(self, at: int) -> None:
        """Stops forwarding responses after ``at`` bytes of their bodies, counted over all connections.

        It works once: after :meth:`release` nothing is held any more.
        """
        self._script.hold_at = at

    def wait_held(self, timeout: float, over: Callable[[], bool] = lambda: False) -> bool:
        """Waits until :meth:`hold` has stopped the forwarding.

        Args:
            timeout: seconds to wait at most
            over: polled meanwhile; the wait ends when it returns ``True``

        Returns:
            Whether forwarding has stopped; ``False`` after ``timeout`` seconds, or when ``over()`` was true first.
        """
        end = time.monotonic() + timeout
        while not self._script.held.wait(0.02):
            if time.monotonic() > end or over():
                return False
        return True

    def release(self) -> None:
        """Resumes forwarding after :meth:`hold`, for good."""
        self._script.hold_at = None
        self._loop.call_soon_threadsafe(self._script.gate.set)

    def pace(self, share: int, patience: float) -> None:
        """Makes each connection wait after ``share`` body bytes until a fault has struck on any of them.

        Otherwise a fast receiver could finish over its first connections before it uses the faulty one. After
        ``patience`` seconds all connections go on. Call this before the first connection is made.
        """
        self._script.pace = Pace(share, patience)

    def retarget(self, host: str, port: int) -> None:
        """Connects new connections to another address, as if another process had taken the source's port."""
        self._script.target = (host, port)

    def close(self) -> None:
        """Ends all connections and stops listening. Calling it again does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(10)
        elif not self._loop.is_closed():
            self._loop.close()
        self._listener.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._until_closed())
        finally:
            self._loop.close()

    async def _until_closed(self) -> None:
        # Accepts in a callback, not in a task: a cancelled task would lose the connection that it has just accepted.
        self._loop.add_reader(self._listener, self._accept)
        await self._closing.wait()
        self._loop.remove_reader(self._listener)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # the peer has gone again, or no descriptor is free
            return
        number = self.counters.connections
        self.counters.connections += 1
        connection = Connection(self._script, number, client)
        task = self._loop.create_task(connection.run())
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            # A task that is cancelled before its first step closes nothing.
            client.close()

        task.add_done_callback(done)
