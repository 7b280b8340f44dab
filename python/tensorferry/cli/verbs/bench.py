"""``tensorferry bench``: how fast states go from one transport to another on this machine."""

from __future__ import annotations

import os

from ...checkpointing.keeper.limits import amount
from ...errors import InvalidArgument
from .. import exits
from ..flags import Json
from ..output import console


def bench(*, size: str = "256M", rounds: int = 5, json: Json = False) -> int:
    """Measures receives on this machine, by shared memory and over loopback, beside a copy in memory.

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
    from ..._native import _check_machine_has
    from .. import rates

    _check_machine_has(3 * nbytes, "the states of a measurement")
    copied = rates.copy_rate(nbytes)
    found = [(into, rate) for into in ("place", "fresh") for rate in rates.measure(nbytes, rounds, into=into)]
    if json:
        console.out_json(
            {
                "bytes": nbytes,
                "rounds": rounds,
                "cores": len(os.sched_getaffinity(0)),
                "copy_bytes_per_second": copied,
                "receives": [
                    {"route": rate.what, "into": into, "median": rate.median, "least": rate.least, "most": rate.most}
                    for into, rate in found
                ],
            }
        )
        return exits.OK
    console.out(
        f"a state of {console.amount(nbytes)}, {rounds} receives each, {len(os.sched_getaffinity(0))} cores; "
        f"one thread copies {console.amount(copied)}/s"
    )
    where = {"place": "tensors that are there", "fresh": "fresh memory"}
    rows = [
        (
            rate.what,
            where[into],
            f"{console.amount(rate.median)}/s",
            f"{console.amount(rate.least)}/s",
            f"{console.amount(rate.most)}/s",
        )
        for into, rate in found
    ]
    console.out_table(("route", "into", "median", "slowest", "fastest"), rows, (2, 3, 4))
    return exits.OK
