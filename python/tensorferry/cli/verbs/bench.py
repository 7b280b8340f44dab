"""``tensorferry bench``: how fast states go from one transport to another on this machine, or to its disk and back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ...checkpointing.keeper.limits import amount
from ...errors import InvalidArgument, SystemRefused
from .. import exits
from ..flags import Json
from ..output import console


def bench(*, size: str = "256M", rounds: int = 5, save: Path | None = None, json: Json = False) -> int:
    """Measures receives on this machine, by shared memory and over loopback, beside a copy in memory.

    Source and receiver are transports of one process, which receives into tensors that are there and into fresh memory.
    The routes take turns. No rate of this machine says how fast a network is: `tensorferry doctor METADATA` measures
    the way to a peer.

    With --save it measures checkpoints instead, of one rank, in a folder that it makes below FOLDER and removes:
    tensorferry's AsyncCheckpointer and FileWriter beside torch's dcp.async_save, dcp.save and torch.save. They take
    turns, and each has its bytes on the disk when its save ends.

    Args:
        size: of the state, such as 256M or 4G; three times as much memory is needed, with --save four times
        rounds: receives over each route, or saves of each kind; the median is shown, with the slowest and the fastest
        save: measure checkpoints in this folder, which must exist: on the disk that you will save to
        json: print the result as one JSON document
    """
    nbytes = amount("--size", size)
    if nbytes < 1 << 20:
        raise InvalidArgument(f"--size must be 1M or more, not {size}")
    if not 1 <= rounds <= 1000:
        raise InvalidArgument(f"--rounds must be between 1 and 1000, not {rounds}")
    if save is not None:
        return _saves(nbytes, rounds, save, json=json)
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


def _saves(nbytes: int, rounds: int, folder: Path, *, json: bool) -> int:
    if not folder.is_dir():
        raise InvalidArgument(f"--save {folder} is not a folder")
    from ..._native import _check_machine_has
    from .. import disk_rates

    _check_machine_has(4 * nbytes, "the states of a measurement")
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < nbytes * 1.1:
        raise SystemRefused(errno.ENOSPC, f"{folder}: there is no room for a checkpoint of {nbytes} bytes")
    found = disk_rates.measure(nbytes, rounds, folder)
    cores = len(os.sched_getaffinity(0))
    if json:
        saves = [
            {
                "kind": times.what,
                "stands_still_seconds": times.stands,
                "on_disk_seconds": dict(zip(("median", "least", "most"), times.saved, strict=True)),
                "load_seconds": times.loaded,
            }
            for times in found
        ]
        console.out_json({"bytes": nbytes, "rounds": rounds, "cores": cores, "folder": str(folder), "saves": saves})
        return exits.OK
    console.out(
        f"a state of {console.amount(nbytes)}, {rounds} saves of each kind in {folder}, {cores} cores; torch's writers "
        "have as many threads. Loads are right after the save, from the page cache"
    )
    rows = [
        (times.what, *(f"{seconds * 1000:.0f}" for seconds in (times.stands, *times.saved, times.loaded)))
        for times in found
    ]
    head = ("milliseconds", "stands still", "on the disk", "fastest", "slowest", "load")
    console.out_table(head, rows, (1, 2, 3, 4, 5))
    return exits.OK
