"""How much of several links between two hosts a receive uses, with all of them, and with one that goes in the middle.

Each host is a network namespace of this machine; `tc` limits each link both ways. The kinds take turns: tensorferry
over all links, tensorferry over one (`advertise=` with one address), torchft's transport, which knows one, and two
plain sockets a link with equal shares: what this machine can carry. With faults, one link goes in the middle of a
receive, drops everything from its beginning on, or delays what it carries. Shares are of what all links together carry
as frames, of which 0.956 is payload. It needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fleet import PATIENCE_S, NotPermitted, run

AGENT = Path(__file__).with_name("fleet_host.py")
KINDS = {
    "rails": "tensorferry, every link",
    "ours": "tensorferry, one link",
    "torchft": "torchft's HTTPTransport",
    "raw": "plain sockets, every link",
}
#: Plain sockets over each link.
SOCKETS = 2
LEAD = 0.3
#: What a link lets through at once. A buffer of the kernel, of up to 64 KiB and the heads of its frames, has to fit in:
#: one that does not is cut into frames, each of which then takes the kernel's way by itself, and that alone keeps
#: two cores busy before four links of 250 Mbit/s are full.
BURST = "128kb"
RELAY = Path(__file__).with_name("delay_relay.py")
#: Seconds that the relay adds each way: 20 ms for a question and its answer.
DELAY = 0.01


class Hosts:
    """Sources and a receiver, with a link for each of `mbits` between them, which belong to the sources in turn.

    Each source has a process, or as many as `ranks` says, and the receiver one for each rank.
    """

    def __init__(self, mbits: list[int], mib: int, sources: int = 1, ranks: int = 1) -> None:
        if not shutil.which("ip") or not shutil.which("tc"):
            raise NotPermitted("ip or tc is not installed")
        self.mbits, self.mib, self.step, self.ranks, self.count = mbits, mib, 0, ranks, sources
        self.sources = [f"tr{os.getpid()}s{number}" for number in range(sources)]
        self.receiver = f"tr{os.getpid()}r"
        self._agents: list[subprocess.Popen[str]] = []
        self._relay: subprocess.Popen[str] | None = None

    def owner(self, link: int) -> str:
        """Returns the source at the end of a link."""
        return self.sources[link % self.count]

    def build(self) -> None:
        """Makes the links, and starts the processes."""
        for name in (*self.sources, self.receiver):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for number, mbit in enumerate(self.mbits):
            owner = self.owner(number)
            peer = ("type", "veth", "peer", "name", f"card{number}", "netns", self.receiver)
            run("ip", "-n", owner, "link", "add", f"card{number}", *peer)
            for last, name in ((1, owner), (2, self.receiver)):
                run("ip", "-n", name, "address", "add", f"10.79.{number}.{last}/24", "dev", f"card{number}")
                run("ip", "-n", name, "link", "set", f"card{number}", "up")
                self.shape(name, number, f"{mbit}mbit", BURST)
        for number, name in enumerate(self.sources):
            run("ip", "-n", name, "route", "add", "default", "via", f"10.79.{number}.2")
        for number, name in enumerate(self.sources):
            for _ in range(self.ranks):
                self.start(name, f"10.79.{number}.1")
        for _ in range(self.ranks):
            self.start(self.receiver, "10.79.0.2")

    def start(self, name: str, address: str) -> None:
        """Starts a process in a host."""
        command = ["ip", "netns", "exec", name, sys.executable, str(AGENT), address, str(self.mib)]
        self._agents.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        self.answer(len(self._agents) - 1)

    def shape(self, name: str, link: int, rate: str, burst: str) -> None:
        """Limits what a host sends over a link."""
        limit = ("tbf", "rate", rate, "burst", burst, "latency", "100ms")
        run("tc", "-n", name, "qdisc", "replace", "dev", f"card{link}", "root", *limit)

    def order(self, agent: int, **what: Any) -> None:
        """Tells a process what to do."""
        pipe = self._agents[agent].stdin
        assert pipe is not None
        print(json.dumps(what), file=pipe, flush=True)

    def answer(self, agent: int) -> dict[str, Any]:
        """Returns the answer of a process."""
        pipe = self._agents[agent].stdout
        assert pipe is not None
        return dict(json.loads(pipe.readline() or "{}"))

    def round(
        self, kind: str, cut: int | None = None, late: bool = True, ranks: int = 1, delayed: bool = False
    ) -> float:
        """Returns the seconds until the last of `ranks` receives had ended.

        Link `cut` drops everything from half of the expected time on, or if not `late`, from before the beginning. If
        the last link is `delayed`, every byte takes :data:`DELAY` seconds longer on it, each way.

        Raises:
            RuntimeError: what came is not what was sent
        """
        last = len(self.mbits) - 1
        own = self.own
        server = {"interface": ",".join(own[:last]), "advertise": ",".join(own)} if delayed else {}
        metadata = self.publish(kind, ranks, server)
        if delayed:
            port = metadata[0].split("/")[2].rpartition(":")[2]
            command = ["ip", "netns", "exec", self.sources[0], sys.executable, str(RELAY), own[last], own[0], port]
            self._relay = subprocess.Popen([*command, str(DELAY)], stdout=subprocess.PIPE, text=True)
            assert self._relay.stdout is not None
            self._relay.stdout.readline()
        if cut is not None and not late:
            self.cut(cut)
        seconds = self.receive(kind, metadata, cut if late else None)
        if cut is not None:
            self.mend(cut)
        self.end_relay()
        self.withdraw(ranks)
        return seconds

    def twice(self, link: int) -> tuple[float, float]:
        """Returns the seconds of two receives in a row from one source, while `link` drops everything."""
        metadata = self.publish("rails", 1, {})
        self.cut(link)
        seconds = self.receive("rails", metadata), self.receive("rails", metadata)
        self.mend(link)
        self.withdraw(1)
        return seconds

    @property
    def own(self) -> list[str]:
        """The address of the source at the end of each link."""
        return [f"10.79.{link}.1" for link in range(len(self.mbits))]

    def plainly(self, kind: str) -> dict[str, Any]:
        """Returns what plain sockets have to know in addition."""
        return {"addresses": self.own, "streams": SOCKETS * len(self.own)} if kind == "raw" else {}

    def senders(self, ranks: int) -> list[int]:
        """Returns the processes that send to so many ranks, those of one rank together."""
        return [source * self.ranks + rank for rank in range(ranks) for source in range(self.count)]

    def publish(self, kind: str, ranks: int, server: dict[str, str]) -> list[str]:
        """Has the sources serve the next step; returns the metadata for each of `ranks`."""
        self.step += 1
        senders = self.senders(ranks)
        for agent in senders:
            self.order(agent, do="send", kind=kind, step=self.step, server=server, **self.plainly(kind))
        named = [self.answer(agent)["metadata"] for agent in senders]
        return [" ".join(named[rank * self.count : (rank + 1) * self.count]) for rank in range(ranks)]

    def withdraw(self, ranks: int) -> None:
        """Ends what :meth:`publish` has begun."""
        for agent in self.senders(ranks):
            self.order(agent, do="stop")
            self.answer(agent)

    def receive(self, kind: str, metadata: list[str], cut: int | None = None) -> float:
        """Returns the seconds until the last rank has what its sources serve. Link `cut` goes in the middle.

        Raises:
            RuntimeError: what came is not what was sent
        """
        receivers = [self.count * self.ranks + rank for rank in range(len(metadata))]
        for agent, given in zip(receivers, metadata, strict=True):
            self.order(agent, do="receive", kind=kind, step=self.step, metadata=given, **self.plainly(kind))
        for agent in receivers:
            self.answer(agent)
        begin = time.monotonic() + LEAD
        for agent in receivers:
            self.order(agent, at=begin)
        if cut is not None:
            half = self.mib * 8.388608 / sum(self.mbits) / 2
            time.sleep(max(begin + half - time.monotonic(), 0))
            self.cut(cut)
        answers = [self.answer(agent) for agent in receivers]
        if not all(answer.get("equal") for answer in answers):
            raise RuntimeError(f"{kind}: the state that came is not the one that was sent")
        return max(float(answer["seconds"]) for answer in answers)

    def cut(self, link: int) -> None:
        """Has a link drop everything from its source on."""
        self.shape(self.owner(link), link, "1kbit", "1kb")

    def mend(self, link: int) -> None:
        """Has a link carry again what it can."""
        self.shape(self.owner(link), link, f"{self.mbits[link]}mbit", BURST)

    def end_relay(self) -> None:
        """Ends the relay that delays, if there is one."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate(timeout=PATIENCE_S)
            self._relay = None

    def remove(self) -> None:
        """Ends the processes and removes everything."""
        self.end_relay()
        for agent in self._agents:
            agent.kill()
            agent.communicate(timeout=PATIENCE_S)
        for name in (*self.sources, self.receiver):
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, timeout=PATIENCE_S, check=False)


def show(what: str, kind: str, rates: list[float], carried: float) -> None:
    """Prints the median and the range of `rates`, in Mbit/s, as shares of `carried`."""
    shares = sorted(rate / carried for rate in rates)
    print(
        f"{what:42} {KINDS[kind]:26} {statistics.median(shares):6.2f}  ({shares[0]:.2f}-{shares[-1]:.2f})", flush=True
    )


def measure(hosts: Hosts, rounds: int, kinds: list[str], faults: bool) -> dict[tuple[str, str], list[float]]:
    """Returns rates in Mbit/s by what was done and with what; a receive takes turns with the others."""
    bits, mbits = hosts.mib * 8.388608, hosts.mbits
    rates: dict[tuple[str, str], list[float]] = {}
    from_two = f" from {hosts.count} sources" if hosts.count > 1 else ""
    hosts.round("rails")

    def note(what: str, kind: str, ideal: float, seconds: float) -> None:
        rates.setdefault((what + from_two, kind), []).append(ideal / seconds * sum(mbits))

    for _ in range(rounds):
        whole = bits / sum(mbits)
        for kind in kinds:
            note("all links", kind, whole, hosts.round(kind))
        if hosts.ranks > 1:
            seconds = hosts.round("rails", ranks=hosts.ranks)
            note(f"{hosts.ranks} ranks at a time", "rails", whole * hosts.ranks, seconds)
        if not faults:
            continue
        for link in (0, len(mbits) - 1):
            # Half with all links, half without that one.
            rest = sum(mbits) - mbits[link]
            seconds = hosts.round("rails", cut=link)
            note(f"link {link} goes in the middle", "rails", (whole + bits / rest) / 2, seconds)
        note(f"link {link} drops everything", "rails", bits / rest, hosts.round("rails", cut=link, late=False))
        first, second = hosts.twice(0)
        note("link 0 drops everything", "rails", bits / (sum(mbits) - mbits[0]), first)
        note("the next receive from there", "rails", bits / (sum(mbits) - mbits[0]), second)
        if hosts.count == 1:
            note(f"{DELAY * 1000:.0f} ms each way on link {link}", "rails", whole, hosts.round("rails", delayed=True))
    return rates


def main() -> int:
    """Runs the bench; 0 also where it cannot run, which it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", default="250,250,250,250", help="Mbit/s of each")
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sources", type=int, default=1, help="which have the links in turn")
    parser.add_argument("--ranks", type=int, default=1, help="of each host, that are healed at the same time")
    parser.add_argument("--kinds", default="rails,ours,torchft,raw", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--faults", action="store_true", help="also with links that are cut, dead or slow to answer")
    options = parser.parse_args()
    mbits = [int(mbit) for mbit in options.links.split(",")]
    try:
        hosts = Hosts(mbits, options.mib, options.sources, options.ranks)
    except NotPermitted as reason:
        print(f"SKIPPED: {reason}")
        return 0
    try:
        try:
            hosts.build()
        except NotPermitted as reason:
            print(f"SKIPPED: no network namespaces with shaped links here (root is needed): {reason}")
            return 0
        rates = measure(hosts, options.rounds, options.kinds.split(","), options.faults and len(mbits) > 1)
        print(f"links of {options.links} Mbit/s, {options.mib} MiB: share of what they carry")
        for (what, kind), found in rates.items():
            show(what, kind, found, sum(mbits))
    finally:
        hosts.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
