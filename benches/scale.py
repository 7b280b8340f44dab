"""How a receive in place grows with its lanes, through sockets and through shared memory, beside as many raw sockets.

Source and receiver are processes of their own. All kinds take turns in each round, so that other work on the machine
meets all of them; a ratio is of two figures of one round. The CPU time and the context switches are those of all
threads of either process. `--against` adds another build of the package to the turns.

    python benches/scale.py --lanes 1,2,4 --mib 512 --rounds 5 --json build/bench/scale.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine

HOST = Path(__file__).with_name("scale_host.py")
RAW, SOCKETS, SHARED = "raw sockets", "sockets", "shared memory"
#: What a process may take to answer an order.
_ANSWER_S = 300
#: The option that adds other builds.
AGAINST: dict[str, Any] = {
    "action": "append",
    "default": [],
    "type": lambda text: tuple(text.split("=", 1)),
    "metavar": "NAME=PYTHON",
    "help": "another build, by the interpreter of the environment that it is installed in",
}
_STEP = 1
_LOOP_S = 0.5


class Pair:
    """A source and a receiver that run one build of the package."""

    def __init__(self, python: str, mib: int, namespaces: tuple[str, str] | None = None) -> None:
        # With PYTHONPATH, a build could find the package of another one.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        inside = [["ip", "netns", "exec", name] for name in namespaces] if namespaces else [[], []]
        self._hosts = [subprocess.Popen([*prefix, python, str(HOST), str(mib)], **pipes) for prefix in inside]

    def bind(self, *cores: set[int]) -> None:
        """Give either process, with all its threads, cores of its own."""
        for host, own in zip(self._hosts, cores, strict=True):
            for thread in os.listdir(f"/proc/{host.pid}/task"):
                os.sched_setaffinity(int(thread), own)

    def ask(self, end: int, order: str, **arguments: Any) -> Any:
        """Give the source (0) or the receiver (1) an order; return the answer.

        Raises:
            RuntimeError: it has ended instead
        """
        host = self._hosts[end]
        assert host.stdin is not None
        assert host.stdout is not None
        print(json.dumps({"order": order, **arguments}), file=host.stdin, flush=True)
        line = host.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with {host.wait(_ANSWER_S)} at {order}")
        return json.loads(line)

    def open(self, lanes: list[int], *, raw: bool, address: str = "127.0.0.1") -> None:
        """Serve at `address`, and connect the raw sockets where this pair has them."""
        self.metadata = self.ask(0, "send", step=_STEP, address=address)
        self.ask(1, "ready")
        if raw:
            port = self.ask(0, "raw_listen")
            for count in filter(None, lanes):
                self.ask(0, "raw_serve", lanes=count)
                self.ask(1, "raw_connect", port=port, lanes=count)

    def run(self, kind: str, lanes: int, repeats: int) -> dict[str, Any]:
        """Receive; return the windows of time, what either side has spent, and the number of lanes."""
        before = self.ask(0, "spent")
        if kind == RAW:
            found = self.ask(1, "raw_receive", lanes=lanes, repeats=repeats)
        else:
            options = {"metadata": self.metadata, "step": _STEP, "lanes": lanes, "same_host": kind == SHARED}
            found = self.ask(1, "receive", **options, repeats=repeats)
        after = self.ask(0, "spent")
        found["source"] = [a - b for a, b in zip(after, before, strict=True)]
        found["receiver"] = found.pop("spent")
        return dict(found)

    def end(self) -> None:
        """End both processes."""
        for host in self._hosts:
            assert host.stdin is not None
            host.stdin.close()
        for host in self._hosts:
            try:
                host.wait(20)
            except subprocess.TimeoutExpired:
                host.kill()
                host.wait()


class Scale:
    """All rounds, and what they have found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.builds = {"": sys.executable} | dict(options.against)
        self.samples: list[dict[str, Any]] = []
        self.loop: list[dict[str, Any]] = []

    def measure(self) -> None:
        """Run everything."""
        pairs = {name: Pair(python, self.options.mib) for name, python in self.builds.items()}
        try:
            for name, pair in pairs.items():
                pair.open(self.options.lanes, raw=not name)
            self._rounds(pairs)
            if self.options.loop:
                self._beside_the_loop(pairs)
        finally:
            for pair in pairs.values():
                pair.end()

    def _rounds(self, pairs: dict[str, Pair]) -> None:
        turns = [(RAW, ""), *((kind, name) for kind in self.options.kinds for name in pairs)]
        for number in range(-1, self.options.rounds):
            order = turns[number % len(turns) :] + turns[: number % len(turns)]
            for lanes in self.options.lanes:
                for kind, name in order:
                    if kind == RAW and not lanes:
                        continue
                    found = pairs[name].run(kind, lanes, self.options.repeats)
                    if number < 0:  # the first round takes memory and starts threads
                        if kind != RAW and not pairs[name].ask(1, "is_equal"):
                            raise RuntimeError(f"{kind} over {lanes} lanes brought wrong bytes")
                        continue
                    self.samples.append(
                        self._sample(found) | {"round": number, "kind": kind, "build": name, "asked": lanes}
                    )

    def _sample(self, found: dict[str, Any]) -> dict[str, Any]:
        gib = self.options.mib / 1024 * self.options.repeats
        seconds = statistics.median(end - begin for begin, end in found["windows"]) / 1e9
        sample = {"lanes": found["lanes"], "GB/s": (self.options.mib << 20) / seconds / 1e9}
        for side in ("source", "receiver"):
            user, system, switches = found[side]
            sample |= {
                f"{side} user": user * 1e3 / gib,
                f"{side} system": system * 1e3 / gib,
                f"{side} switches": switches / gib,
            }
        return sample | {"cpu": sum(sum(found[side][:2]) for side in ("source", "receiver")) * 1e3 / gib}

    def _beside_the_loop(self, pairs: dict[str, Pair]) -> None:
        """The source's main loop, first beside a receiver on the same cores, then with half of the cores for either."""
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        for name, pair in pairs.items():
            pair.ask(0, "loop_begin", seconds=_LOOP_S)
            for split in (False, True) if half else (False,):
                if split:
                    pair.bind(set(cores[:half]), set(cores[half:]))
                for number in range(self.options.rounds):
                    for lanes in self.options.lanes:
                        for kind in (RAW, *self.options.kinds) if lanes and not name else self.options.kinds:
                            alone = pair.ask(0, "loop_alone", seconds=_LOOP_S)
                            found = pair.run(kind, lanes, self.options.repeats)
                            rate = pair.ask(0, "loop_during", windows=found["windows"])
                            who = {"round": number, "kind": kind, "build": name, "asked": lanes}
                            found = self._sample(found) | {"rate": rate / alone if alone else 0.0, "split": split}
                            self.loop.append(found | who)

    def results(self) -> dict[str, Any]:
        """Return everything as plain data."""
        options = {"mib": self.options.mib, "rounds": self.options.rounds, "repeats": self.options.repeats}
        return {"machine": machine.facts(), "options": options, "samples": self.samples, "loop": self.loop}


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _of(samples: list[dict[str, Any]], what: str, floor: list[dict[str, Any]]) -> str:
    """How `what` compares with that of the raw sockets of the same round."""
    known = {sample["round"]: sample[what] for sample in floor}
    ratios = [sample[what] / known[sample["round"]] for sample in samples if sample["round"] in known]
    return _spread(ratios) if ratios else "-"


def table(results: dict[str, Any]) -> str:
    """Return the results as tables in Markdown."""
    facts, options, samples = results["machine"], results["options"], results["samples"]
    lines = [
        f"{facts['cores']} cores ({facts['cpu']}), kernel {facts['kernel']}; {options['mib']} MiB in place, "
        f"{options['rounds']} rounds of {options['repeats']}; medians (lowest-highest); CPU time in ms and context "
        "switches for a GiB",
        "",
        "| lanes | kind | GB/s | of raw | source, user + system | receiver | CPU of both | of raw | source switches "
        "| receiver |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((sample["asked"], sample["kind"], sample["build"]) for sample in samples)
    for asked, kind, build in sorted(keys, key=lambda key: (key[0], *key[1:])):
        own = [s for s in samples if (s["asked"], s["kind"], s["build"]) == (asked, kind, build)]
        # What the package chooses is compared with as many raw sockets, if some were run.
        floor = [s for s in samples if s["kind"] == RAW and s["lanes"] == own[0]["lanes"]]

        def middle(what: str, own: list[dict[str, Any]] = own) -> str:
            return f"{statistics.median(sample[what] for sample in own):.0f}"

        cells = [
            str(own[0]["lanes"]) if asked else f"{own[0]['lanes']} (chosen)",
            " ".join(filter(None, (kind, build and f"({build})"))),
            _spread([sample["GB/s"] for sample in own]),
            "" if kind == RAW else _of(own, "GB/s", floor),
            f"{middle('source user')} + {middle('source system')}",
            f"{middle('receiver user')} + {middle('receiver system')}",
            middle("cpu"),
            "" if kind == RAW else _of(own, "cpu", floor),
            middle("source switches"),
            middle("receiver switches"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if results["loop"]:
        lines += [
            "",
            "The source's main loop meanwhile, as a share of its rate alone; cores shared with the receiver, or half "
            "of them for either process:",
            "",
            "| lanes | kind | shared | GB/s | halves | GB/s |",
            "|---|---|---|---|---|---|",
        ]
        for asked, kind, build in dict.fromkeys((s["asked"], s["kind"], s["build"]) for s in results["loop"]):
            cells = [str(asked or "chosen"), " ".join(filter(None, (kind, build and f"({build})")))]
            for split in (False, True):
                own = [
                    s for s in results["loop"]
                    if (s["asked"], s["kind"], s["build"], s["split"]) == (asked, kind, build, split)
                ]  # fmt: skip
                cells += [_spread([s[what] for s in own]) if own else "-" for what in ("rate", "GB/s")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _lanes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure and print."""
    cores = len(os.sched_getaffinity(0))
    usual = [count for count in (1, 2, 4, 8, 16) if count <= max(4, cores)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--lanes", type=_lanes, default=[*usual, 0], help="such as 1,2,4; 0 is what the package chooses"
    )
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=[SOCKETS, SHARED], help="beside raw sockets"
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="receives one after the other in each turn")
    parser.add_argument("--against", **AGAINST)
    parser.add_argument("--loop", action=argparse.BooleanOptionalAction, default=True, help="the source's main loop")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    scale = Scale(options)
    scale.measure()
    results = scale.results()
    print(table(results))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
