"""How fast a state goes from one transport to another: what ``bench`` and ``doctor`` measure.

The source is a transport of this process. The receiver is one as well, so that rates are those that one process reaches
in both directions at once; between two processes each side has cores of its own.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple

_TIMEOUT = timedelta(seconds=120)
_TENSORS = 16


class Rate(NamedTuple):
    """Bytes per second of several receives of the same state.

    Attributes:
        what: the route
        nbytes: of the state
        median: of all receives
        least: the slowest
        most: the fastest
    """

    what: str
    nbytes: int
    median: float
    least: float
    most: float


def sample_state(nbytes: int) -> dict[str, Any]:
    """Returns a state of ``nbytes`` in equal tensors, none of whose pages are shared."""
    import torch

    each = max(nbytes // _TENSORS, 1)
    return {f"layer.{number}": torch.empty(each, dtype=torch.uint8).random_() for number in range(_TENSORS)}


def rounds(nbytes: int, count: int, *, into: str = "place") -> Iterator[tuple[str, float]]:
    """Yields the route and the bytes per second of each receive, the routes taking turns.

    Args:
        nbytes: size of the state
        count: receives over each route, without the first, which also takes pages and starts threads
        into: ``"place"`` receives into tensors that are there, ``"fresh"`` into fresh memory
    """
    from ..torchft.transport import HTTPTransport

    sent = sample_state(nbytes)
    live = {name: tensor.clone() for name, tensor in sent.items()}
    with ExitStack() as stack:
        here: dict[str, Any] = {"state_dict": lambda: live} if into == "place" else {}
        # The variables may name ports that the transports of a job have.
        local: dict[str, Any] = {"interface": "127.0.0.1", "port": 0, "metrics_port": 0}
        routes = {}
        chosen: list[tuple[str, dict[str, Any]]] = [
            ("shared memory", {"same_host": True, "tls": False}),
            ("loopback", {"same_host": False, "tls": False}),
            ("loopback, TLS", {"same_host": False, "tls": True}),
        ]
        for what, options in chosen:
            source = stack.enter_context(HTTPTransport[Any](_TIMEOUT, **local, **options))
            receiver = stack.enter_context(HTTPTransport[Any](_TIMEOUT, **local, **options, **here))
            source.send_checkpoint([], 1, sent, _TIMEOUT)
            routes[what] = source, receiver
        for number in range(count + 1):
            for what, (source, receiver) in routes.items():
                started = time.perf_counter()
                receiver.recv_checkpoint(0, source.metadata(), 1, _TIMEOUT)
                took = time.perf_counter() - started
                # The first one pays for pages and threads that the others find.
                if number:
                    yield what, sum(map(len, sent.values())) / took


def measure(nbytes: int, count: int, *, into: str = "place") -> list[Rate]:
    """Returns the rates of :func:`rounds`, summed up by route."""
    found: dict[str, list[float]] = {}
    for what, rate in rounds(nbytes, count, into=into):
        found.setdefault(what, []).append(rate)
    return [Rate(what, nbytes, statistics.median(all_), min(all_), max(all_)) for what, all_ in found.items()]


def copy_rate(nbytes: int, count: int = 3) -> float:
    """Returns the bytes per second of a copy in memory by one thread, which is the measure of everything else.

    It is the fastest of ``count`` copies. Meanwhile torch has one thread in the whole process.
    """
    import torch

    source, target = torch.empty(nbytes, dtype=torch.uint8).random_(), torch.zeros(nbytes, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = math.inf
        for _ in range(count):
            started = time.perf_counter()
            target.copy_(source)
            best = min(best, time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return nbytes / max(best, 1e-9)
