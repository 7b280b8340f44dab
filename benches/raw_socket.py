"""The floor: the same bytes through plain blocking sockets between two processes, with nothing around them."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from typing import TYPE_CHECKING

from memory import fresh, touch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from mmap import mmap

_BLOCK = 4 << 20


def _slices(memory: memoryview, streams: int) -> list[memoryview]:
    share = -(-len(memory) // streams)
    return [memory[i * share : (i + 1) * share] for i in range(streams)]


class RawSender:
    """Answers each byte that arrives on a connection with that stream's share of the memory."""

    def __init__(self, nbytes: int, address: str = "127.0.0.1") -> None:
        self._memory = fresh(nbytes)
        touch(self._memory)
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]

    def serve(self, streams: int) -> None:
        """Accept `streams` connections and serve each on a thread of its own until its peer closes it."""
        for part in _slices(memoryview(self._memory), streams):
            connection, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(connection, part), daemon=True).start()

    @staticmethod
    def _answer(connection: socket.socket, part: memoryview) -> None:
        with connection:
            while connection.recv(1):
                for start in range(0, len(part), _BLOCK):
                    connection.sendall(part[start : start + _BLOCK])


class RawReceiver:
    """Keeps `streams` connections open, to `addresses` in turn, and times one whole transfer at a time."""

    def __init__(self, port: int, streams: int, addresses: Sequence[str] = ("127.0.0.1",)) -> None:
        there = itertools.islice(itertools.cycle(addresses), streams)
        self._connections = [socket.create_connection((address, port)) for address in there]

    def receive(self, memory: mmap) -> tuple[int, int]:
        """Fill `memory`; return when it began and when it ended, in nanoseconds of the monotonic clock."""
        begin = time.perf_counter_ns()
        jobs = [
            threading.Thread(target=self._fill, args=pair)
            for pair in zip(self._connections, _slices(memoryview(memory), len(self._connections)), strict=True)
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        return begin, time.perf_counter_ns()

    @staticmethod
    def _fill(connection: socket.socket, part: memoryview) -> None:
        connection.sendall(b"g")
        done = 0
        while done < len(part):
            got = connection.recv_into(part[done:])
            if not got:
                raise ConnectionError("raw sender went away")
            done += got

    def close(self) -> None:
        """Let the sender's threads end."""
        for connection in self._connections:
            connection.close()


def floor(port: int, nbytes: int, streams: int) -> dict[str, float]:
    """Return the seconds of one transfer of each kind.

    "huge" is into fresh memory of huge pages, "fresh" into fresh memory of small ones, "touched" once more into that.
    """
    seconds: dict[str, float] = {}
    receiver = RawReceiver(port, streams)
    for kinds in (("huge",), ("fresh", "touched")):
        memory = fresh(nbytes, huge=kinds[0] == "huge")
        for kind in kinds:
            begin, end = receiver.receive(memory)
            seconds[f"{kind}_{streams}_s"] = (end - begin) / 1e9
    receiver.close()
    return seconds
