"""One connection through the proxy: its two directions and the faults that strike in them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time

from . import faults
from .http_framing import ResponseSplitter
from .script import Script

_READ = 64 << 10
# Small buffers, because bytes that a killed or stalled peer has already handed to the kernel still arrive.
_BUFFER = 128 << 10


class _Ended(Exception):
    """Raised in the task of a connection to close it, or to reset it."""

    def __init__(self, reset: bool = False) -> None:
        super().__init__()
        self.reset = reset


class Connection:
    """One connection through the proxy.

    Args:
        script: shared by all connections of the proxy
        number: how many connections were accepted before this one
        client: the socket to the receiver
    """

    def __init__(self, script: Script, number: int, client: socket.socket) -> None:
        """Forwards nothing before :meth:`run`."""
        self.script = script
        self.loop = asyncio.get_running_loop()
        self.number = number
        self._client = client
        self._source: socket.socket | None = None
        self.open = asyncio.Event()  # cleared: half-open
        self.open.set()

    async def run(self) -> None:
        """Forwards until one side closes the connection or a fault ends it."""
        reset = False
        try:
            _prepare(self._client)
            await self._connect()
            pumps = [
                self.loop.create_task(self._pump_requests()),
                self.loop.create_task(self._pump_answers()),
            ]
            try:
                await asyncio.gather(*pumps)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except _Ended as ended:
            reset = ended.reset
        except OSError:
            reset = True  # as the peer did
        finally:
            # No task waits on the sockets any more, so closing them takes effect at once.
            for opened in (self._client, self._source):
                if opened is not None:
                    if reset:
                        with contextlib.suppress(OSError):
                            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    opened.close()

    async def _connect(self) -> None:
        self._source = await self.loop.run_in_executor(None, socket.create_connection, self.script.target, 10)
        self._source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        _prepare(self._source)

    async def _pump_requests(self) -> None:
        assert self._source is not None
        while data := await self.loop.sock_recv(self._client, _READ):
            await self.open.wait()
            await self.loop.sock_sendall(self._source, data)
        await self.open.wait()
        self._source.shutdown(socket.SHUT_WR)

    async def _pump_answers(self) -> None:
        assert self._source is not None
        flow = Flow(self, self._client)
        splitter = ResponseSplitter()
        carried = 0
        while data := await self.loop.sock_recv(self._source, _READ):
            self.script.counters.response_bytes += len(data)
            for body, part in splitter.split(data):
                length = len(part) if body else 0
                carried += length
                await self.script.pass_gate(length, carried)
                await flow.forward(part, body)
        await flow.forward(splitter.rest(), body=False)
        raise _Ended


class Flow:
    """The answers of a connection, with the faults whose offsets they have not reached yet."""

    def __init__(self, connection: Connection, sink: socket.socket) -> None:
        self._connection = connection
        self._sink = sink
        self._ahead = [f for f in connection.script.faults if isinstance(f, faults.OffsetFault)]
        self._position = {"stream": 0, "body": 0}
        self._drip: faults.Drip | None = None
        self._due = 0.0

    async def forward(self, data: bytes, body: bool) -> None:
        """Sends ``data`` on and applies the faults whose offsets lie in it."""
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
            if self._connection.script.strikes(fault, self._connection.number):
                self._connection.script.record(fault)
                data = await self._apply(fault, data)

    def _distance(self, fault: faults.OffsetFault) -> int:
        return max(0, fault.at - self._position[fault.of])

    async def _apply(self, fault: faults.OffsetFault, data: bytes) -> bytes:
        """Applies a fault and returns the bytes to send in place of ``data``, which begins at the fault's offset."""
        match fault:
            case faults.Truncate():
                raise _Ended
            case faults.Reset():
                raise _Ended(reset=True)
            case faults.HalfOpen():
                self._connection.open.clear()
            case faults.FlipByte():
                return bytes([data[0] ^ 1]) + data[1:]
            case faults.Drip():
                self._drip, self._due = fault, time.monotonic()
        return data

    async def _send(self, data: bytes, body: bool) -> None:
        self._position["stream"] += len(data)
        self._position["body"] += len(data) if body else 0
        await self._write(data)

    async def _write(self, data: bytes) -> None:
        await self._connection.open.wait()
        size = max(self._drip.size, 1) if self._drip else max(len(data), 1)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            if self._drip:
                wait = self._drip.interval * len(piece) / size
                self._due = max(
                    self._due + wait, time.monotonic() - 1
                )  # catches up after a late piece, for a second at most
                await asyncio.sleep(self._due - time.monotonic())
            await self._connection.loop.sock_sendall(self._sink, piece)


def _prepare(opened: socket.socket) -> None:
    opened.setblocking(False)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
