"""What a heal costs each healthy replica, and how long it takes, when all of them send and when only one does.

Each replica is a network namespace of this machine with a link of its own to one switch. The replicas do what
tensorferry's Manager does with torchft's answer to a quorum; the other side of the comparison is torchft's
assignment: one source. The two take turns. Bytes are in copies: what leaves the one source. It needs root, `ip` and
`tc`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleet import LEAD, Host, Network, NotPermitted

AGENT = Path(__file__).with_name("replicas_host.py")


@dataclass
class Heal:
    """One heal.

    Attributes:
        healthy: how many healthy replicas there are
        everybody: whether all of them send, or the assigned one alone
        killed: whether the assigned one was killed, when about half of its share had left it
        right: whether the state that came is the right one
        seconds: how long it took, from the quorum on
        sent: bytes that have left each healthy replica's link
    """

    healthy: int
    everybody: bool
    killed: bool
    right: bool
    seconds: float
    sent: list[int]


class Bench:
    """Heals on one network: the last host heals, and the first one is assigned to it."""

    def __init__(self, network: Network, mib: int) -> None:
        *self.healthy, self.healing = network.hosts
        self.mib, self.step = mib, 0
        self.heals: list[Heal] = []

    def heal(self, count: int, everybody: bool, killed_after: float = 0.0) -> Heal:
        """Lets the last host heal while `count` others are healthy; kills the assigned one after so many seconds."""
        self.step += 1
        healthy = self.healthy[:count]
        store = _asked(healthy[0], do="store")["store"]
        common = {"step": self.step, "everybody": everybody}
        metadata = []
        for place, host in enumerate(healthy):
            quorum = _quorum(self.step, count, store, place, [count] if place == 0 else [])
            metadata.append(_asked(host, do="send", quorum=quorum, **common)["metadata"])
        before = [host.sent() for host in healthy]
        quorum = _quorum(self.step, count, store, count, [])
        _asked(self.healing, do="heal", quorum=quorum, metadata=metadata[0], **common)
        begin = time.monotonic() + LEAD
        self.healing.order(at=begin)
        if killed_after:
            time.sleep(max(begin + killed_after - time.monotonic(), 0))
            healthy[0].end()
        answer = self.healing.answer()
        sent = [host.sent() - was for host, was in zip(healthy, before, strict=True)]
        for host in healthy[1 if killed_after else 0 :]:
            _asked(host, do="stop")
        if killed_after:
            healthy[0].start(self.mib)
            healthy[0].answer()
        return Heal(count, everybody, bool(killed_after), answer["equal"], answer["seconds"], sent)

    def all(self, counts: list[int], rounds: int) -> None:
        """Runs everything, both kinds in turn."""
        for everybody in (False, True):
            # The first connection of a process loads code.
            self.heal(counts[-1], everybody)
        for _ in range(rounds):
            for count in counts:
                pair = [self.heal(count, everybody) for everybody in (False, True)]
                self.heals += pair
                copy = pair[0].seconds
                if count > 1:
                    self.heals.append(self.heal(count, True, killed_after=copy / count / 2))
        self.print_table(counts)

    def print_table(self, counts: list[int]) -> None:
        """Prints one line for each number of healthy replicas and each kind: medians, and the smallest and largest."""
        heads = f"{'healthy':>7}  {'who sends':32} {'right':>7} {'seconds':>22} {'of one source':>22}"
        print(f"{heads}  sent by each, in copies")
        for count in counts:
            of = [heal for heal in self.heals if heal.healthy == count]
            alone = [heal for heal in of if not heal.everybody]
            copy_bytes = statistics.median(heal.sent[0] for heal in alone)
            for title, heals in (
                ("the assigned one", alone),
                ("all", [heal for heal in of if heal.everybody and not heal.killed]),
                ("all; the assigned one is killed", [heal for heal in of if heal.killed]),
            ):
                if not heals:
                    continue
                ratios = [heal.seconds / one.seconds for heal, one in zip(heals, alone, strict=True)]
                sent = [
                    statistics.median(each) / copy_bytes for each in zip(*(heal.sent for heal in heals), strict=True)
                ]
                right = f"{sum(heal.right for heal in heals)} of {len(heals)}"
                shares = " ".join(f"{share:.2f}" for share in sent)
                seconds = _spread([heal.seconds for heal in heals])
                print(f"{count:>7}  {title:32} {right:>7} {seconds:>22} {_spread(ratios):>22}  {shares}", flush=True)


def _asked(host: Host, **what: Any) -> dict[str, Any]:
    host.order(**what)
    return host.answer()


def _quorum(step: int, count: int, store: str, rank: int, receivers: list[int]) -> dict[str, Any]:
    """Returns what torchft tells the replica of a rank when those before `count` are healthy, and that one heals."""
    return {
        "quorum_id": step,
        "replica_rank": rank,
        "replica_world_size": count + 1,
        "max_step": step,
        "max_replica_rank": rank if rank < count else None,
        "max_world_size": count,
        "heal": rank == count,
        "recover_dst_replica_ranks": receivers,
        "store_address": store,
        "replica_ids": [str(number) for number in range(count + 1)],
    }


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> int:
    """Runs the bench; 0 also where it cannot run, which it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, default=100, help="speed of each healthy replica's link, each way")
    parser.add_argument("--healing-mbit", type=int, help="the same for the one that heals; by default as the others")
    parser.add_argument("--mib", type=int, default=64, help="size of the state")
    parser.add_argument("--healthy", default="1,2,3,4", help="how many, ascending")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write all figures here")
    options = parser.parse_args()
    counts = [int(count) for count in options.healthy.split(",")]
    try:
        network = Network(options.mbit, AGENT)
    except NotPermitted as reason:
        print(f"SKIPPED: {reason}")
        return 0
    try:
        try:
            network.build(counts[-1] + 1, options.mib)
            if options.healing_mbit:
                network.hosts[-1].shape(options.healing_mbit)
        except NotPermitted as reason:
            print(f"SKIPPED: no network namespaces with shaped links here (root is needed): {reason}")
            return 0
        bench = Bench(network, options.mib)
        bench.all(counts, options.rounds)
    finally:
        network.remove()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        about = {"mbit": options.mbit, "healing_mbit": options.healing_mbit or options.mbit, "mib": options.mib}
        options.json.write_text(json.dumps(about | {"heals": [asdict(heal) for heal in bench.heals]}, indent=1) + "\n")
    return 0 if all(heal.right for heal in bench.heals) else 1


if __name__ == "__main__":
    sys.exit(main())
