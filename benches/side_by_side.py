"""Ours beside torchft's HTTPTransport and PGTransport: the same states, the same machine, the same minutes.

Every measurement is made by a fresh source process and a fresh receiver process on loopback; contenders take turns
within a round, forwards in even rounds and backwards in odd ones. Each pair moves a tiny state first, so that imports
and connection set-up are not counted ("warm_up" in the JSON is that first receive); only the rows "in a job" are of
processes that have received nothing yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import report
from contenders import OURS, Contender, choose, select
from machine import facts, others_busy
from measure import Lab, raw_floor, raw_stall, stall, transfer
from peers import Peer, PeerError, Refused, context
from states import GIB, ROWS, Row

if TYPE_CHECKING:
    from collections.abc import Callable

_STALL_ROWS = ("large", "small")
_PROBE = 256 << 20
_ROUNDS = 4
_COLD_ROUNDS = 2  # each waits for seconds until the machine's memory is cold


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("build/bench/results.json"), help="raw samples and summary")
    parser.add_argument("--plot", type=Path, help="PNG to draw")
    parser.add_argument("--rounds", type=int, help=f"interleaved rounds (default {_ROUNDS}; quick 2)")
    parser.add_argument("--rows", help=f"comma-separated: {', '.join(ROWS)} (default: all but one, million)")
    parser.add_argument("--contenders", help="comma-separated, e.g. torchft:4,gloo+inplace,tensorferry+network")
    parser.add_argument(
        "--full",
        action="store_true",
        help="all rows, eight chunks, and the source's main loop as well; prints every figure, not only the table",
    )
    parser.add_argument("--stalls", help=f"rows of the main loop's table (with --full: {','.join(_STALL_ROWS)})")
    parser.add_argument("--memory", help="only this state of fresh memory: backed or cold", choices=("backed", "cold"))
    parser.add_argument("--quick", action="store_true", help="a fifth of the size, two rounds: a first look")
    parser.add_argument("--start", choices=("forkserver", "spawn"), default="forkserver", help="how children start")
    parser.add_argument("--scale", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else _ROUNDS)
    options.scale = options.scale or (0.2 if options.quick else 1.0)
    default_rows = [row.name for row in ROWS.values() if row.default or options.full]
    options.rows = options.rows.split(",") if options.rows else default_rows
    default_stalls = _STALL_ROWS if options.full else ()
    options.stalls = list(default_stalls) if options.stalls is None else [n for n in options.stalls.split(",") if n]
    options.contenders = options.contenders.split(",") if options.contenders else None
    for name in {*options.rows, *options.stalls} - {*ROWS}:
        parser.error(f"no such row: {name}")
    return options


class Bench:
    """Measures all rows, rounds and contenders, and keeps every sample."""

    def __init__(self, options: argparse.Namespace, lab: Lab, have_ours: bool, can_be_cold: bool) -> None:
        self._options, self._lab, self._have_ours, self._can_be_cold = options, lab, have_ours, can_be_cold
        self._begin = time.monotonic()
        self.others_busy: list[float] = []

    def _contenders(self, row: Row, stalls: bool = False) -> list[Contender]:
        if self._options.contenders:
            chosen = select(self._options.contenders, row, self._have_ours)
        else:
            chosen = choose(row, self._have_ours, full=self._options.full)
        if stalls:  # where ours is received makes no difference to the source; torchft stalls it least without chunks
            chosen = [c for c in chosen if not c.in_place and (c.library == OURS or not c.chunks)]
        return chosen

    def _turns(self, row: Row, number: int) -> list[tuple[Contender | None, str]]:
        """Return what a round consists of: contenders with the state of memory, and None for the raw sockets."""
        contenders = self._contenders(row)
        turns: list[tuple[Contender | None, str]] = [(contender, "backed") for contender in contenders]
        cold = row.cold or (row.job and self._options.full)
        if cold and self._can_be_cold and number < _COLD_ROUNDS:
            turns += [(contender, "cold") for contender in contenders if not contender.in_place]
        if row.floor:
            turns.append((None, "backed"))
        if self._options.memory:
            turns = [turn for turn in turns if turn[1] == self._options.memory]
        return _in_turn(turns, number)

    def _note(self, text: str, seconds: float | None) -> None:
        result = "failed" if seconds is None else f"{seconds:.6f} s"
        print(f"[{time.monotonic() - self._begin:5.0f} s] {text}: {result}", file=sys.stderr, flush=True)

    def _try(self, what: str, run: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
        try:
            return run()
        except Refused as why:
            return {"refused": str(why)}
        except PeerError as error:
            self._lab.problems.append(f"{what}: {error}")
            return {"error": str(error)}

    def row(self, row: Row) -> dict[str, Any]:
        """Measure one shape of state in all rounds."""
        samples: list[dict[str, Any]] = []
        floors: list[dict[str, Any]] = []
        self.others_busy.append(others_busy())
        for number in range(min(self._options.rounds, row.rounds or self._options.rounds)):
            for order, (contender, memory) in enumerate(self._turns(row, number)):
                where = {"round": number, "order": order}
                if contender is None:
                    size = self._lab.sizes.get(row.name, GIB)
                    floors.append(where | self._try(f"{row.title}, raw sockets", partial(raw_floor, self._lab, size)))
                    continue
                what = f"{row.title}, {contender.name}, {memory}"
                got = self._try(what, partial(transfer, self._lab, row, contender, memory, check=number == 0))
                samples.append(where | {"contender": contender.name, "memory": memory} | got)
                self._note(f"{row.title}, round {number + 1}, {contender.name}, {memory}", got.get("first_s"))
        return {
            "name": row.name,
            "title": row.title,
            "table": row.table,
            "bytes": next((sample["bytes"] for sample in samples if "bytes" in sample), 0),
            "tensors": next((sample["tensors"] for sample in samples if "tensors" in sample), 0),
            "samples": samples,
            "raw": floors,
            "summary": report.summarise_transfers(samples, floors),
        }

    def stalls(self, rows: list[Row]) -> list[dict[str, Any]]:
        """Watch the source's main loop in all rounds; the raw sockets of other processes are the same for each row."""
        samples: list[dict[str, Any]] = []
        self.others_busy.append(others_busy())
        turns = [(row, contender) for row in rows for contender in self._contenders(row, stalls=True)]
        for number in range(self._options.rounds if rows else 0):
            for order, (row, contender) in enumerate(_in_turn(turns, number)):
                what = f"main loop, {row.title}, {contender.name}"
                got = self._try(what, partial(stall, self._lab, row, contender))
                where = {"row": row.title, "contender": contender.name, "round": number, "order": order}
                samples.append(where | got)
                self._note(f"main loop, {row.title}, round {number + 1}, {contender.name}", got.get("serving_worst_s"))
            raw = self._try("main loop, raw sockets", partial(raw_stall, self._lab, int(GIB * self._lab.scale)))
            for streams, got in raw.items() if "error" not in raw else ():
                name = f"{streams} raw stream{'s' if streams == 2 else ''} of other processes"
                samples += [{"row": row.title, "contender": name, "round": number} | got for row in rows]
        return samples


def _in_turn(turns: list[Any], number: int) -> list[Any]:
    """Return the contenders forwards in even rounds, backwards in odd ones."""
    return turns[::-1] if number % 2 else turns


def _write(results: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_name("table.md").write_text(report.as_markdown(results))
    path.with_name("details.md").write_text(report.details_as_markdown(results))


def main() -> int:
    options = _arguments()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    log = options.json.with_name("children.log")
    log.write_text("")
    optimizers = any(ROWS[name].has_optimizer for name in {*options.rows, *options.stalls})
    children = context(options.start, optimizers=optimizers)
    ballast = Peer(children, str(log))
    lab = Lab(children, str(log), options.scale, ballast, backed_rate=ballast.ask("backed_rate", nbytes=_PROBE))
    here = facts() | ballast.ask("facts")
    if not here[OURS]:
        print("tensorferry is not installed here: only torchft is measured", file=sys.stderr)
    wants_cold = options.memory != "backed" and any(ROWS[name].cold or options.full for name in options.rows)
    here["first_touch"] = {"backed": lab.backed_rate}
    why_not_cold = "it was not looked for"
    if wants_cold:
        try:
            here["first_touch"]["cold"] = lab.cold(int(GIB * options.scale))
        except PeerError as error:
            why_not_cold = str(error)
        lab.release()
    here["why_not_cold"] = why_not_cold
    bench = Bench(options, lab, here[OURS] is not None, "cold" in here["first_touch"])
    results: dict[str, Any] = {
        "version": 2,
        "machine": here | {"others_busy": bench.others_busy},
        "options": {"rounds": options.rounds, "scale": options.scale, "start": options.start, "full": options.full},
        "rows": [],
        "stalls": [],
        "stall_summary": [],
        "problems": lab.problems,
    }
    for name in options.rows:
        results["rows"].append(bench.row(ROWS[name]))
        _write(results, options.json)  # an interrupted run keeps its finished rows
    results["stalls"] = bench.stalls([ROWS[name] for name in options.stalls])
    results["stall_summary"] = report.summarise_stalls(results["stalls"])
    lab.ballast.end()
    bench.others_busy.append(others_busy())
    _write(results, options.json)
    if options.plot:
        from plot import draw  # matplotlib is only needed, and only slow, here

        draw(results, options.plot)
    print(report.as_text(results))
    if options.full:
        print(report.details_as_text(results))
    else:
        print(f"All lines, with memory and raw sockets: {options.json.with_name('details.md')}")
    if max(bench.others_busy) > report.QUIET:
        print(f"NOTE: other work kept up to {max(bench.others_busy):.0%} of the machine busy", file=sys.stderr)
    return report.end(lab.problems)


if __name__ == "__main__":
    sys.exit(main())
