"""``tensorferry bench``: how fast states go from one transport to another on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from ..._native import _check_machine_has
from ..._validate import amount, readable
from ...errors import InvalidArgument
from ...net.network import Network
from .. import console, exits

_TIMEOUT = timedelta(seconds=120)
_TENSORS = 16


def bench(*, size: str = "256M", rounds: int = 5, json: bool = False) -> int:
    """Measures receives on this machine, by shared memory and over loopback, with and without TLS.

    Source and receiver are transports of one process, which receives into tensors that are there and into fresh memory.
    The routes take turns. No rate of this machine says how fast a network is: `tensorferry doctor METADATA` measures
    the way to a peer.

    Args:
        size: of the state, such as 256M or 4G; three times as much memory is needed
        rounds: receives over each route; the median is shown, with the slowest and the fastest
        json: print the result as one JSON document
    """
    nbytes = amount("--size", size)
    if nbytes < 1 << 20:
        raise InvalidArgument(f"--size must be 1M or more, not {size}")
    if not 1 <= rounds <= 1000:
        raise InvalidArgument(f"--rounds must be between 1 and 1000, not {rounds}")
    _check_machine_has(3 * nbytes, "the states of a measurement")
    rates: dict[tuple[str, str], list[float]] = {}
    for into in ("place", "fresh"):
        for route, rate in _receives(nbytes, rounds, into):
            rates.setdefault((route, into), []).append(rate)
    found = [(*where, statistics.median(each), min(each), max(each)) for where, each in rates.items()]
    if json:
        fields = ("route", "into", "median", "least", "most")
        receives = [dict(zip(fields, row, strict=True)) for row in found]
        console.out_json({"bytes": nbytes, "rounds": rounds, "receives": receives})
    else:
        console.out(f"a state of {readable(nbytes)}, {rounds} receives each")
        rows = [(route, into, *(f"{readable(rate)}/s" for rate in each)) for route, into, *each in found]
        console.out_table(("route", "into", "median", "slowest", "fastest"), rows, (2, 3, 4))
    return exits.OK


def _receives(nbytes: int, count: int, into: str) -> Iterator[tuple[str, float]]:
    """Yields the route and the bytes per second of each receive, the routes taking turns.

    Args:
        nbytes: size of the state
        count: receives over each route, without the first, which also takes pages and starts threads
        into: ``"place"`` receives into tensors that are there, ``"fresh"`` into fresh memory
    """
    import torch

    from ...torchft.transport import HTTPTransport

    each = max(nbytes // _TENSORS, 1)
    sent = {f"layer.{number}": torch.empty(each, dtype=torch.uint8).random_() for number in range(_TENSORS)}
    live = {name: tensor.clone() for name, tensor in sent.items()}
    routes = [("shared memory", True, False), ("loopback", False, False), ("loopback, TLS", False, True)]
    here: dict[str, Any] = {"state_dict": lambda: live} if into == "place" else {}
    with ExitStack() as stack:
        opened = []
        for route, same_host, tls in routes:
            # The variables may name ports that the transports of a job have.
            network = Network(same_host=same_host, tls=tls, interface="127.0.0.1", port=0, metrics_port=0)
            source = stack.enter_context(HTTPTransport[Any](_TIMEOUT, network=network))
            receiver = stack.enter_context(HTTPTransport[Any](_TIMEOUT, network=network, **here))
            source.send_checkpoint([], 1, sent, _TIMEOUT)
            opened.append((route, source, receiver))
        for number in range(count + 1):
            for route, source, receiver in opened:
                started = time.perf_counter()
                receiver.recv_checkpoint(0, source.metadata(), 1, _TIMEOUT)
                took = time.perf_counter() - started
                if number:
                    yield route, _TENSORS * each / took
