"""The program of a simulated host: a source that serves a state, or a receiver that reports its progress."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from datetime import timedelta
from typing import Any

import torch

from tensorferry import HTTPTransport, join_metadata

TIMEOUT = timedelta(seconds=90)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def digest(state: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(name.encode())
        sha.update(state[name].numpy())
    return sha.hexdigest()


def serve(mib: int, advertise: str | None) -> None:
    torch.manual_seed(7)
    state = {f"layer{i}": torch.randint(0, 255, ((mib << 20) // 4,), dtype=torch.uint8) for i in range(4)}
    transport = HTTPTransport(TIMEOUT, advertise=advertise)
    transport.send_checkpoint([1], 5, state, TIMEOUT)
    say(metadata=transport.metadata(), digest=digest(state))
    for _ in sys.stdin:
        say(served=transport._server.bytes_served)
    transport.shutdown()


def receive() -> None:
    def progress(done: int, total: int) -> None:
        say(done=done, total=total)

    troubles: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: troubles.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tensorferry").addHandler(handler)
    transport = HTTPTransport(TIMEOUT, 4, progress=progress)
    for line in sys.stdin:
        metadata = join_metadata(json.loads(line)["metadata"])
        troubles.clear()
        begin = time.perf_counter()
        state = transport.recv_checkpoint(0, metadata, 5, TIMEOUT)
        seconds = time.perf_counter() - begin
        report = transport.last_report
        by_route = [[*route, nbytes] for route, nbytes in zip(report.routes, report.route_bytes, strict=True)]
        say(seconds=seconds, digest=digest(state), troubles=troubles, by_route=by_route)
    transport.shutdown()


if __name__ == "__main__":
    {"serve": serve, "receive": receive}[sys.argv[1]](**json.loads(sys.argv[2]))
