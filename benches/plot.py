"""Draws the results: how many times faster than torchft's best each contender receives each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from contenders import OURS
from report import title

if TYPE_CHECKING:
    from pathlib import Path

_GAP = 0.16  # between rows, as a share of a row's place


def _bars(results: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the lines to draw of each row, torchft's first; of torchft's only those of the first receive."""
    rows = []
    for row in results["rows"]:
        lines = [line for line in row["summary"]["lines"] if line["speedup"]]
        shown = [line for line in lines if line["contender"].startswith(OURS) or line["order"] == "first"]
        rows.append(sorted(shown, key=_identity))
    return rows


def _identity(line: dict[str, Any]) -> tuple[bool, str, str]:
    return line["contender"].startswith(OURS), line["contender"], line["order"]


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the bar chart as a PNG; whiskers reach from the lowest to the highest round."""
    mpl.use("Agg")
    from matplotlib import pyplot

    rows = _bars(results)
    kinds = sorted({_identity(line) for row in rows for line in row})
    colours = {}
    for ours, map_name in ((False, "Greys"), (True, "Blues")):
        family = [kind for kind in kinds if kind[0] == ours]
        for i, kind in enumerate(family):
            colours[kind] = pyplot.get_cmap(map_name)(0.35 + 0.5 * (i + 1) / len(family))
    figure, axes = pyplot.subplots(figsize=(2.5 + 2.0 * len(rows), 5))
    width = (1 - _GAP) / max(map(len, rows), default=1)
    labelled = set()
    for at, row in enumerate(rows):
        for i, line in enumerate(row):
            kind, speed = _identity(line), line["speedup"]
            bar = axes.bar(
                at + (i - (len(row) - 1) / 2) * width,
                speed["median"],
                width * 0.94,
                yerr=[[speed["median"] - speed["low"]], [speed["high"] - speed["median"]]],
                label=title(line) if kind not in labelled else None,
                color=colours[kind],
                ecolor="#444",
                capsize=2,
            )
            labelled.add(kind)
            if kind[0]:
                axes.bar_label(bar, [f"{speed['median']:.1f}x"], padding=2, fontsize=8)
    axes.axhline(1.0, color="#c0392b", linewidth=1, linestyle="--")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_xticks(range(len(rows)), [row["title"] for row in results["rows"]])
    axes.set_ylabel("receive speed, torchft's best chunk count = 1")
    axes.set_title("recv_checkpoint against torchft's HTTPTransport: median, lowest and highest round")
    axes.legend(fontsize=8, ncols=2, frameon=False, loc="upper left")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
