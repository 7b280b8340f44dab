"""How many copies cross between two zones with one slow link, and come to each host of two receivers.

Hosts are namespaces as in `fleet.py`, and bytes are what the counters of the links say, over what the state has. It
needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from fleet import LEAD, Host, Network, NotPermitted, run


def mate(host: Host) -> Host:
    """Returns one more process on the host of another one, which has not been started yet."""
    other = copy.copy(host)
    other.process = None
    return other


def counter(namespace: str, device: str, direction: str) -> int:
    """Returns the bytes that a link has sent (`tx`) or received (`rx`)."""
    command = ("ip", "-n", namespace, "-s", "-j", "link", "show", device)
    shown = subprocess.run(command, capture_output=True, check=True, timeout=10)
    return int(json.loads(shown.stdout)[0]["stats64"][direction]["bytes"])


class Zones(Network):
    """Two switches with a link of its own speed between them; hosts with even numbers are at the first one."""

    #: What `TENSORFERRY_ZONE` says at each switch.
    names = ("a", "b")

    def __init__(self, mbit: int, border: int | None) -> None:
        super().__init__(mbit)
        self.border = border
        self.switches = [f"{self.prefix}s{letter}" for letter in ("ab" if border else "a")]

    def build(self, hosts: int, mib: int, mates: int = 1) -> None:
        """Makes the switches and so many hosts, each with `mates` receivers; the source is on the first one."""
        for switch in self.switches:
            self.add(switch)
            run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "switch", "up")
        if self.border:
            first, second = self.switches
            run(*f"ip -n {first} link add border type veth peer name border netns {second}".split())
            for switch in self.switches:
                run(*f"ip -n {switch} link set border master switch up".split())
                shape = f"tbf rate {self.border}mbit burst 64kb latency 100ms"
                run(*f"tc -n {switch} qdisc add dev border root {shape}".split())
        for number in range(hosts):
            zone = number % len(self.switches)
            self.switch = self.switches[zone]
            host = Host(self, number)
            count = mates if number else 1
            for one in (host, *(mate(host) for _ in range(count - 1))):
                os.environ["TENSORFERRY_ZONE"] = self.names[zone]
                one.start(mib)
                self.hosts.append(one)
        for one in self.hosts:
            one.answer()


class Unzoned(Zones):
    """The same, without a word of it to the processes."""

    names = ("", "")


def measure(network: Zones, links: list[tuple[str, str, str]]) -> list[int]:
    """Lets all hosts but the first receive from it at once; returns by how much the counter of each link has grown."""
    source, *receivers = network.hosts
    source.order(do="send", kind="relay", step=1)
    metadata = source.answer()["metadata"]
    for host in receivers:
        host.order(do="receive", kind="relay", step=1, metadata=metadata)
    for host in receivers:
        host.answer()
    before, at = [counter(*link) for link in links], time.monotonic() + LEAD
    for host in receivers:
        host.order(at=at)
    answers = [host.answer() for host in receivers]
    after = [counter(*link) for link in links]
    good = sum(answer["equal"] for answer in answers)
    longest = max(answer["seconds"] for answer in answers)
    print(f"  {good} of {len(receivers)} have the right state, the last one after {longest:.1f} s", flush=True)
    return [later - earlier for earlier, later in zip(before, after, strict=True)]


def main() -> int:
    """Runs the scenarios; 0 also where they cannot run, which it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, default=100, help="speed of each host's link, each way")
    parser.add_argument("--border", type=int, default=50, help="speed of the link between the zones")
    parser.add_argument("--mib", type=int, default=64, help="size of the state")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    options = parser.parse_args()
    size, figures = options.mib << 20, dict[str, dict[str, float]]()
    cases = [
        ("2 zones, 8 receivers", Zones, options.border, 9, 1),
        ("the same, not told of zones", Unzoned, options.border, 9, 1),
        ("4 hosts, 2 receivers each", Unzoned, None, 5, 2),
    ]
    for name, kind, border, hosts, mates in cases:
        try:
            network = kind(options.mbit, border)
        except NotPermitted as reason:
            print(f"SKIPPED: {reason}")
            return 0
        try:
            network.build(hosts, options.mib, mates)
            print(name)
            links = {"there": (network.switches[0], "border", "tx"), "back": (network.switches[0], "border", "rx")}
            if not border:
                links = {"sent": (network.hosts[0].name, "uplink", "tx")}
                names = sorted({host.name for host in network.hosts[1:]})
                links |= {f"host {number}": (name, "uplink", "rx") for number, name in enumerate(names, 1)}
            grown = measure(network, [*links.values()])
            figures[name] = {what: count / size for what, count in zip(links, grown, strict=True)}
            print(
                "  copies: " + ", ".join(f"{what} {copies:.2f}" for what, copies in figures[name].items()), flush=True
            )
        except NotPermitted as reason:
            print(f"SKIPPED: no network namespaces with shaped links here (root is needed): {reason}")
            return 0
        finally:
            network.remove()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
