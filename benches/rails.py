"""How much of several links between two hosts a receive uses, with all of them, and with one that goes in the middle.

Each host is a network namespace of this machine; `tc` limits each link both ways. The kinds take turns: tensorferry
over all links, tensorferry over one (`advertise=` with one address), and torchft's transport, which knows one. Shares
are of what all links together carry as frames, of which 0.956 is payload. It needs root, `ip` and `tc`.
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
KINDS = {"rails": "tensorferry, every link", "ours": "tensorferry, one link", "torchft": "torchft's HTTPTransport"}
LEAD = 0.3


class Hosts:
    """A source and a receiver with a link for each of `mbits` between them."""

    def __init__(self, mbits: list[int], mib: int) -> None:
        if not shutil.which("ip") or not shutil.which("tc"):
            raise NotPermitted("ip or tc is not installed")
        self.mbits, self.mib, self.step = mbits, mib, 0
        self.names = [f"tr{os.getpid()}{end}" for end in ("s", "r")]
        self._agents: list[subprocess.Popen[str]] = []

    def build(self) -> None:
        """Makes the links, and starts the processes."""
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for number, mbit in enumerate(self.mbits):
            peer = ("type", "veth", "peer", "name", f"card{number}", "netns", self.names[1])
            run("ip", "-n", self.names[0], "link", "add", f"card{number}", *peer)
            for last, name in enumerate(self.names, start=1):
                run("ip", "-n", name, "address", "add", f"10.79.{number}.{last}/24", "dev", f"card{number}")
                run("ip", "-n", name, "link", "set", f"card{number}", "up")
                self.shape(name, number, f"{mbit}mbit", "64kb")
        for name, gateway in zip(self.names, (2, 1), strict=True):
            run("ip", "-n", name, "route", "add", "default", "via", f"10.79.0.{gateway}")
        for last, name in enumerate(self.names, start=1):
            command = ["ip", "netns", "exec", name, sys.executable, str(AGENT), f"10.79.0.{last}", str(self.mib)]
            agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._agents.append(agent)
            self.answer(last - 1)

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

    def round(self, kind: str, cut: int | None = None) -> float:
        """Returns the seconds of one receive; half of the expected time after its beginning, link `cut` goes.

        Raises:
            RuntimeError: what came is not what was sent
        """
        self.step += 1
        self.order(0, do="send", kind=kind, step=self.step)
        metadata, begin = self.answer(0)["metadata"], time.monotonic() + LEAD
        self.order(1, do="receive", kind=kind, step=self.step, metadata=metadata, at=begin)
        if cut is not None:
            half = self.mib * 8.388608 / sum(self.mbits) / 2
            time.sleep(max(begin + half - time.monotonic(), 0))
            self.shape(self.names[0], cut, "1kbit", "1kb")
        answer = self.answer(1)
        if cut is not None:
            self.shape(self.names[0], cut, f"{self.mbits[cut]}mbit", "64kb")
        self.order(0, do="stop")
        self.answer(0)
        if not answer.get("equal"):
            raise RuntimeError(f"{kind}: the state that came is not the one that was sent")
        return float(answer["seconds"])

    def remove(self) -> None:
        """Ends the processes and removes everything."""
        for agent in self._agents:
            agent.kill()
            agent.communicate(timeout=PATIENCE_S)
        for name in self.names:
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, timeout=PATIENCE_S, check=False)


def show(what: str, kind: str, rates: list[float], carried: float) -> None:
    """Prints the median and the range of `rates`, in Mbit/s, as shares of `carried`."""
    shares = sorted(rate / carried for rate in rates)
    print(
        f"{what:28} {KINDS[kind]:26} {statistics.median(shares):6.2f}  ({shares[0]:.2f}-{shares[-1]:.2f})", flush=True
    )


def main() -> int:
    """Runs the bench; 0 also where it cannot run, which it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", default="250,250,250,250", help="Mbit/s of each")
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    mbits = [int(mbit) for mbit in options.links.split(",")]
    try:
        hosts = Hosts(mbits, options.mib)
    except NotPermitted as reason:
        print(f"SKIPPED: {reason}")
        return 0
    try:
        try:
            hosts.build()
        except NotPermitted as reason:
            print(f"SKIPPED: no network namespaces with shaped links here (root is needed): {reason}")
            return 0
        bits = options.mib * 8.388608
        rates: dict[tuple[str, str], list[float]] = {}
        hosts.round("rails")
        for _ in range(options.rounds):
            for kind in KINDS:
                rates.setdefault(("all links", kind), []).append(bits / hosts.round(kind))
            if len(mbits) > 1:
                for link in (0, len(mbits) - 1):
                    # Half with all links, half without that one.
                    ideal = (bits / sum(mbits) + bits / (sum(mbits) - mbits[link])) / 2
                    seconds = hosts.round("rails", cut=link)
                    rates.setdefault((f"link {link} goes in the middle", "rails"), []).append(
                        ideal / seconds * sum(mbits)
                    )
        print(f"links of {options.links} Mbit/s, {options.mib} MiB: share of what they carry")
        for (what, kind), found in rates.items():
            show(what, kind, found, sum(mbits))
    finally:
        hosts.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
