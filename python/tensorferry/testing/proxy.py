"""A TCP proxy between a receiver and a source that does to their connections what a script says."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from urllib.parse import urlsplit

from .connection import Connection
from .faults import Fault
from .pace import Pace
from .play import Play, ProxyCounters

__all__ = ["FaultProxy", "ProxyCounters"]


class FaultProxy:
    """Forwards connections to a source and acts out a script of faults on them.

    It runs in a thread of its own, with nothing but the standard library, and knows of HTTP only where an answer's head
    ends and its body begins. Use it as a context manager::

        with FaultProxy.before(source.metadata(), [FlipByte(at=300_000, connections=2)]) as proxy:
            receiver.recv_checkpoint(0, proxy.through(source.metadata()), step, timeout)
        assert proxy.fired["FlipByte"] == 1

    Args:
        target_host: where the source is
        target_port: its port
        script: the faults; several may hit one connection
    """

    def __init__(self, target_host: str, target_port: int, script: Iterable[Fault] = ()) -> None:
        self._play = Play(script, (target_host, target_port))
        self._original_port = target_port
        self.script: Sequence[Fault] = self._play.script
        self.counters: ProxyCounters = self._play.counters
        self.fired: Counter[str] = self._play.fired
        """How often each class of fault struck."""
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    @classmethod
    def before(cls, metadata: str, script: Iterable[Fault] = ()) -> FaultProxy:
        """A proxy in front of the source whose metadata this is."""
        url = urlsplit(metadata)
        if not url.hostname:
            raise ValueError(f"{metadata!r} is no URL: a proxy cannot be put before it")
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
        """The same metadata with the source's host and port replaced by the proxy's.

        Raises:
            ValueError: the source's port is not in it
        """
        host, port = self.address
        changed, count = re.subn(
            rf"//([^]/@\s]*@|)(\[[^]/]*\]|[^]/:,\s]*):{self._original_port}(?!\d)", rf"//\g<1>{host}:{port}", metadata
        )
        if not count:
            raise ValueError(f"{metadata!r} does not name port {self._original_port}, which this proxy stands before")
        return changed

    def hold(self, at: int) -> None:
        """Stops forwarding answers when ``at`` bytes of their bodies went through, over all connections."""
        self._play.hold_at = at

    def wait_held(self, timeout: float, over: Callable[[], bool] = lambda: False) -> bool:
        """Waits until :meth:`hold` has stopped the bytes; ``False`` if that did not come, or ``over()`` came first."""
        end = time.monotonic() + timeout
        while not self._play.held.wait(0.02):
            if time.monotonic() > end or over():
                return False
        return True

    def release(self) -> None:
        """Goes on after :meth:`hold`."""
        self._play.hold_at = None
        self._loop.call_soon_threadsafe(self._play.gate.set)

    def pace(self, share: int, patience: float) -> None:
        """Has each connection wait after ``share`` bytes of bodies until a fault has struck on one of them.

        So a fast receiver cannot be done over its first connections before it has come to the faulty one. After
        ``patience`` seconds nobody waits any longer. It is to be called before the first connection.
        """
        self._play.pace = Pace(share, patience)

    def retarget(self, host: str, port: int) -> None:
        """Leads new connections elsewhere, as if another process had taken the source's port."""
        self._play.target = (host, port)

    def close(self) -> None:
        """Ends all connections. It may be called again."""
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
        # No task accepts: one that is cancelled loses the connection it was just given.
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
        except OSError:  # The peer has left again, or no descriptor is free.
            return
        number = self.counters.connections
        self.counters.connections += 1
        connection = Connection(self._play, number, client)
        task = self._loop.create_task(connection.run())
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            # A task that was cancelled before its first step has closed nothing.
            client.close()

        task.add_done_callback(done)
