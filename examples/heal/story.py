"""The demo: a replica of a torchft job is killed and heals, first with torchft's HTTPTransport, then with tensorferry.

Three replica groups train a small language model; one is killed with SIGKILL, comes back with other weights and
takes the training state from a healthy peer while the job goes on. SHA-256 over every tensor and number proves that
what arrived is what was sent, and that all replicas end bit-equal. Exits non-zero if anything differs or fails.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from pathlib import Path

from scenario import Outcome, Scenario, run

PROJECT = Path(__file__).resolve().parents[2]
NAMES = {"torchft": "torchft HTTPTransport", "tensorferry": "tensorferry HTTPTransport"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=NAMES, action="append", help="only this one (default: both, in turn)")
    parser.add_argument("--chunks", type=int, default=0, help="num_chunks of the transport")
    parser.add_argument("--replicas", type=int, default=3, help="replica groups in the job")
    parser.add_argument("--kill", type=int, default=1, help="how many of them are killed at once")
    parser.add_argument("--group-world-size", type=int, default=1, help="ranks in each replica group")
    parser.add_argument("--sync-quorum", action="store_true", help="heal before the forward pass, not beside it")
    parser.add_argument("--width", type=int, default=96, help="of the model")
    parser.add_argument("--pad-mib", type=int, default=128, help="ring of past weights that is healed as well")
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds for each of the two jobs")
    parser.add_argument("--logs", type=Path, default=PROJECT / "build" / "demo", help="folder for logs and events")
    return parser.parse_args()


def print_event(seconds: float, text: str) -> None:
    print(f"{seconds:7.1f} s  {text}", flush=True)


def show(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def knows_its_name() -> bool:
    """Return whether this machine's own name resolves, and say so if it does not."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except socket.gaierror:
        print(
            f"torchft needs this machine's own name to resolve, and {socket.gethostname()!r} does not", file=sys.stderr
        )
        return False
    return True


def perform(args: argparse.Namespace, transport: str) -> Outcome:
    """Run the job once and print its course."""
    directory = args.logs / transport
    print(f"\n{NAMES[transport]}   (torchft's own output: {show(directory / 'torchft.log')})", flush=True)
    outcome = run(
        Scenario(
            transport=transport,
            directory=directory,
            chunks=args.chunks,
            replicas=args.replicas,
            kill=args.kill,
            group_world_size=args.group_world_size,
            sync_quorum=args.sync_quorum,
            width=args.width,
            pad_mib=args.pad_mib,
            deadline=args.deadline,
        ),
        print_event,
    )
    if outcome.problems:
        for problem in outcome.problems:
            print_event(outcome.seconds, f"FAILED: {problem}")
    else:
        for rank, digest in outcome.digests.items():
            of = f" of rank {rank}" if args.group_world_size > 1 else ""
            print_event(outcome.seconds, f"state{of} at step {outcome.final_step}, on all replicas: SHA-256 {digest}")
    return outcome


def compare(outcomes: dict[str, Outcome]) -> None:
    """Print one row per transport: how long its receives took."""
    print(
        f"\n{'':27}{'first heals, at step 0':>24}{'heal after the kill':>24}{'source held up':>18}{'of it at work':>16}"
    )
    for transport, outcome in outcomes.items():
        first = [heal for heal in outcome.heals if heal.receiver.life == 0]
        later = [heal for heal in outcome.heals if heal.receiver.life > 0]
        cells = [
            f"{sum(h.nbytes for h in heals) / 2**20:.0f} MiB in {max(h.receive_seconds for h in heals):.3f} s"
            if heals
            else "-"
            for heals in (first, later)
        ]
        held, worked = max(((h.held_up_seconds, h.held_up_cpu_seconds) for h in outcome.heals), default=(0.0, 0.0))
        held_up = f"{held * 1000:>15.1f} ms{worked * 1000:>13.1f} ms"
        print(f"{NAMES[transport]:27}{cells[0]:>24}{cells[1]:>24}{held_up}")
    print("Heals of one column run at the same time; the seconds are those of the slowest. One run is no benchmark.")
    print(
        "The source is held up by send_checkpoint and disallow_checkpoint; the slowest of its heals is shown. At work\n"
        "is what the calling thread took of a core. The rest it waited, mostly for one: the replicas share them here,\n"
        "so compare the last column."
    )


def main() -> int:
    args = arguments()
    # A killed demo must take its replicas with it: SystemExit runs the cleanup.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))
    if not knows_its_name():
        return 1
    print(__doc__.split("\n\n")[1])
    try:
        outcomes = {transport: perform(args, transport) for transport in args.transport or list(NAMES)}
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    compare(outcomes)
    return 1 if any(outcome.problems for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
