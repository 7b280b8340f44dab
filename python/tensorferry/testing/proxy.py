"""A TCP proxy between a receiver and a source that does to their connections what a script says."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar
from urllib.parse import urlsplit

from .answers import AnswerSplitter
from .faults import (
    Answer,
    Delay,
    Divert,
    Drip,
    Duplicate,
    Fault,
    FlipByte,
    HalfOpen,
    OffsetFault,
    ReplaceHead,
    Reset,
    Truncate,
)
from .pace import Pace

__all__ = ["FaultProxy", "ProxyCounters"]

_READ = 64 << 10
# Small buffers: what a killed or stalled peer has already handed to the kernel still arrives.
_BUFFER = 128 << 10

# How a connection begins that is encrypted: its requests cannot be seen.
_TLS_HANDSHAKE = b"\x16\x03"

_F = TypeVar("_F", bound=Fault)


@dataclass
class ProxyCounters:
    """What went through a proxy so far."""

    connections: int = 0
    request_bytes: int = 0
    response_bytes: int = 0
    body_bytes: int = 0


class _Over(Exception):
    """Tells the task of a connection to end."""

    def __init__(self, reset: bool = False) -> None:
        super().__init__()
        self.reset = reset


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
        self._target = (target_host, target_port)
        self._original_port = target_port
        self.script: Sequence[Fault] = tuple(script)
        self.counters = ProxyCounters()
        self.fired: Counter[str] = Counter()
        """How often each class of fault struck."""
        self._reached: Counter[int] = Counter()
        self._hold_at: int | None = None
        self._held = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Event()
        self._pace: Pace | None = None
        self._tasks: set[asyncio.Task[None]] = set()
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
        self._hold_at = at

    def wait_held(self, timeout: float, over: Callable[[], bool] = lambda: False) -> bool:
        """Waits until :meth:`hold` has stopped the bytes; ``False`` if that did not come, or ``over()`` came first."""
        end = time.monotonic() + timeout
        while not self._held.wait(0.02):
            if time.monotonic() > end or over():
                return False
        return True

    def release(self) -> None:
        """Goes on after :meth:`hold`."""
        self._hold_at = None
        self._loop.call_soon_threadsafe(self._gate.set)

    def pace(self, share: int, patience: float) -> None:
        """Has each connection wait after ``share`` bytes of bodies until a fault has struck on one of them.

        So a fast receiver cannot be done over its first connections before it has come to the faulty one. After
        ``patience`` seconds nobody waits any longer. It is to be called before the first connection.
        """
        self._pace = Pace(share, patience)

    def retarget(self, host: str, port: int) -> None:
        """Leads new connections elsewhere, as if another process had taken the source's port."""
        self._target = (host, port)

    def close(self) -> None:
        """Ends all connections. It may be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(10)
        elif not self._loop.is_closed():
            self._loop.close()
        self._listener.close()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _run(self) -> None:
        accepting = self._loop.create_task(self._accept())
        self._tasks.add(accepting)

        async def until_closed() -> None:
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await accepting
            await asyncio.gather(*self._tasks, return_exceptions=True)

        try:
            self._loop.run_until_complete(until_closed())
        finally:
            self._loop.close()

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            number = self.counters.connections
            self.counters.connections += 1
            task = self._loop.create_task(_Connection(self, number, client).run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # What connections ask of their proxy, all in its thread.

    def _struck(self, fault: Fault) -> None:
        self.fired[type(fault).__name__] += 1
        if self._pace:
            self._pace.end()

    def _strikes(self, fault: Fault, number: int) -> bool:
        """Whether a fault whose place connection ``number`` has come to strikes there."""
        if fault.order == "reaching":
            index = self.script.index(fault)
            number = self._reached[index]
            self._reached[index] += 1
        return fault.hits(number)

    async def _pass_gate(self, body: int, carried: int) -> None:
        if self._pace:
            await self._pace.wait(carried)
        self.counters.body_bytes += body
        if self._hold_at is not None and self.counters.body_bytes >= self._hold_at:
            self._held.set()
            await self._gate.wait()


class _Connection:
    """One connection through the proxy."""

    def __init__(self, proxy: FaultProxy, number: int, client: socket.socket) -> None:
        self._proxy = proxy
        self._loop = proxy._loop
        self._number = number
        self._client = client
        self._source: socket.socket | None = None
        self._open = asyncio.Event()  # cleared: half-open
        self._open.set()

    def _of(self, kind: type[_F]) -> list[_F]:
        """The faults of a kind without a place that strike this connection."""
        return [f for f in self._proxy.script if isinstance(f, kind) and self._proxy._strikes(f, self._number)]

    async def run(self) -> None:
        reset = False
        try:
            _prepare(self._client)
            for answer in self._of(Answer):
                await self._answer(answer)
                return
            diverts = self._of(Divert)
            await self._connect(diverts)
            pumps = [
                self._loop.create_task(self._pump_requests(diverts)),
                self._loop.create_task(self._pump_answers()),
            ]
            try:
                await asyncio.gather(*pumps)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except _Over as over:
            reset = over.reset
        except OSError:
            reset = True  # as the peer had it
        finally:
            # Nothing waits on the sockets any more, so that closing them takes effect at once.
            for opened in (self._client, self._source):
                if opened is not None:
                    if reset:
                        with contextlib.suppress(OSError):
                            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    opened.close()

    async def _connect(self, diverts: list[Divert]) -> None:
        host, port = (diverts[0].host, diverts[0].port) if diverts else self._proxy._target
        for divert in diverts:
            self._proxy._struck(divert)
        error: OSError = ConnectionRefusedError()
        for family, kind, protocol, _, address in await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            source = socket.socket(family, kind, protocol)
            source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            _prepare(source)
            try:
                await self._loop.sock_connect(source, address)
            except OSError as e:
                source.close()
                error = e
                continue
            self._source = source
            return
        raise error

    async def _answer(self, answer: Answer) -> None:
        request = b""
        while b"\r\n\r\n" not in request and not request.startswith(_TLS_HANDSHAKE):
            data = await self._loop.sock_recv(self._client, _READ)
            if not data:
                return
            request += data
        self._proxy._struck(answer)
        await self._loop.sock_sendall(self._client, answer.data)
        while answer.repeat:
            await asyncio.sleep(answer.interval)
            await self._loop.sock_sendall(self._client, answer.repeat)
        if not answer.close:
            while await self._loop.sock_recv(self._client, _READ):
                pass

    async def _pump_requests(self, diverts: list[Divert]) -> None:
        assert self._source is not None
        flow = _Flow(self, "request", self._client, self._source)
        while data := await self._loop.sock_recv(self._client, _READ):
            await self._open.wait()
            self._proxy.counters.request_bytes += len(data)
            for divert in diverts:
                data = data.replace(divert.old, divert.new) if divert.old else data
            await flow.forward(data, body=False)
        await self._open.wait()
        self._source.shutdown(socket.SHUT_WR)

    async def _pump_answers(self) -> None:
        assert self._source is not None
        flow = _Flow(self, "response", self._source, self._client)
        heads = [f for f in self._proxy.script if isinstance(f, ReplaceHead)]
        if heads:
            heads = self._of(ReplaceHead)
        splitter = AnswerSplitter()
        carried = 0
        while data := await self._loop.sock_recv(self._source, _READ):
            self._proxy.counters.response_bytes += len(data)
            for body, part in splitter.split(data):
                length = len(part) if body else 0
                carried += length
                await self._proxy._pass_gate(length, carried)
                await flow.forward(part if body else self._rewritten(part, heads), body)
        await flow.forward(splitter.rest(), body=False)
        raise _Over

    def _rewritten(self, head: bytes, faults: list[ReplaceHead]) -> bytes:
        for fault in faults:
            new = fault.new.replace(b"\\", rb"\\")
            head, count = re.subn(re.escape(fault.old), new, head, flags=re.IGNORECASE)
            if count:
                self._proxy._struck(fault)
        return head


class _Flow:
    """One direction of a connection, with the faults that lie ahead in it."""

    def __init__(self, connection: _Connection, direction: str, source: socket.socket, sink: socket.socket) -> None:
        self._connection = connection
        self._source = source
        self._sink = sink
        script = connection._proxy.script
        self._ahead = [f for f in script if isinstance(f, OffsetFault) and f.direction == direction]
        self._position = {"stream": 0, "body": 0}
        self._drip: Drip | None = None
        self._due = 0.0

    async def forward(self, data: bytes, body: bool) -> None:
        """Sends ``data`` on, acting out the faults whose places are in it."""
        while data:
            upcoming = [f for f in self._ahead if body or f.of == "stream"]
            fault = min(upcoming, key=self._distance, default=None)
            if fault is None or self._distance(fault) >= len(data):
                await self._send(data, body)
                return
            distance = self._distance(fault)
            await self._send(data[:distance], body)
            data = data[distance:]
            self._ahead.remove(fault)
            if self._connection._proxy._strikes(fault, self._connection._number):
                self._connection._proxy._struck(fault)
                data = await self._act(fault, data)

    def _distance(self, fault: OffsetFault) -> int:
        return max(0, fault.at - self._position[fault.of])

    async def _act(self, fault: OffsetFault, data: bytes) -> bytes:
        """What is to be sent in place of ``data``, which begins at the fault's place."""
        match fault:
            case Truncate():
                raise _Over
            case Reset():
                raise _Over(reset=True)
            case HalfOpen():
                self._connection._open.clear()
            case FlipByte():
                return bytes([data[0] ^ fault.mask]) + data[1:]
            case Duplicate():
                await self._write(data[: fault.count])
            case Delay():
                await asyncio.sleep(fault.seconds)
            case Drip():
                self._drip, self._due = fault, time.monotonic()
        return data

    async def _send(self, data: bytes, body: bool) -> None:
        self._position["stream"] += len(data)
        self._position["body"] += len(data) if body else 0
        await self._write(data)

    async def _write(self, data: bytes) -> None:
        await self._connection._open.wait()
        size = max(self._drip.size, 1) if self._drip else max(len(data), 1)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            if self._drip:
                wait = self._drip.interval * len(piece) / size
                self._due = max(self._due + wait, time.monotonic() - 1)  # a late drop is made up for
                await asyncio.sleep(self._due - time.monotonic())
            await self._connection._loop.sock_sendall(self._sink, piece)


def _prepare(opened: socket.socket) -> None:
    opened.setblocking(False)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
