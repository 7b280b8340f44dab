"""How much of a long, fast link between two hosts a receive in place uses, over lanes.

Each host is a network namespace of this machine, and a relay (`long_link.c`) carries the packets between them: half of
the delay later, each way, and no faster than the rate. Buffers are as the kernel chooses. Lanes and builds take turns;
shares are of the link's rate. It needs root, `ip` and a C compiler.

    python benches/long_link.py --mbit 1000 --delay 40 --lanes 2,4,8,16,0
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
from scale import AGAINST, SOCKETS, Pair

RELAY = Path(__file__).with_suffix(".c")
_ADDRESSES = ("10.81.0.1", "10.81.0.2")


class LongLink:
    """Two namespaces and the relay between them."""

    def __init__(self, mbit: float, delay_ms: float, queue_ms: float, congestion: str | None) -> None:
        self.names = tuple(f"tl{os.getpid()}{end}" for end in "sr")
        for name in self.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
            if congestion:
                command = ["sysctl", "-q", f"net.ipv4.tcp_congestion_control={congestion}"]
                subprocess.run(["ip", "netns", "exec", name, *command], check=True)
        self._folder = tempfile.TemporaryDirectory()
        relay = str(Path(self._folder.name) / "long_link")
        subprocess.run(["cc", "-O2", "-pthread", "-o", relay, str(RELAY)], check=True)
        ends = [word for end in zip(self.names, _ADDRESSES, strict=True) for word in end]
        shape = [str(number) for number in (mbit * 1e6, delay_ms / 2, queue_ms)]
        self._relay = subprocess.Popen([relay, *ends, *shape], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._relay.stdout is not None
        if not self._relay.stdout.readline():
            raise RuntimeError("the relay does not run")

    def end(self) -> None:
        """End the relay, and remove the namespaces."""
        assert self._relay.stdin is not None
        self._relay.stdin.close()
        self._relay.wait(10)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=True)
        self._folder.cleanup()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the samples of all rounds over one link."""
    link = LongLink(options.mbit, options.delay, options.queue, options.congestion)
    pairs: dict[str, Pair] = {}
    samples = []
    try:
        builds = {"": sys.executable} | dict(options.against)
        names = (link.names[0], link.names[1])
        pairs = {name: Pair(python, options.mib, names) for name, python in builds.items()}
        for pair in pairs.values():
            pair.open([], raw=False, address=_ADDRESSES[0])
        turns = [(name, lanes) for lanes in options.lanes for name in pairs]
        for number in range(options.rounds):
            for name, lanes in turns[number % len(turns) :] + turns[: number % len(turns)]:
                found = pairs[name].run(SOCKETS, lanes, 1)
                begin, end = found["windows"][0]
                who = {"round": number, "build": name, "asked": lanes, "lanes": found["lanes"]}
                share = (options.mib << 23) / ((end - begin) / 1e9) / (options.mbit * 1e6)
                samples.append({**who, "seconds": (end - begin) / 1e9, "share": share})
    finally:
        for pair in pairs.values():
            pair.end()
        link.end()
    return samples


def table(options: argparse.Namespace, samples: list[dict[str, Any]]) -> str:
    """Return the results as a table in Markdown."""
    lines = [
        f"{options.mbit:g} Mbit/s, {options.delay:g} ms there and back, {options.mib} MiB in place, "
        f"{options.congestion or 'the default congestion control'}; {options.rounds} rounds, medians (lowest-highest)",
        "",
        "| lanes | seconds | share of the link |",
        "|---|---|---|",
    ]
    for asked, build in dict.fromkeys((sample["asked"], sample["build"]) for sample in samples):
        own = [sample for sample in samples if (sample["asked"], sample["build"]) == (asked, build)]
        cells = [f"{own[0]['lanes']}{'' if asked else ' (chosen)'}{build and f' ({build})'}"]
        for what in ("seconds", "share"):
            values = [sample[what] for sample in own]
            cells.append(f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--delay", type=float, default=40, help="ms there and back")
    parser.add_argument("--queue", type=float, default=50, help="ms that a packet may wait to leave")
    parser.add_argument("--congestion", help="such as cubic; the system's default without it")
    parser.add_argument("--lanes", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4, 8, 16, 0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", **AGAINST)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    samples = measure(options)
    print(table(options, samples))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        shape = {name: getattr(options, name) for name in ("mbit", "delay", "queue", "congestion", "mib")}
        options.json.write_text(json.dumps({"machine": machine.facts(), "link": shape, "samples": samples}, indent=1))


if __name__ == "__main__":
    main()
