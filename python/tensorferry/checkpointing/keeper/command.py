"""``tensorferry keeper``: starts the keeper of a node, or prints what a running one holds."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ...errors import InvalidArgument, TensorferryError, message_of
from ...net.certificates import Tls, fingerprint_of
from ...net.metadata import host_of
from ...net.options import ServerOptions
from . import index
from .client import Keeper
from .limits import amount, memory_limit, readable
from .own_process import ended_by_signals, lower_weight, raise_descriptor_limit
from .place import DEFAULT_NAME, keeper_name
from .process import KeeperOptions, KeeperProcess
from .snapshot import LOCAL, Snapshot, peer_metadata

logger = logging.getLogger("tensorferry")

_BROKEN_PIPE = 128 + signal.SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Runs a keeper until a signal or its idle limit ends it; with ``--status``, asks the one that runs.

    Args:
        arguments: of the command line; ``sys.argv`` if left out

    Returns:
        The exit status: 0, or 1 if the keeper cannot start or there is none to ask. If nobody reads the output any
        more, it is 141, as if the signal for that had ended the process.

    Raises:
        SystemExit: with status 2, options are wrong; with 0, ``--help`` or ``--version`` was given
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.WARNING if chosen.quiet else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    try:
        if chosen.fingerprint is not None:
            print(fingerprint_of(chosen.fingerprint))
            return 0
        name = keeper_name(chosen.name)
        if chosen.status:
            status = _print_status(name, as_json=chosen.json)
            sys.stdout.flush()
            return status
        if chosen.json:
            parser.error("--json goes with --status")
        options = _options(name, chosen)
    except InvalidArgument as e:
        parser.error(str(e))
    except BrokenPipeError:
        # What is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except TensorferryError as e:
        print(f"{parser.prog}: {message_of(e)}", file=sys.stderr)
        return 1
    lower_weight()
    raise_descriptor_limit()
    try:
        keeper = KeeperProcess(options)
    except InvalidArgument as e:
        parser.error(str(e))
    except (TensorferryError, OSError) as e:
        print(f"{parser.prog}: {message_of(e)}", file=sys.stderr)
        return 1
    with ended_by_signals(keeper.stop):
        logger.info(
            "the keeper %s holds up to %s, and is reached at %s",
            name,
            readable(options.memory),
            host_of(keeper.address),
        )
        keeper.run()
    if keeper.ended_by is not None:
        logger.info("the keeper %s ends: %s", name, signal.Signals(keeper.ended_by).name)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensorferry keeper",
        description="Holds the snapshots of this node's trainers in memory, so that they outlive them.",
        epilog="The shared secret is read from TENSORFERRY_SECRET or the file TENSORFERRY_SECRET_FILE. What the "
        "options leave open about TLS is in TENSORFERRY_TLS, TENSORFERRY_TLS_CERTIFICATE and TENSORFERRY_TLS_KEY.",
    )
    add = parser.add_argument
    add("--name", default=DEFAULT_NAME, help="distinguishes keepers on a node (default: %(default)s)")
    add("--memory", metavar="SIZE", help="memory to hold at most: bytes, 20G or 40%% (default: half of what there is)")
    add("--generations", type=int, default=2, metavar="N", help="snapshots of each job and rank (default: %(default)s)")
    add("--idle", type=float, default=0.0, metavar="SECONDS", help="end after so long without clients (default: never)")
    add("--interface", metavar="NAME", help="listen on this interface, address or network only (default: all)")
    add("--port", default="0", help="listen on this port, or on the first free one of a range like 29600-29699")
    add("--metrics-port", help="serve /metrics and a status page, and nothing else, on this port too, to everybody")
    add("--advertise", metavar="HOST", help="name or address by which other nodes reach this one")
    add("--tls", action="store_true", help="encrypt what goes over the network (default: what TENSORFERRY_TLS says)")
    add("--certificate", metavar="FILE", help="encrypt with this certificate (PEM), so that its fingerprint is known")
    add("--key", metavar="FILE", help="the key of --certificate (PEM, without a passphrase)")
    add("--max-bandwidth", metavar="SIZE", help="bytes per second that all receivers together may take, such as 500M")
    add(
        "--buddy",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="copy the snapshots of the keeper there; may be repeated",
    )
    add("--quiet", action="store_true", help="log warnings only")
    add("--status", action="store_true", help="print what the running keeper holds, and end")
    add("--json", action="store_true", help="with --status: as JSON")
    add("--fingerprint", metavar="FILE", help="print the fingerprint of a certificate, for --buddy, and end")
    add("--version", action="version", version=_installed_version(), help="print the version, and end")
    return parser


def _options(name: str, chosen: argparse.Namespace) -> KeeperOptions:
    if chosen.generations < 1:
        raise InvalidArgument(f"--generations must be 1 or more, not {chosen.generations}")
    if not (math.isfinite(chosen.idle) and chosen.idle >= 0):
        raise InvalidArgument(f"--idle must be 0 or more seconds, not {chosen.idle}")
    bandwidth = None if chosen.max_bandwidth is None else amount("--max-bandwidth", chosen.max_bandwidth)
    server = ServerOptions(
        secret=None,
        tls=_chosen_tls(chosen),
        same_host=None,
        interface=chosen.interface,
        advertise=chosen.advertise,
        max_bandwidth=bandwidth,
        port=chosen.port,
        metrics_port=chosen.metrics_port,
    )
    return KeeperOptions(
        name=name,
        memory=memory_limit(chosen.memory),
        generations=chosen.generations,
        idle=chosen.idle,
        server=server,
        buddies=[index.keeper_url(address, server) for address in chosen.buddy],
    )


def _installed_version() -> str:
    from importlib.metadata import version

    return version("tensorferry")


def _chosen_tls(chosen: argparse.Namespace) -> Tls:
    if (chosen.certificate is None) != (chosen.key is None):
        raise InvalidArgument("--certificate and --key go together: give both files")
    if chosen.certificate is not None:
        return chosen.certificate, chosen.key
    return True if chosen.tls else None


def _print_status(name: str, *, as_json: bool) -> int:
    with Keeper(name) as keeper:
        status, held = keeper.status(), keeper.held()
    status["clients"] -= 1  # this command
    if as_json:
        print(json.dumps({**status, "held": [one.fields() for one in held]}, indent=2))
        return 0
    print(f"keeper {status['name']} (process {status['pid']}), at {status['address']}")
    print(
        f"{readable(status['used'])} of {readable(status['memory'])} in {status['snapshots']} snapshots, "
        f"{status['clients']} clients"
    )
    for buddy in status["buddies"]:
        print(f"buddy {buddy['host']}: {_buddy_text(buddy)}")
    for one in held:
        print(_snapshot_line(one))
    for owner in dict.fromkeys(one.owner for one in held):
        with contextlib.suppress(TensorferryError):
            metadata = peer_metadata(one for one in held if one.owner == owner)
            print(f"for a PeerReader or tensorferry pull, the newest of {owner[0]} that is complete: {metadata}")
    return 0


def _buddy_text(buddy: dict[str, Any]) -> str:
    if buddy["error"]:
        return str(buddy["error"])
    if buddy["silent_s"] is None:
        return "not reached yet"
    copied = readable(buddy["copied_bytes"])
    return f"{buddy['snapshots']} snapshots, {copied} copied, heard {buddy['silent_s']:.0f} s ago"


def _snapshot_line(one: Snapshot) -> str:
    where = "there" if one.remote else "here" if one.origin == LOCAL else f"from {one.origin}"
    whole = "complete" if one.complete else "incomplete"
    age = max(time.time() - one.began / 1e9, 0.0)
    return (
        f"  step {one.step}  rank {one.rank} of {one.world_size}  {readable(one.nbytes)}  {age:.0f} s old  {whole}  "
        f"{where}  {Path(one.path)}  {one.metadata}"
    )
