"""Brings the figures of a folder of benchmarks' JSON files into the README and the docs.

    benches/into_docs.py build/bench

Pages have blocks between `<!-- figures NAME: begin -->` and `<!-- figures NAME: end -->`. Each block is written anew
from one file, named in `BLOCKS`, which a verb of the Makefile has left; a block whose file is missing stays as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import checkpointing
import dcp
import report
from dcp_ranks import MIB, SHAPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/explanation/performance.md")
#: Rows of the table of heals: row, line, what the pages call it, and whether the README has it, too.
_HEALS = (
    ("large", "first", "1 GiB in 8 tensors, into fresh memory", False),
    ("large", "in place", "1 GiB in 8 tensors, in place", True),
    ("transformer", "first", "a transformer with Adam, into fresh memory", False),
    ("transformer", "in place", "a transformer with Adam, in place", True),
    ("small", "first", "100,000 tensors of 1 KiB", True),
    ("tiny", "first", "16 KiB in all", False),
    ("job28", "in place", "28 MB in place, while both sides train", False),
    ("job154", "in place", "154 MB in place, while both sides train", True),
)
_BUSY = 0.1


def _spread(values: Sequence[float], scale: float = 1.0) -> str:
    """Return median, lowest and highest, which are left out where they say nothing more."""
    if not values:
        return ""
    median, low, high = (f"{scale * v:.0f}" for v in (statistics.median(values), min(values), max(values)))
    return median if low == high else f"{median} ({low}-{high})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _setting(results: dict[str, Any], rounds: int) -> str:
    busy = results.get("others_busy", 0.0)
    others = f", other work on {busy:.0%} of the cores when they began" if busy > _BUSY else ""
    return f"{results['machine']['cores']} cores, {rounds} interleaved round{'s' if rounds > 1 else ''}{others}"


def _heals(results: dict[str, Any]) -> Iterable[tuple[bool, str, list[str]]]:
    """Yield for each row whether the README has it, its title, and the milliseconds of torchft and of tensorferry."""
    for name, line, title, is_short in _HEALS:
        found = next((row for row in results["rows"] if row["name"] == name), None)
        if found is None:
            continue
        wanted = [each for each in report.table_lines({"rows": [found | {"table": [line]}]}) if each.seconds]
        if not wanted:
            continue
        seconds = wanted[0].seconds
        stock = min(seconds[c] for c in report.COLUMNS[:2] if c in seconds)
        times = [stock, *map(seconds.get, report.COLUMNS[2:])]
        yield is_short, title, [report._number(1e3 * value) for value in times]


def heal(results: dict[str, Any]) -> str:
    """Return the table of heals; its ratios are those of the figures beside them, so that readers can check them."""
    rows = []
    for _, title, (stock, shared, sockets) in _heals(results):
        ratios = [f"{float(stock) / float(time):.1f}" for time in (shared, sockets)]
        rows.append((title, stock, shared, ratios[0], sockets, ratios[1]))
    return _table(("state", "torchft ms", "shared memory ms", "ratio", "sockets ms", "ratio"), rows)


def heal_short(results: dict[str, Any]) -> str:
    """Return the README's table."""
    rows = [(title, *times) for is_short, title, times in _heals(results) if is_short]
    return _table(("state", "torchft", "shared memory", "sockets"), rows)


def _samples(results: dict[str, Any], row: str) -> dict[str, list[dict[str, Any]]]:
    samples = next(each["samples"] for each in results["rows"] if each["name"] == row)
    good = [sample for sample in samples if "error" not in sample]
    found = {name: [sample for sample in good if sample["contender"] == name] for name in dcp.CONTENDERS}
    return {name: mine for name, mine in found.items() if mine}


def _dcp_rows(results: dict[str, Any], row: str) -> Iterable[list[str]]:
    for name, samples in _samples(results, row).items():
        cells = [name]
        for key in ("save_s", "load_s", "dropped_load_s"):
            values = [sample[key] for sample in samples if sample.get(key)]
            cells.append(_spread(values, 1e3))
        yield cells


def _dcp_setting(results: dict[str, Any], row: str) -> str:
    found = _samples(results, row)
    size = next(iter(found.values()))[0]["bytes"] / MIB
    saving, loading = dcp.WORLDS[row]
    ranks = "one rank" if (saving, loading) == (1, 1) else f"saved by {saving} ranks and loaded by {loading}"
    rounds = max(len(samples) for samples in found.values())
    return f"{size:.0f} MiB in {SHAPES[row][1]} tensors, {ranks}, {_setting(results, rounds)}, milliseconds:"


def dcp_short(results: dict[str, Any]) -> str:
    """Return the table of saves and loads of a state by one rank."""
    rows = [cells for cells in _dcp_rows(results, "large") if cells[0] != "tensorferry peers"]
    return f"{_dcp_setting(results, 'large')}\n\n{_table(('', 'save', 'load right after', 'load from the disk'), rows)}"


def checkpointers(results: dict[str, Any]) -> str:
    """Return the table of the checkpointers."""
    good = [s for s in results["samples"] if "error" not in s]
    warm_up, rows = results["warm_up"], []
    for name in checkpointing.CONTENDERS:
        samples = [s for s in good if s["contender"] == name]
        if not samples:
            continue
        later = [save for s in samples for save in s["saves"][warm_up:]]
        rates = [save["rate"] for save in later if save.get("rate") is not None]
        way, loads = checkpointing._quickest_load(samples)
        extra = [max(e) for s in samples if (e := [v["extra"] for v in s["saves"] if "extra" in v])]
        still = [save["stand_still_s"] for save in later]
        durable = [save["durable_s"] for save in later if "durable_s" in save]
        rate = f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})" if rates else ""
        load = _spread(loads, 1e3) + (f", {way}" if way not in ("", "load") else "")
        rows.append((name, _spread(still, 1e3), rate, _spread(durable, 1e3), load, _spread(extra, 1 / MIB)))
    rounds = max(sum(s["contender"] == name for s in good) for name, *_ in rows)
    size = f"{good[0]['bytes'] / MIB:.0f} MiB, {_setting(results, rounds)}"
    saves = f"{size}, {len(good[0]['saves']) - warm_up} saves of each process:"
    head = ("", "stands still, ms", "step rate while it writes", "on the disk, ms", "load, ms", "memory, MiB")
    return f"{saves}\n\n{_table(head, rows)}"


def _brackets(values: Sequence[float]) -> str:
    return _spread(values).replace("(", "[").replace(")", "]")


def megatron_saves(results: dict[str, Any]) -> str:
    """Return the table of saves and loads by two ranks."""
    found = results["saves"]
    rows = [(name, _brackets(found["save_ms"][name]), _brackets(found["load_ms"][name])) for name in found["save_ms"]]
    rounds = len(next(iter(found["save_ms"].values())))
    return f"{results['mib']} MiB, {_setting(results, rounds)}:\n\n{_table(('', 'save ms', 'load ms'), rows)}"


#: What writes a block, and from which file of the folder.
BLOCKS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "heal": ("results.json", heal),
    "heal-short": ("results.json", heal_short),
    "dcp": ("dcp.json", dcp_short),
    "checkpointers": ("checkpointing.json", checkpointers),
    "megatron-saves": ("megatron.json", megatron_saves),
}
_BLOCK = re.compile(r"(<!-- figures (?P<name>[\w-]+): begin -->\n).*?(^<!-- figures (?P=name): end -->)", re.M | re.S)


def brought(text: str, folder: Path) -> str:
    """Return a page with its blocks written anew from the files of a folder."""

    def written(block: re.Match[str]) -> str:
        file, write = BLOCKS[block["name"]]
        if not (folder / file).exists():
            return block[0]
        return f"{block[1]}{write(json.loads((folder / file).read_text()))}\n{block[3]}"

    return _BLOCK.sub(written, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the JSON files are")
    options = parser.parse_args()
    for page in PAGES:
        path = ROOT / page
        text = path.read_text()
        new = brought(text, options.folder)
        if new != text:
            path.write_text(new)
            print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
