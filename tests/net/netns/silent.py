"""A program for a host whose name server never answers: opens one source, and prints how that ended, and when.

It reads lines of options, and does so for each of them in a fork: importing torch takes longer than most of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from tensorferry import HTTPTransport, Network
from tensorferry.dcp import PeerReader
from tensorferry.storage.peers import SCHEME

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "trainer.example"
OURS = f"http://{NAME}:4000/{'0' * 32}/checkpoint/"
TLS = f"https://sha256-{'0' * 64}@{NAME}:4000/{'0' * 32}/checkpoint/"
STOCK = f"http://{NAME}:4000/checkpoint/"
LONG = 60


def receive(metadata: str, seconds: float) -> Callable[[], object]:
    transport = HTTPTransport(timedelta(seconds=LONG), network=Network(advertise="127.0.0.1"))
    return lambda: transport.recv_checkpoint(0, metadata, 7, timedelta(seconds=seconds))


def load_from_peers(seconds: float) -> Callable[[], object]:
    # A load begins with this call.
    reader = PeerReader(f"{SCHEME} 7 {OURS}", timeout=timedelta(seconds=seconds))
    return reader.read_metadata


DOORS = {
    "ours": lambda seconds: receive(f"{OURS} {TLS}", seconds),
    "stock": lambda seconds: receive(STOCK, seconds),
    "peers": load_from_peers,
    "construction": lambda _: lambda: HTTPTransport(timedelta(seconds=LONG)),
}


def main(door: str, seconds: float, interrupt: float | None) -> NoReturn:
    # Neither this host's name nor any other is in its hosts file.
    socket.sethostname("nowhere.example")
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind(("127.0.0.1", 53))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tensorferry").addHandler(handler)
    call = DOORS[door](seconds)
    if interrupt is not None:
        threading.Timer(interrupt, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin, end = time.monotonic(), ["returned", ""]
    try:
        call()
    except BaseException as error:
        end = [type(error).__name__, str(error)]
    ended_at = time.monotonic()
    took = ended_at - begin
    silent.settimeout(0)
    asked = False
    with contextlib.suppress(OSError):
        asked = bool(silent.recv(4096))
    result = {"took": took, "ended_at": ended_at, "ended": end[0], "message": end[1], "asked": asked}
    print(json.dumps(result | {"warnings": warnings}), flush=True)
    # Threads that are still looking up a name must not delay the exit either; the caller checks that.
    sys.exit(0)


if __name__ == "__main__":
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            main(**json.loads(line))
        print(json.dumps({"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)
