"""How many copies come to each host of two receivers, and leave the source.

Hosts are namespaces as in `fleet.py`, and bytes are what the counters of the links say, over what the state has. It
needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import copy
import json
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


class Mates(Network):
    """Hosts at one switch, each with several receivers."""

    def build(self, hosts: int, mib: int, mates: int) -> None:
        """Makes the switch and so many hosts, each with `mates` receivers; the source is on the first one."""
        self.add(self.switch)
        run("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "switch", "up")
        for number in range(hosts):
            host = Host(self, number)
            count = mates if number else 1
            for one in (host, *(mate(host) for _ in range(count - 1))):
                one.start(mib)
                self.hosts.append(one)
        for one in self.hosts:
            one.answer()


def measure(network: Mates, links: list[tuple[str, str, str]]) -> list[int]:
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
    """Runs 4 hosts of 2 receivers each; 0 also where that cannot be, which it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, default=100, help="speed of each host's link, each way")
    parser.add_argument("--mib", type=int, default=64, help="size of the state")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    options = parser.parse_args()
    try:
        network = Mates(options.mbit)
    except NotPermitted as reason:
        print(f"SKIPPED: {reason}")
        return 0
    try:
        network.build(5, options.mib, 2)
        names = sorted({host.name for host in network.hosts[1:]})
        links = {"sent": (network.hosts[0].name, "uplink", "tx")}
        links |= {f"host {number}": (name, "uplink", "rx") for number, name in enumerate(names, 1)}
        grown = measure(network, [*links.values()])
    except NotPermitted as reason:
        print(f"SKIPPED: no network namespaces with shaped links here (root is needed): {reason}")
        return 0
    finally:
        network.remove()
    figures = {what: count / (options.mib << 20) for what, count in zip(links, grown, strict=True)}
    print("  copies: " + ", ".join(f"{what} {copies:.2f}" for what, copies in figures.items()), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
