"""From raw samples to medians, spreads and ratios, and from those to tables and a plot."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from contenders import OURS, THEIRS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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


def _by_round(samples: list[Sample], contender: str, value: Callable[[Sample], float | None]) -> dict[int, float]:
    mine = (sample for sample in samples if sample["contender"] == contender and "error" not in sample)
    found = {sample["round"]: value(sample) for sample in mine}
    return {number: got for number, got in found.items() if got is not None}


def _seconds(order: str) -> Callable[[Sample], float | None]:
    return lambda sample: sample.get(f"{order}_s")


def _pairs(above: dict[int, float], below: dict[int, float]) -> dict[str, float] | None:
    """Return the spread of above/below, round by round: only samples of one round are divided by each other."""
    return spread(above[number] / below[number] for number in above if number in below)


def _raw(sample: Sample, *kinds: str) -> float:
    return min(sample[f"{kind}_{streams}_s"] for kind in kinds for streams in _STREAMS)


def best_of_theirs(samples: list[Sample], order: str) -> str | None:
    """Return the torchft contender whose median is lowest."""
    medians = {}
    for name in dict.fromkeys(sample["contender"] for sample in samples):
        seconds = _by_round(samples, name, _seconds(order))
        if name.startswith(THEIRS) and seconds:
            medians[name] = statistics.median(seconds.values())
    return min(medians, key=medians.__getitem__) if medians else None


def summarise_transfers(samples: list[Sample], floors: list[Sample]) -> dict[str, Any]:
    """Return a line per contender and order of receive, each compared with torchft's best and with raw sockets."""
    best = {order: best_of_theirs(samples, order) for order in _ORDERS}
    floors = [sample for sample in floors if "error" not in sample]
    raw_fresh = {sample["round"]: _raw(sample, "fresh", "huge") for sample in floors}
    raw_touched = {sample["round"]: _raw(sample, "touched") for sample in floors}
    lines = []
    for order in _ORDERS:
        theirs = _by_round(samples, best[order], _seconds(order)) if best[order] else {}
        for name in dict.fromkeys(sample["contender"] for sample in samples):
            seconds = _by_round(samples, name, _seconds(order))
            if not seconds:
                continue
            good = [s for s in samples if s["contender"] == name and "error" not in s]
            nbytes, tensors = good[0]["bytes"], good[0]["tensors"]
            median = statistics.median(seconds.values())
            send = spread(sample["send_s"] for sample in good)
            lines.append(
                {
                    "contender": name,
                    "order": order,
                    "seconds": spread(seconds.values()),
                    "gb_per_s": nbytes / median / 1e9,
                    "us_per_tensor": median / tensors * 1e6,
                    "send_seconds": send,
                    "send_us_per_tensor": send["median"] / tensors * 1e6 if send else None,
                    "cold_seconds": spread(sample["cold_s"] for sample in good),
                    "speedup": _pairs(theirs, seconds),
                    "of_raw_fresh": _pairs(raw_fresh, seconds),
                    "of_raw_touched": _pairs(raw_touched, seconds),
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
    return {"torchft_best": best, "lines": lines, "raw_seconds": raw_lines}


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


def title(line: dict[str, Any]) -> str:
    name = line["contender"].replace("+network", ", network").replace("+inplace", ", in place")
    if name.startswith(f"{THEIRS}:"):
        name = f"{THEIRS}, {name.partition(':')[2]} chunks"
    return name if line["order"] == "first" else f"{name}, again"


_TRANSFER_HEAD = ["", "receive ms", "GB/s", "us/tensor", "x torchft's best", "of raw touched", "of raw fresh"]
_TRANSFER_HEAD += ["send ms", "send us/tensor", "peak: source", "receiver"]
_STALL_HEAD = ["", "worst gap unloaded ms", "during send ms", "while serving ms", "less the host's pauses ms", "rate"]


def _transfer_cells(line: dict[str, Any]) -> list[str]:
    def times_state(peak: dict[str, float] | None) -> str:
        return f"+{peak['high']:.2f}x" if peak else "-"

    return [
        title(line),
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


def _raw_cells(name: str, seconds: dict[str, float], nbytes: int) -> list[str]:
    kind, streams = name.split("_")
    name = f"raw sockets, {streams} stream{'s' if streams == '2' else ''}, {_RAW_KINDS[kind]}"
    return [name, _show(seconds, 1e3), _number(nbytes / seconds["median"] / 1e9)]


def _stall_cells(line: dict[str, Any]) -> list[str]:
    fields = ("unloaded_worst_s", "sending_worst_s", "serving_worst_s", "serving_awake_s")
    name = title({"contender": line["contender"], "order": "first"})
    return [name, *(_show(line[field], 1e3) for field in fields), _show(line["serving_rate"])]


def _tables(results: dict[str, Any]) -> Iterable[tuple[str, list[list[str]]]]:
    for row in results["rows"]:
        summary = row["summary"]
        cells = [_TRANSFER_HEAD]
        cells += [_transfer_cells(line) for line in summary["lines"]]
        cells += [_raw_cells(k, v, row["bytes"]) for k, v in summary["raw_seconds"].items() if v]
        yield f"{row['title']}: {row['bytes'] / 1e6:.6g} MB in {row['tensors']:,} tensors", cells
    for name in dict.fromkeys(line["row"] for line in results["stall_summary"]):
        cells = [_STALL_HEAD, *(_stall_cells(line) for line in results["stall_summary"] if line["row"] == name)]
        yield f"The source's main loop, {name}", cells


def _setting(results: dict[str, Any]) -> str:
    facts, options = results["machine"], results["options"]
    busy = max(facts["others_busy"], default=0.0)
    others = f"; other work kept up to {busy:.0%} of the cores busy" if busy > QUIET else ""
    scale = "" if options["scale"] == 1 else f"; states shrunk to {options['scale']:g} of the sizes named"
    ours = f", tensorferry {facts[OURS]}" if facts[OURS] else ""
    return (
        f"{facts['cores']} cores ({facts['cpu']}), Linux {facts['kernel']}, Python {facts['python']}, "
        f"torch {facts['torch']}, torchft {facts[THEIRS]}{ours}; medians (lowest-highest) of "
        f"{options['rounds']} interleaved rounds over loopback{scale}{others}"
    )


def as_text(results: dict[str, Any]) -> str:
    """Return the tables for a terminal."""
    out = [_setting(results)]
    for title, cells in _tables(results):
        widths = [max(len(line[i]) for line in cells if i < len(line)) for i in range(len(cells[0]))]
        out.append(f"\n{title}")
        out += ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=False)).rstrip() for line in cells]
    return "\n".join(out) + "\n"


def as_markdown(results: dict[str, Any]) -> str:
    """Return the tables for a README."""
    out = [f"{_setting(results)}."]
    for title, cells in _tables(results):
        head, *lines = cells
        out += ["", f"**{title}**", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        out += ["| " + " | ".join(line + [""] * (len(head) - len(line))) + " |" for line in lines]
    return "\n".join(out) + "\n"
