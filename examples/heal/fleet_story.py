"""The demo of a fleet: who sends how much to whom when a torchft job starts, and when two of its replicas are killed.

Five replicas start: torchft lets four of them heal from the first one, and they bring each other what they have. Two
are killed with SIGKILL at once and come back with other weights: every healthy replica sends them a share. Each replica
counts as a host of its own here, and sends at most 400 Mbit/s. SHA-256 over every tensor and number proves that what
arrived is what was sent, and that all replicas end bit-equal. Exits non-zero if anything differs or fails.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from scenario import Outcome, Scenario, run
from story import PROJECT, knows_its_name, print_event, show
from verdict import Heal


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=5, help="replicas in the job")
    parser.add_argument("--kill", type=int, default=2, help="how many of them are killed at once")
    parser.add_argument("--sync-quorum", action="store_true", help="heal before the forward pass, not beside it")
    parser.add_argument("--width", type=int, default=64, help="of the model")
    parser.add_argument("--pad-mib", type=int, default=64, help="ring of past weights that is healed as well")
    parser.add_argument("--deadline", type=float, default=170.0, help="seconds for all of it")
    parser.add_argument("--logs", type=Path, default=PROJECT / "build" / "demo" / "fleet", help="for logs and events")
    return parser.parse_args()


def table(heals: list[Heal], replicas: int) -> list[str]:
    """Return one line for each heal: how many MiB came from each replica."""
    senders = [f"replica {number}" for number in range(replicas)]
    senders += sorted({sender for heal in heals for sender in heal.senders} - set(senders))
    head = "".join(f"{sender:>12}" for sender in [*senders, "in all", "seconds"])
    lines = [f"{'MiB received by':18}{'step':>6}{head}"]
    for heal in sorted(heals, key=lambda heal: (heal.receiver.life, heal.step, heal.receiver.replica)):
        name = f"replica {heal.receiver.replica}" + (", again" if heal.receiver.life else "")
        shares = [f"{heal.senders[sender] / 2**20:.1f}" if sender in heal.senders else "-" for sender in senders]
        shares += [f"{sum(heal.senders.values()) / 2**20:.1f}", f"{heal.receive_seconds:.2f}"]
        lines.append(f"{name:18}{heal.step:>6}" + "".join(f"{share:>12}" for share in shares))
    return lines


def print_result(outcome: Outcome, replicas: int) -> None:
    """Print the table, and what is wrong or the digest that all replicas share."""
    print("\n" + "\n".join(table(outcome.heals, replicas)) + "\n")
    for problem in outcome.problems:
        print_event(outcome.seconds, f"FAILED: {problem}")
    if not outcome.problems:
        (digest,) = outcome.digests.values()
        print_event(outcome.seconds, f"state at step {outcome.final_step}, on all replicas: SHA-256 {digest}")


def main() -> int:
    args = arguments()
    # A killed demo must take its replicas with it: SystemExit runs the cleanup.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))
    if not knows_its_name():
        return 1
    print(__doc__.split("\n\n")[1])
    print(f"\n(torchft's own output: {show(args.logs / 'torchft.log')})", flush=True)
    try:
        scenario = Scenario(
            transport="tensorferry",
            directory=args.logs,
            replicas=args.replicas,
            kill=args.kill,
            sync_quorum=args.sync_quorum,
            width=args.width,
            pad_mib=args.pad_mib,
            fleet=True,
            deadline=args.deadline,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        outcome = run(scenario, print_event)
    except KeyboardInterrupt:
        return 130
    print_result(outcome, args.replicas)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
