"""How long ranks take that load the same state with `PeerReader` from one source, with and without each other's help.

Each rank is a host on a link of its own, as in `fleet.py`. Times are in copies, what one rank alone takes; `sent` is
what the counter of the source's link says. Then, without shaped links, what it costs ranks that have nothing in common:
their rates with `relay=True` beside `relay=False`, in turns. The first part needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleet import LEAD, PATIENCE_S, Host, Network, NotPermitted

AGENT = Path(__file__).with_name("shared_reads_host.py")
PORT = 29400


def ask(process: subprocess.Popen[str], **what: Any) -> None:
    """Tells a process what to do."""
    assert process.stdin is not None
    print(json.dumps(what), file=process.stdin, flush=True)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns its next answer."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a process is gone")
    found: dict[str, Any] = json.loads(line)
    return found


def join(ranks: list[subprocess.Popen[str]], master: str, interface: str | None, port: int) -> None:
    """Makes the processes ranks of one job."""
    for rank, process in enumerate(ranks):
        ask(process, do="join", rank=rank, world=len(ranks), master=master, interface=interface, port=port)
    for process in ranks:
        answer(process)


def loads(
    ranks: list[subprocess.Popen[str]], mib: int, metadata: str, relay: bool, **more: Any
) -> list[dict[str, Any]]:
    """Has all ranks load at the same time; returns what they say.

    Raises:
        RuntimeError: what one of them has loaded is not what was served
    """
    at = time.monotonic() + LEAD
    for process in ranks:
        ask(process, do="load", mib=mib, metadata=metadata, relay=relay, at=at, **more)
    told = [answer(process) for process in ranks]
    if not all(one["equal"] for one in told):
        raise RuntimeError(f"a load went wrong: {told}")
    return told


def processes(hosts: list[Host]) -> list[subprocess.Popen[str]]:
    """Returns the processes of hosts."""
    return [host.process for host in hosts if host.process is not None]


class Restartable(Network):
    """A network whose hosts begin anew: a process is a rank of one job."""

    def restart(self, hosts: list[Host]) -> None:
        """Starts the processes of hosts again."""
        for host in hosts:
            host.end()
            host.start(0)
        for host in hosts:
            host.answer()


def measure(network: Restartable, mib: int, counts: list[int], rounds: int) -> list[dict[str, Any]]:
    """Loads with so many ranks, in turns with and without relays."""
    source, *hosts = network.hosts
    (serving,) = processes([source])
    results: list[dict[str, Any]] = []
    ask(serving, do="serve", mib=mib)
    metadata = answer(serving)["metadata"]
    copy_s = copy_bytes = 0.0
    for turn, count in enumerate([1, *counts]):
        network.restart(hosts)
        ranks = processes(hosts[:count])
        join(ranks, hosts[0].address, "uplink", PORT + turn)
        for number in range(2 if count == 1 else rounds):
            for relay in (False, True):
                before = source.sent()
                told = loads(ranks, mib, metadata, relay)
                seconds, sent = max(one["seconds"] for one in told), source.sent() - before
                if count == 1:
                    # The first load of a process loads code.
                    copy_s, copy_bytes = (seconds, sent) if number or relay else (0.0, 0.0)
                    continue
                relayed = sum(one["report"]["relayed"] for one in told)
                last, copies = seconds / copy_s, sent / copy_bytes
                results.append({"ranks": count, "relay": relay, "last": last, "sent": copies, "relayed": relayed})
                print(f"{count:>2} ranks, relay={relay!s:5} {last:8.2f} {copies:8.2f}", flush=True)
        if count == 1:
            print(f"one copy takes {copy_s:.2f} s, and {copy_bytes / 1e6:.1f} MB on the link; in copies: last, sent")
    return results


@contextlib.contextmanager
def local(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """So many processes of this machine."""
    command = [sys.executable, str(AGENT), "127.0.0.1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    made = [subprocess.Popen(command, text=True, **pipes) for _ in range(count)]  # type: ignore[call-overload]
    try:
        for process in made:
            answer(process)
        yield made
    finally:
        for process in made:
            process.kill()
            process.communicate(timeout=PATIENCE_S)


def cost(mib: int, rounds: int, own: bool, ranks: int = 2) -> dict[str, Any]:
    """Compares the rates of loads over the loopback interface with and without relays, each `own` or all of it."""
    with local(ranks + 1) as (serving, *loading):
        ask(serving, do="serve", mib=mib)
        metadata = answer(serving)["metadata"]
        join(loading, "127.0.0.1", "lo", PORT - 1 - own)
        ratios = []
        for number in range(rounds + 1):
            took = {}
            for relay in (True, False) if number % 2 else (False, True):
                took[relay] = max(one["seconds"] for one in loads(loading, mib, metadata, relay, own=own))
            if number:  # The first load of a process loads code.
                ratios.append(took[False] / took[True])
    what = "each its own" if own else "all the same"
    figures = {"loads": what, "median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    print(
        f"{ranks} ranks on a fast network, {what}: rate with relays / without, of {rounds} pairs: "
        f"{figures['median']:.3f} ({figures['lowest']:.3f}-{figures['highest']:.3f})",
        flush=True,
    )
    return figures


def main() -> int:
    """Runs the bench; 0 also where a part of it cannot run, which it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, default=100, help="speed of each link, each way")
    parser.add_argument("--mib", type=int, default=128, help="size of the state")
    parser.add_argument("--ranks", default="2,4", help="how many, ascending")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=9, help="loads with and without relays on a fast network; 0: none")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    options = parser.parse_args()
    counts = [int(count) for count in options.ranks.split(",") if count]
    figures: dict[str, Any] = {"mbit": options.mbit, "mib": options.mib, "rounds": [], "cost": []}
    try:
        network = Restartable(options.mbit, AGENT)
        try:
            if counts:
                network.build(counts[-1] + 1, options.mib)
                figures["rounds"] = measure(network, options.mib, counts, options.rounds)
        finally:
            network.remove()
    except NotPermitted as reason:
        print(f"SKIPPED: no network namespaces with shaped links here (root is needed): {reason}")
    if options.pairs:
        figures["cost"] = [cost(options.mib, options.pairs, own) for own in (True, False)]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
