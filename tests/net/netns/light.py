"""The program of a simulated host, without torch: it serves bytes, or receives them and says by which addresses."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from tensorferry._native import Remote, Table
from tensorferry.net.network import Network
from tensorferry.net.serve import start
from tensorferry.storage.container import Container

STEP = 5
PATIENCE_S = 60.0


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def serve(kib: int) -> None:
    memory = ctypes.create_string_buffer(bytes(range(256)) * (kib * 4), kib << 10)
    server, host = start(PATIENCE_S, Network(relay=False, same_host=False))
    rows = Table()
    rows.append(memory, "w", "U8", (kib << 10,), ctypes.addressof(memory), kib << 10, 0)
    Container(rows, memory, False, [], []).publish(server, STEP)
    say(metadata=[server.url(host)])
    for _ in sys.stdin:
        pass


def receive() -> None:
    for line in sys.stdin:
        order = json.loads(line)

        def progress(done: int, total: int) -> None:
            say(done=done, total=total)

        watch = progress if order.get("watched") else None
        remote = Remote.open(order["metadata"], STEP, timeout=PATIENCE_S, same_host=False, progress=watch)
        memory = ctypes.create_string_buffer(remote.sizes[0])
        _, report = remote.fetch([ctypes.addressof(memory)])
        by_route = [[*route, nbytes] for route, nbytes in zip(report.routes, report.route_bytes, strict=True)]
        right = memory.raw == bytes(range(256)) * (len(memory) // 256)
        say(right=right, by_route=by_route)


if __name__ == "__main__":
    {"serve": serve, "receive": receive}[sys.argv[1]](**json.loads(sys.argv[2]))
