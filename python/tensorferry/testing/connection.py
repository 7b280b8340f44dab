"""One connection through the proxy: both its directions, and the faults that lie ahead in them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import time
from typing import TypeVar

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
from .play import Play

__all__ = ["Connection"]

_READ = 64 << 10
# Small buffers: what a killed or stalled peer has already handed to the kernel still arrives.
_BUFFER = 128 << 10

# How a connection begins that is encrypted: its requests cannot be seen.
_TLS_HANDSHAKE = b"\x16\x03"

_F = TypeVar("_F", bound=Fault)


class _Over(Exception):
    """Tells the task of a connection to end."""

    def __init__(self, reset: bool = False) -> None:
        super().__init__()
        self.reset = reset


class Connection:
    """One connection through the proxy.

    Args:
        play: the script as it is acted out on all connections
        number: how many came before it
        client: the receiver's end
    """

    def __init__(self, play: Play, number: int, client: socket.socket) -> None:
        """Nothing is forwarded before :meth:`run`."""
        self.play = play
        self.loop = asyncio.get_running_loop()
        self.number = number
        self._client = client
        self._source: socket.socket | None = None
        self.open = asyncio.Event()  # cleared: half-open
        self.open.set()

    def _of(self, kind: type[_F]) -> list[_F]:
        """The faults of a kind without a place that strike this connection."""
        return [f for f in self.play.script if isinstance(f, kind) and self.play.strikes(f, self.number)]

    async def run(self) -> None:
        """Forwards until one side ends or a fault does."""
        reset = False
        try:
            _prepare(self._client)
            for answer in self._of(Answer):
                await self._answer(answer)
                return
            diverts = self._of(Divert)
            await self._connect(diverts)
            pumps = [
                self.loop.create_task(self._pump_requests(diverts)),
                self.loop.create_task(self._pump_answers()),
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
        host, port = (diverts[0].host, diverts[0].port) if diverts else self.play.target
        for divert in diverts:
            self.play.struck(divert)
        error: OSError = ConnectionRefusedError()
        for family, kind, protocol, _, address in await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            source = socket.socket(family, kind, protocol)
            source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            _prepare(source)
            self._source = source
            try:
                await self.loop.sock_connect(source, address)
            except OSError as e:
                source.close()
                error = e
                continue
            return
        raise error

    async def _answer(self, answer: Answer) -> None:
        request = b""
        while b"\r\n\r\n" not in request and not request.startswith(_TLS_HANDSHAKE):
            data = await self.loop.sock_recv(self._client, _READ)
            if not data:
                return
            request += data
        self.play.struck(answer)
        await self.loop.sock_sendall(self._client, answer.data)
        while answer.repeat:
            await asyncio.sleep(answer.interval)
            await self.loop.sock_sendall(self._client, answer.repeat)
        if not answer.close:
            while await self.loop.sock_recv(self._client, _READ):
                pass

    async def _pump_requests(self, diverts: list[Divert]) -> None:
        assert self._source is not None
        flow = Flow(self, "request", self._client, self._source)
        while data := await self.loop.sock_recv(self._client, _READ):
            await self.open.wait()
            self.play.counters.request_bytes += len(data)
            for divert in diverts:
                data = data.replace(divert.old, divert.new) if divert.old else data
            await flow.forward(data, body=False)
        await self.open.wait()
        self._source.shutdown(socket.SHUT_WR)

    async def _pump_answers(self) -> None:
        assert self._source is not None
        flow = Flow(self, "response", self._source, self._client)
        heads = [f for f in self.play.script if isinstance(f, ReplaceHead)]
        if heads:
            heads = self._of(ReplaceHead)
        splitter = AnswerSplitter()
        carried = 0
        while data := await self.loop.sock_recv(self._source, _READ):
            self.play.counters.response_bytes += len(data)
            for body, part in splitter.split(data):
                length = len(part) if body else 0
                carried += length
                await self.play.pass_gate(length, carried)
                await flow.forward(part if body else self._rewritten(part, heads), body)
        await flow.forward(splitter.rest(), body=False)
        raise _Over

    def _rewritten(self, head: bytes, faults: list[ReplaceHead]) -> bytes:
        for fault in faults:
            new = fault.new.replace(b"\\", rb"\\")
            head, count = re.subn(re.escape(fault.old), new, head, flags=re.IGNORECASE)
            if count:
                self.play.struck(fault)
        return head


class Flow:
    """One direction of a connection, with the faults that lie ahead in it."""

    def __init__(self, connection: Connection, direction: str, source: socket.socket, sink: socket.socket) -> None:
        self._connection = connection
        self._source = source
        self._sink = sink
        script = connection.play.script
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
            if self._connection.play.strikes(fault, self._connection.number):
                self._connection.play.struck(fault)
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
                self._connection.open.clear()
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
        await self._connection.open.wait()
        size = max(self._drip.size, 1) if self._drip else max(len(data), 1)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            if self._drip:
                wait = self._drip.interval * len(piece) / size
                self._due = max(self._due + wait, time.monotonic() - 1)  # a late drop is made up for
                await asyncio.sleep(self._due - time.monotonic())
            await self._connection.loop.sock_sendall(self._sink, piece)


def _prepare(opened: socket.socket) -> None:
    opened.setblocking(False)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
