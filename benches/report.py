"""From raw samples to medians, spreads and ratios, and from those to tables and a plot."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from contenders import GLOO, OURS, THEIRS, Contender
from states import LINES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Sample = dict[str, Any]
_ORDERS = ("first", "second")
_RAW_KINDS = {"touched": "touched memory", "fresh": "fresh memory", "huge": "fresh huge pages"}
_STREAMS = (1, 2)
QUIET = 0.1  # share of the machine that other processes may use without a note in the report


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return median, low and high, or None where there is nothing."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "low": min(known), "high": max(known)}


def spread_text(values: Sequence[float], digits: int = 3, scale: float = 1.0) -> str:
    """Return median, low and high as text; a dash where there is nothing."""
    if not values:
        return "-"
    low, high = min(values) * scale, max(values) * scale
    return f"{statistics.median(values) * scale:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def end(problems: Iterable[str]) -> int:
    """Print the problems of a bench; return its exit status."""
    status = 0
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
        status = 1
    return status


def _good(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if "error" not in sample and "refused" not in sample]


def _by_round(samples: list[Sample], field: str) -> dict[int, float]:
    return {sample["round"]: sample[field] for sample in _good(samples) if sample.get(field) is not None}


def ratio(above: dict[int, float], below: dict[int, float]) -> dict[str, float] | None:
    """Return the ratio of two medians, and the lowest and highest ratio within a round.

    All three are of the rounds that both have, so the ratio of the medians lies between the other two.
    """
    rounds = above.keys() & below.keys()
    if not rounds:
        return None
    pairs = [above[number] / below[number] for number in rounds]
    median = statistics.median(above[number] for number in rounds) / statistics.median(below[n] for n in rounds)
    return {"median": median, "low": min(pairs), "high": max(pairs)}


def _raw(sample: Sample, *kinds: str) -> float:
    return min(sample[f"{kind}_{streams}_s"] for kind in kinds for streams in _STREAMS)


def _line_name(in_place: bool, memory: str, order: str) -> str:
    """Return the name of a line, one of `states.LINES`."""
    if in_place:
        return "in place" if order == "first" else "in place, second"
    return "cold" if memory == "cold" else order


def summarise_transfers(samples: list[Sample], floors: list[Sample]) -> dict[str, Any]:
    """Return the lines of a row: for each contender its times beside those of the best rival and of raw sockets.

    The rivals of a line are all transports of torchft that get the same bytes there in the same rounds: those that
    receive in place, where the line is about that, and all that receive into fresh memory. The best one is that with
    the lowest median.
    """
    floors = _good(floors)
    raw_fresh = {sample["round"]: _raw(sample, "fresh", "huge") for sample in floors}
    raw_touched = {sample["round"]: _raw(sample, "touched") for sample in floors}
    lines, rivals = [], {}
    for name in LINES:
        memory = "cold" if name == "cold" else "backed"
        order = "second" if name.endswith("second") else "first"
        times: dict[str, dict[int, float]] = {}
        here = [sample for sample in samples if sample["memory"] == memory]
        for contender in dict.fromkeys(sample["contender"] for sample in here):
            seconds = _by_round([s for s in here if s["contender"] == contender], f"{order}_s")
            if seconds and (name.startswith("in place") or not Contender.parse(contender).in_place):
                times[contender] = seconds
        medians = {c: statistics.median(s.values()) for c, s in times.items() if not c.startswith(OURS)}
        rivals[name] = best = min(medians, key=medians.__getitem__) if medians else None
        for contender, seconds in times.items():
            if _line_name(Contender.parse(contender).in_place, memory, order) != name:
                continue
            good = _good([sample for sample in here if sample["contender"] == contender])
            nbytes, tensors = good[0]["bytes"], good[0]["tensors"]
            median = statistics.median(seconds.values())
            send = spread(sample["send_s"] for sample in good)
            lines.append(
                {
                    "line": name,
                    "contender": contender,
                    "seconds": spread(seconds.values()),
                    "rival": best,
                    "speedup": ratio(times[best], seconds) if best else None,
                    "gb_per_s": nbytes / median / 1e9,
                    "us_per_tensor": median / tensors * 1e6,
                    "send_seconds": send,
                    "send_us_per_tensor": send["median"] / tensors * 1e6 if send else None,
                    "warm_up_seconds": spread(sample["warm_up_s"] for sample in good),
                    "of_raw_fresh": ratio(raw_fresh, seconds),
                    "of_raw_touched": ratio(raw_touched, seconds),
                    "receiver_peak": _times_state(good, f"{order}_receiver_extra"),
                    "source_peak": _times_state(good, "source_extra"),
                    "equal": [s[f"{order}_equal"] for s in good if f"{order}_equal" in s],
                }
            )
    raw_lines = {
        f"{kind}_{streams}": spread(sample[f"{kind}_{streams}_s"] for sample in floors)
        for kind in _RAW_KINDS
        for streams in _STREAMS
    }
    refused = {sample["contender"]: sample["refused"] for sample in samples if "refused" in sample}
    return {"best_rival": rivals, "lines": lines, "raw_seconds": raw_lines, "refused": refused}


def _times_state(samples: list[Sample], field: str) -> dict[str, float] | None:
    """Return peak memory as a multiple of the state; None for states that are small beside the process itself."""
    return spread(s[field] / s["bytes"] for s in samples if s.get(field) is not None and s["bytes"] >= 16 << 20)


def summarise_stalls(samples: list[Sample]) -> list[dict[str, Any]]:
    """Return a line per row and contender: worst gaps, with and without the host's pauses, and the rate."""
    lines = []
    for row, name in dict.fromkeys((sample["row"], sample["contender"]) for sample in samples):
        mine = [s for s in samples if (s["row"], s["contender"]) == (row, name) and "error" not in s]
        if mine:
            fields = ("unloaded_worst_s", "sending_worst_s", "serving_worst_s", "serving_awake_s", "serving_rate")
            line = {field: spread(sample.get(field) for sample in mine) for field in fields}
            lines.append({"row": row, "contender": name, **line})
    return lines


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _show(value: dict[str, float] | None, unit: float = 1.0) -> str:
    if value is None:
        return "-"
    median, low, high = (_number(value[key] * unit) for key in ("median", "low", "high"))
    return median if low == high else f"{median} ({low}-{high})"


def title(contender: str) -> str:
    """Return a contender's name as tables print it."""
    if contender.startswith(f"{THEIRS}:"):
        return f"HTTPTransport, {contender.partition(':')[2]} chunks"
    name = contender.replace("+network", ", sockets").replace("+inplace", ", in place")
    name = name.replace("+manager", ", in place by the Manager")
    return name.replace(GLOO, "PGTransport (gloo)")


_DETAIL_HEAD = ["", "receive ms", "GB/s", "us/tensor", "x best rival", "of raw touched", "of raw fresh"]
_DETAIL_HEAD += ["send ms", "send us/tensor", "peak: source", "receiver"]
_PHASES = ("made", "open", "fetch", "verify", "build")
_PHASE_HEAD = ["", "transport made ms", "open ms", "fetch ms", "of it, verify ms", "build ms"]
_STALL_HEAD = ["", "worst gap unloaded ms", "during send ms", "while serving ms", "less the host's pauses ms", "rate"]


def _detail_cells(line: dict[str, Any]) -> list[str]:
    def times_state(peak: dict[str, float] | None) -> str:
        return f"+{peak['high']:.2f}x" if peak else "-"

    return [
        f"{title(line['contender'])}: {line['line']}",
        _show(line["seconds"], 1e3),
        _number(line["gb_per_s"]),
        _number(line["us_per_tensor"]),
        _show(line["speedup"]),
        _show(line["of_raw_touched"]),
        _show(line["of_raw_fresh"]),
        _show(line["send_seconds"], 1e3),
        _number(line["send_us_per_tensor"]),
        times_state(line["source_peak"]),
        times_state(line["receiver_peak"]),
    ]


def _phase_cells(samples: list[Sample]) -> Iterable[list[str]]:
    """Return what the receives of each contender consist of, as far as it says so itself."""
    for contender in dict.fromkeys(sample["contender"] for sample in samples):
        here = [s for s in samples if s["contender"] == contender and "fetch" in s.get("first_phases", {})]
        for memory in dict.fromkeys(sample["memory"] for sample in here):
            for order in _ORDERS:
                phases = [s[f"{order}_phases"] for s in here if s["memory"] == memory and f"{order}_phases" in s]
                if phases:
                    line = _line_name(Contender.parse(contender).in_place, memory, order)
                    times = [_show(spread(phase[name] for phase in phases), 1e3) for name in _PHASES]
                    yield [f"{title(contender)}: {line}", *times]


def _raw_cells(name: str, seconds: dict[str, float], nbytes: int) -> list[str]:
    kind, streams = name.split("_")
    name = f"raw sockets, {streams} stream{'s' if streams == '2' else ''}, {_RAW_KINDS[kind]}"
    return [name, _show(seconds, 1e3), _number(nbytes / seconds["median"] / 1e9)]


def _stall_cells(line: dict[str, Any]) -> list[str]:
    fields = ("unloaded_worst_s", "sending_worst_s", "serving_worst_s", "serving_awake_s")
    return [title(line["contender"]), *(_show(line[field], 1e3) for field in fields), _show(line["serving_rate"])]


def _details(results: dict[str, Any]) -> Iterable[tuple[str, list[list[str]]]]:
    for row in results["rows"]:
        summary = row["summary"]
        cells = [_DETAIL_HEAD]
        cells += [_detail_cells(line) for line in summary["lines"]]
        cells += [_raw_cells(k, v, row["bytes"]) for k, v in summary["raw_seconds"].items() if v]
        yield f"{row['title']}: {row['bytes'] / 1e6:.6g} MB in {row['tensors']:,} tensors", cells
    for row in results["rows"]:
        if phases := list(_phase_cells(_good(row["samples"]))):
            yield f"Phases of a receive, {row['title']}", [_PHASE_HEAD, *phases]
    for name in dict.fromkeys(line["row"] for line in results["stall_summary"]):
        cells = [_STALL_HEAD, *(_stall_cells(line) for line in results["stall_summary"] if line["row"] == name)]
        yield f"The source's main loop, {name}", cells


@dataclass(frozen=True)
class TableLine:
    """A line of the table and of the chart: one state, one kind of receive, all contenders."""

    title: str
    memory: str
    seconds: dict[str, float]
    """medians: "HTTPTransport", "PGTransport", "tensorferry", "tensorferry, sockets", as far as there are any"""
    chunks: int | None
    """with how many chunks HTTPTransport took that time"""
    ratios: dict[str, dict[str, float]]
    """the two of ours: how many times as fast as the best rival"""
    refused: str | None


def table_lines(results: dict[str, Any]) -> list[TableLine]:
    """Return the lines that the rows name for the table, in their order."""
    found = []
    for row in results["rows"]:
        for name in row["table"]:
            seconds: dict[str, float] = {}
            ratios: dict[str, dict[str, float]] = {}
            chunks = None
            # HTTPTransport has no receive in place: there it is shown with what it does, a receive into fresh memory.
            fresh = {"in place": "first", "in place, second": "second"}.get(name)
            for line in row["summary"]["lines"]:
                contender = Contender.parse(line["contender"])
                column = _column(contender)
                if line["line"] != (fresh if contender.library == THEIRS and fresh else name):
                    continue
                median = line["seconds"]["median"]
                if column not in seconds or median < seconds[column]:
                    seconds[column] = median
                    chunks = contender.chunks if contender.library == THEIRS else chunks
                if contender.library == OURS and line["speedup"]:
                    ratios[column] = line["speedup"]
            if seconds:
                label = f"{row['title']}, {'first' if name == 'cold' else name}"
                refused = next(iter(row["summary"]["refused"].values()), None)
                found.append(TableLine(label, LINES[name], seconds, chunks, ratios, refused))
    return found


COLUMNS = ("HTTPTransport", "PGTransport", OURS, f"{OURS}, sockets")


def _column(contender: Contender) -> str:
    if contender.library == OURS:
        return COLUMNS[3] if contender.network else COLUMNS[2]
    return COLUMNS[0] if contender.library == THEIRS else COLUMNS[1]


_HEAD = [
    "receive",
    "memory",
    "HTTPTransport ms (chunks)",
    "PGTransport ms",
    "tensorferry ms",
    "ratio",
    "sockets ms",
    "ratio",
]


def _cells(line: TableLine) -> list[str]:
    def time(column: str) -> str:
        if column in line.seconds:
            return _number(line.seconds[column] * 1e3)
        return "refused" if column == COLUMNS[1] and line.refused else "-"

    ours, sockets = COLUMNS[2:]
    return [
        line.title,
        line.memory,
        time(COLUMNS[0]) + (f" ({line.chunks})" if line.chunks is not None else ""),
        *(time(column) for column in COLUMNS[1:3]),
        _show(line.ratios.get(ours)),
        time(sockets),
        _show(line.ratios.get(sockets)),
    ]


def slower(results: dict[str, Any]) -> list[str]:
    """Return all lines, also those that the table leaves out, in which ours is slower than its best rival."""
    return [
        f"{row['title']}, {line['line']}, {title(line['contender'])}: {_show(line['speedup'])} "
        f"beside {title(line['rival'])}"
        for row in results["rows"]
        for line in row["summary"]["lines"]
        if line["contender"].startswith(OURS) and line["speedup"] and line["speedup"]["median"] < 1
    ]


def _notes(results: dict[str, Any]) -> list[str]:
    """Return what a reader has to know below the table."""
    memory = results["machine"]["first_touch"]
    cold = (
        f'"Cold": the host of this virtual machine has taken it back: {memory["cold"]:.2g} GB/s at its first touch, in '
        "huge pages"
        if "cold" in memory
        else "Cold memory, which a virtual machine's host has taken back, was not measured: "
        + results["machine"].get("why_not_cold", "nothing says why")
    )
    notes = [
        "Milliseconds of `recv_checkpoint`: medians. Ratio: the median of the best rival by ours, in brackets the "
        "lowest and highest within a round. Each transport at its best: HTTPTransport with as many chunks as are in "
        "brackets, of 0, 2 and 4, PGTransport over gloo, and in place where the line says so, which HTTPTransport "
        "cannot. Ours verifies all it receives.",
        f'Memory that the bytes come into: "backed" was released by another process right before '
        f"({memory['backed']:.2g} GB/s). {cold}.",
    ]
    raw = [
        f"{row['title']} {_number(spread_['median'] * 1e3)} ms"
        for row in results["rows"]
        if (spread_ := row["summary"]["raw_seconds"].get("touched_2"))
    ]
    if raw:
        notes.append(f"Two raw sockets into touched memory, without checksums: {', '.join(raw)}.")
    refused = {f"{title(c)}: {why}" for row in results["rows"] for c, why in row["summary"]["refused"].items()}
    notes += [f"Refused by {each}." for each in sorted(refused)]
    behind = slower(results)
    notes.append(f"Slower than the best rival: {'; '.join(behind)}." if behind else "Slower than a rival: no line.")
    return notes


def _setting(results: dict[str, Any]) -> str:
    facts, options = results["machine"], results["options"]
    busy = max(facts["others_busy"], default=0.0)
    others = f"; other work kept up to {busy:.0%} of the cores busy" if busy > QUIET else ""
    scale = "" if options["scale"] == 1 else f"; states shrunk to {options['scale']:g} of the sizes named"
    ours = f", tensorferry {facts[OURS]}" if facts[OURS] else ""
    return (
        f"{facts['cores']} cores ({facts['cpu']}), Linux {facts['kernel']}, Python {facts['python']}, "
        f"torch {facts['torch']}, torchft {facts[THEIRS]}{ours}; {options['rounds']} interleaved rounds over "
        f"loopback{scale}{others}"
    )


def _aligned(cells: list[list[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in cells if i < len(line)) for i in range(len(cells[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=False)).rstrip() for line in cells]


def _piped(cells: list[list[str]]) -> list[str]:
    head, *lines = cells
    out = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return out + ["| " + " | ".join(line + [""] * (len(head) - len(line))) + " |" for line in lines]


def _table(results: dict[str, Any]) -> list[list[str]]:
    return [_HEAD, *(_cells(line) for line in table_lines(results))]


def as_text(results: dict[str, Any]) -> str:
    """Return the table for a terminal."""
    return "\n".join([_setting(results), "", *_aligned(_table(results)), "", *_notes(results)]) + "\n"


def as_markdown(results: dict[str, Any]) -> str:
    """Return the table for a README."""
    notes = [line for note in _notes(results) for line in ("", note)]
    return "\n".join([f"{_setting(results)}.", "", *_piped(_table(results)), *notes]) + "\n"


def details_as_text(results: dict[str, Any]) -> str:
    """Return everything that was measured, for a terminal."""
    return "\n".join(line for title_, cells in _details(results) for line in ("", title_, *_aligned(cells))) + "\n"


def details_as_markdown(results: dict[str, Any]) -> str:
    """Return everything that was measured, for the docs."""
    out = [f"{_setting(results)}."]
    for title_, cells in _details(results):
        out += ["", f"**{title_}**", "", *_piped(cells)]
    return "\n".join(out) + "\n"
