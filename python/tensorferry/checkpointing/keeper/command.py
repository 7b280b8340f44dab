"""``tensorferry keeper``: starts the keeper of a node, or prints what a running one holds."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...errors import InvalidArgument, TensorferryError, message_of
from ...net.metadata import host_of
from ...net.network import Network
from .client import Keeper
from .limits import memory_limit, readable
from .place import DEFAULT_NAME, keeper_name
from .process import KeeperProcess
from .snapshot import LOCAL, Snapshot, peer_metadata

logger = logging.getLogger("tensorferry")

#: The least scheduling weight of trainers is more than three times this (``nice``).
_NICE = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a keeper until a signal ends it; with ``--status``, asks the one that runs.

    Args:
        arguments: of the command line; ``sys.argv`` if left out

    Returns:
        The exit status: 0, or 1 if the keeper cannot start or there is none to ask.

    Raises:
        SystemExit: with status 2, options are wrong; with 0, ``--help`` was given
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        return run(chosen)
    except InvalidArgument as e:
        parser.error(str(e))
    except (TensorferryError, OSError) as e:
        print(f"{parser.prog}: {message_of(e)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensorferry keeper",
        description="Holds the snapshots of this node's trainers in memory, so that they outlive them.",
        epilog="The shared secret is read from TENSORFERRY_SECRET or the file TENSORFERRY_SECRET_FILE, and whether to "
        "encrypt, and with which certificate, from TENSORFERRY_TLS, TENSORFERRY_TLS_CERTIFICATE and "
        "TENSORFERRY_TLS_KEY.",
    )
    add = parser.add_argument
    add("--name", default=DEFAULT_NAME, help="distinguishes keepers on a node (default: %(default)s)")
    add("--memory", metavar="SIZE", help="memory to hold at most: bytes, 20G or 40%% (default: half of what there is)")
    add("--generations", type=int, default=2, metavar="N", help="snapshots of each job and rank (default: %(default)s)")
    add("--interface", metavar="NAME", help="listen on this interface, address or network only (default: all)")
    add("--port", help="listen on this port, or on the first free one of a range like 29600-29699")
    add("--metrics-port", help="serve /metrics and a status page, and nothing else, on this port too, to everybody")
    add("--buddy", action="append", default=[], metavar="ADDRESS", help="copy the snapshots of the keeper there")
    add("--status", action="store_true", help="print what the running keeper holds, and end")
    add("--json", action="store_true", help="with --status: as JSON")
    return parser


def run(chosen: argparse.Namespace) -> int:
    """Does what the options ``chosen`` say, and returns the exit status.

    Raises:
        InvalidArgument: an option is wrong
        TensorferryError: the keeper cannot start, or there is none to ask
        OSError: the system refuses a socket, or to write its files
    """
    name = keeper_name(chosen.name)
    if chosen.status:
        print_status(name, as_json=chosen.json)
        return 0
    if chosen.generations < 1:
        raise InvalidArgument(f"--generations must be 1 or more, not {chosen.generations}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    network = Network(interface=chosen.interface, port=chosen.port, metrics_port=chosen.metrics_port)
    memory = memory_limit(chosen.memory)
    _prepare_process()
    keeper = KeeperProcess(name, network, memory, chosen.generations, chosen.buddy)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: keeper.stop(number))
    logger.info("the keeper %s holds up to %s, and is reached at %s", name, readable(memory), host_of(keeper.address))
    keeper.run()
    if keeper.ended_by is not None:
        logger.info("the keeper %s ends: %s", name, signal.Signals(keeper.ended_by).name)
    return 0


def _prepare_process() -> None:
    """Gives this process less weight than a trainer has, and as many open files as the system allows."""
    nice = max(os.getpriority(os.PRIO_PROCESS, 0), _NICE)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        if os.getsid(0) == os.getpid():
            # Where the kernel gives each session a share (autogroups), that counts within the session only.
            Path("/proc/self/autogroup").write_text(str(nice))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def print_status(name: str, *, as_json: bool) -> None:
    """Prints what the keeper called ``name`` says about itself, and what it holds.

    Raises:
        TensorferryError: there is none, or it does not answer
    """
    with Keeper(name) as keeper:
        status, held = keeper.status(), keeper.held()
    status["clients"] -= 1  # this command
    if as_json:
        print(json.dumps({**status, "held": [one.fields() for one in held]}, indent=2))
        return
    used = f"{readable(status['used'])} of {readable(status['memory'])} in {status['snapshots']} snapshots"
    print(f"keeper {status['name']} (process {status['pid']}), at {status['address']}")
    print(f"{used}, {status['clients']} clients")
    for buddy in status["buddies"]:
        said = f"{buddy['snapshots']} snapshots, heard {buddy['silent_s']} s ago"
        print(f"buddy {buddy['host']}: {buddy['error'] or said}")
    for one in held:
        print(_snapshot_line(one))
    for owner in dict.fromkeys(one.owner for one in held):
        with contextlib.suppress(TensorferryError):
            metadata = peer_metadata(one for one in held if one.owner == owner)
            print(f"for a PeerReader or tensorferry pull, the newest of {owner[0]} that is complete: {metadata}")


def _snapshot_line(one: Snapshot) -> str:
    where = "there" if one.remote else "here" if one.origin == LOCAL else f"from {one.origin}"
    whole, age = "complete" if one.complete else "incomplete", max(time.time() - one.began / 1e9, 0.0)
    what = f"step {one.step}  rank {one.rank} of {one.world_size}  {readable(one.nbytes)}  {age:.0f} s old"
    return f"  {what}  {whole}  {where}  {one.path}  {one.metadata}"
