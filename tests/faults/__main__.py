"""``python -m faults``: the fault matrix as a table."""

from __future__ import annotations

import argparse
import sys

from .matrix.catalogue import SCENARIOS
from .matrix.cell import Limits, Outcome
from .matrix.report import broken_promises, format_table
from .matrix.run_matrix import candidate, run_matrix, scenario


def main(arguments: list[str] | None = None) -> int:
    """Runs the matrix and prints its table.

    Args:
        arguments: of the command line; ``sys.argv`` if left out

    Returns:
        The exit status: 1 if tensorferry broke a promise, otherwise 0.

    Raises:
        SystemExit: the arguments are wrong, or ask for help
    """
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--transports", default="tensorferry", help="comma-separated names or module:callable")
    parser.add_argument(
        "--faults", default="*", help="comma-separated names; a trailing * matches every name with that beginning"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--size-mib", type=int, default=64, help="size of the state")
    parser.add_argument("--timeout", type=float, default=10.0, help="deadline of a receive, seconds")
    parser.add_argument("--jobs", type=int, default=2, help="cells that run at a time")
    parser.add_argument("--list", action="store_true", help="list the faults and what they do")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for row in SCENARIOS.values():
            print(f"{row.name:27} {row.about}")
        return 0
    try:
        transports = [candidate(name) for name in chosen.transports.split(",")]
        faults = [scenario(name) for given in chosen.faults.split(",") for name in _expand(given)]
    except ValueError as error:
        parser.error(str(error))

    def progress(outcome: Outcome) -> None:
        line = [outcome.fault, outcome.transport, outcome.ending, outcome.source, f"{outcome.seconds:.1f} s"]
        print("  ".join([*line, outcome.message, *outcome.notes]), file=sys.stderr)

    limits = Limits(chosen.size_mib << 20, chosen.timeout)
    outcomes = run_matrix(
        transports, faults, repeats=chosen.repeats, limits=limits, jobs=chosen.jobs, progress=progress
    )
    print(format_table(outcomes))
    broken = [
        f"{outcome.fault}, {outcome.transport}: {promise}"
        for outcome in outcomes
        if outcome.transport.startswith("tensorferry")
        for promise in broken_promises(outcome, SCENARIOS[outcome.fault].promised(outcome.transport))
    ]
    print(*broken, sep="\n")
    return 1 if broken else 0


def _expand(name: str) -> list[str]:
    return [row for row in SCENARIOS if row.startswith(name[:-1])] if name.endswith("*") else [name]


if __name__ == "__main__":
    sys.exit(main())
