"""How long several receivers of one source take on equal links: torchft's transport, ours without relays, and ours.

Each host is a network namespace of this machine with a link of its own to one switch; `tc` limits both directions.
Times are in copies: what one receiver alone takes for the state. `sent` is what the counter of the source's link says,
also in copies. The three transports take turns within a scenario. It needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleet_model import compare

AGENT = Path(__file__).with_name("fleet_host.py")
KINDS = {"torchft": "torchft's HTTPTransport", "ours": "tensorferry, relay=False", "relay": "tensorferry"}
SCENARIOS = ("alone", "at-once", "apart", "killed", "in-place", "source-dies", "source-leaves", "source-goes-early")
#: Seconds from the order to its beginning, for all hosts to have read it.
LEAD = 0.3
PATIENCE_S = 60
#: From how many Mbit/s on a link counts as fast.
FAST_MBIT = 250


class NotPermitted(Exception):
    """The machine does not permit network namespaces or shaped links."""


@dataclass
class Result:
    """One round of one scenario with one transport.

    Attributes:
        scenario: what was done
        kind: the transport
        receivers: how many began
        finished: how many of those that were left alone have the right state
        last: copies until the last of them had ended, from its own beginning
        mean: the same on average
        sent: copies that left the source
        freed: copies until the source had its state back, from the beginning of the first; 0 where it was not asked to
    """

    scenario: str
    kind: str
    receivers: int
    finished: int
    last: float
    mean: float
    sent: float
    freed: float = 0.0


def run(*command: str) -> None:
    """Runs a command that sets up the network.

    Raises:
        NotPermitted: it failed
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise NotPermitted(f"{' '.join(command)}: {done.stderr.strip()}")


class Host:
    """A namespace with one link to the switch, and the process in it."""

    def __init__(self, network: Network, number: int) -> None:
        self.name, self.address = f"{network.prefix}h{number}", f"10.78.0.{number + 1}"
        self.agent = network.agent
        self.process: subprocess.Popen[str] | None = None
        port = self._port = f"p{number}"
        self._switch = network.switch
        network.add(self.name)
        run(
            "ip",
            "-n",
            self.name,
            "link",
            "add",
            "uplink",
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            network.switch,
        )
        run("ip", "-n", self.name, "address", "add", f"{self.address}/24", "dev", "uplink")
        run("ip", "-n", self.name, "link", "set", "uplink", "up")
        run("ip", "-n", network.switch, "link", "set", port, "master", "switch", "up")
        self.shape(network.mbit)

    def shape(self, mbit: int) -> None:
        """Limits both directions of the link."""
        # On a fast link a whole buffer of the kernel goes through at once: to cut each into frames costs a core.
        burst = "64kb" if mbit < FAST_MBIT else "128kb"
        shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", burst, "latency", "100ms")
        run("tc", "-n", self.name, "qdisc", "replace", "dev", "uplink", *shape)
        run("tc", "-n", self._switch, "qdisc", "replace", "dev", self._port, *shape)

    def start(self, mib: int) -> None:
        """Starts the host's process."""
        command = ["ip", "netns", "exec", self.name, sys.executable, str(self.agent), self.address, str(mib)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def order(self, **what: Any) -> None:
        """Tells the process what to do."""
        assert self.process is not None
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Returns the next answer; one that says nothing if the process is gone."""
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def sent(self) -> int:
        """Returns the bytes that have left over the link."""
        shown = subprocess.run(
            ("ip", "-n", self.name, "-s", "-j", "link", "show", "uplink"), capture_output=True, check=True, timeout=10
        )
        return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])

    def end(self, how: int = signal.SIGKILL) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.communicate(timeout=PATIENCE_S)
            self.process = None


class Network:
    """A switch, and hosts at it, each of which runs the program `agent`."""

    def __init__(self, mbit: int, agent: Path = AGENT) -> None:
        if not shutil.which("ip") or not shutil.which("tc"):
            raise NotPermitted("ip or tc is not installed")
        self.prefix, self.mbit, self.agent = f"tf{os.getpid()}", mbit, agent
        self.switch = f"{self.prefix}sw"
        self.hosts: list[Host] = []
        self._made: list[str] = []

    def add(self, namespace: str) -> None:
        """Makes a namespace."""
        run("ip", "netns", "add", namespace)
        self._made.append(namespace)
        run("ip", "-n", namespace, "link", "set", "lo", "up")

    def build(self, hosts: int, mib: int) -> None:
        """Makes the switch and so many hosts, and starts their processes."""
        self.add(self.switch)
        run("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "switch", "up")
        self.hosts = [Host(self, number) for number in range(hosts)]
        for host in self.hosts:
            host.start(mib)
        for host in self.hosts:
            host.answer()

    def remove(self) -> None:
        """Ends the processes and removes everything."""
        for host in self.hosts:
            host.end()
        for namespace in self._made:
            subprocess.run(("ip", "netns", "delete", namespace), capture_output=True, timeout=PATIENCE_S, check=False)


class Bench:
    """Scenarios on one network."""

    def __init__(self, network: Network, mib: int) -> None:
        self.source, *self.receivers = network.hosts
        self.mib = mib
        self.step = 0
        self.copy_s = self.copy_bytes = 0.0
        self.results: list[Result] = []

    def round(
        self,
        scenario: str,
        kind: str,
        count: int,
        apart: float = 0.0,
        killed: int = 0,
        in_place: bool = False,
        withdraws: float = 0.0,
        dies: float = 0.0,
    ) -> tuple[float, float]:
        """Lets `count` receivers begin, each `apart` copies after the one before; kills some after half a copy.

        Args:
            scenario: what the row is called
            kind: the transport
            count: how many receive
            apart: copies between their beginnings
            killed: how many are killed
            in_place: they receive into a live state
            withdraws: copies after which the source takes its state back, and is killed as soon as it has it
            dies: copies after which the source is killed

        Returns:
            The longest of their times in seconds, and the bytes that have left the source.
        """
        self.step += 1
        self.source.order(do="send", kind=kind, step=self.step)
        metadata = self.source.answer()["metadata"]
        receivers = self.receivers[:count]
        for host in receivers:
            host.order(do="receive", kind=kind, step=self.step, metadata=metadata, in_place=in_place)
        for host in receivers:
            host.answer()
        begin, sent = time.monotonic() + LEAD, self.source.sent()
        for number, host in enumerate(receivers):
            host.order(at=begin + number * apart * self.copy_s)
        dying = receivers[:killed]
        if killed:
            time.sleep(max(begin + self.copy_s / 2 - time.monotonic(), 0))
            for host in dying:
                host.end()
        freed = 0.0
        if withdraws or dies:
            time.sleep(max(begin + (withdraws or dies) * self.copy_s - time.monotonic(), 0))
            if withdraws:
                self.source.order(do="stop")
                self.source.answer()
                freed = (time.monotonic() - begin) / self.copy_s
            self.source.end()
        answers = [host.answer() for host in receivers if host not in dying]
        took = [answer["seconds"] for answer in answers]
        good = sum(answer["equal"] for answer in answers)
        if self.source.process is None:
            self.source.start(self.mib)
        else:
            self.source.order(do="stop")
        self.source.answer()
        sent = self.source.sent() - sent
        if self.copy_s:
            in_copies = [seconds / self.copy_s for seconds in took]
            mean = statistics.mean(in_copies)
            result = Result(scenario, kind, count, good, max(in_copies), mean, sent / self.copy_bytes, freed)
            self.results.append(result)
            row = f"{result.finished} of {count - killed}"
            print(
                f"{scenario:34} {KINDS[kind]:26} {row:>8} {result.last:8.2f} {mean:8.2f} {result.sent:8.2f}"
                + (f"   free after {freed:.2f}" if freed else ""),
                flush=True,
            )
        for host in dying:
            host.start(self.mib)
        for host in dying:
            host.answer()
        return max(took), sent

    def all(self, counts: list[int], kinds: list[str], rounds: int, scenarios: list[str]) -> None:
        """Runs the scenarios."""
        # The first connection of a process loads code.
        for kind in kinds:
            self.round("warm-up", kind, 1)
        self.copy_s, self.copy_bytes = map(
            min, zip(*(self.round("one copy", "ours", 1) for _ in range(2)), strict=True)
        )
        print(f"one copy takes {self.copy_s:.2f} s, and {self.copy_bytes / 1e6:.1f} MB on the link")
        print(f"{'scenario':34} {'transport':26} {'right':>8} {'last':>8} {'mean':>8} {'sent':>8}")
        for _ in range(rounds):
            for scenario in scenarios:
                for kind in kinds:
                    self.one(scenario, kind, counts)

    def one(self, scenario: str, kind: str, counts: list[int]) -> None:
        """Runs one scenario with one transport."""
        most = counts[-1]
        if scenario == "alone":
            self.round("1 receiver", kind, 1)
        elif scenario == "at-once":
            for count in counts:
                self.round(f"{count} receivers at once", kind, count)
        elif scenario == "apart":
            self.round(f"{most} receivers, 0.3 copies apart", kind, most, apart=0.3)
        elif scenario == "killed":
            self.round(f"{most} receivers, 2 killed at half", kind, most, killed=min(2, most - 1))
        elif scenario == "in-place" and kind != "torchft":
            self.round(f"{most} receivers, in place", kind, most, in_place=True)
        elif scenario == "source-dies":
            self.round(f"{most} receivers, source dies at 1.6", kind, most, dies=1.6)
        elif scenario == "source-leaves":
            self.round(f"{most} receivers, source leaves at 1.6", kind, most, withdraws=1.6)
        elif scenario == "source-goes-early" and kind == "relay":
            self.round(f"{most} receivers, source leaves at 0.5", kind, most, withdraws=0.5)


def main() -> int:
    """Runs the bench; 0 also where it cannot run, which it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, default=100, help="speed of each link, each way")
    parser.add_argument("--mib", type=int, default=128, help="size of the state")
    parser.add_argument("--receivers", default="2,4,8", help="how many, ascending")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which transports")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="which")
    parser.add_argument(
        "--model", action="store_true", help="only receivers at once, beside what the simulator says; 1 if they differ"
    )
    parser.add_argument("--json", type=Path, help="also write all figures here")
    options = parser.parse_args()
    if options.model:
        options.kinds, options.scenarios = "relay", "at-once"
    counts = [int(count) for count in options.receivers.split(",")]
    try:
        network = Network(options.mbit)
    except NotPermitted as reason:
        print(f"SKIPPED: {reason}")
        return 0
    try:
        try:
            network.build(counts[-1] + 1, options.mib)
        except NotPermitted as reason:
            print(f"SKIPPED: no network namespaces with shaped links here (root is needed): {reason}")
            return 0
        bench = Bench(network, options.mib)
        bench.all(counts, options.kinds.split(","), options.rounds, options.scenarios.split(","))
    finally:
        network.remove()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        about = {"mbit": options.mbit, "mib": options.mib, "copy_s": bench.copy_s, "copy_bytes": bench.copy_bytes}
        options.json.write_text(json.dumps(about | {"rounds": [asdict(one) for one in bench.results]}, indent=1) + "\n")
    if options.model:
        return 0 if compare(options.mbit, options.mib, bench.results) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
