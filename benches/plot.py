"""Draws the table: for each line how fast every transport is beside torchft's faster one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from report import COLUMNS, table_lines

if TYPE_CHECKING:
    from pathlib import Path

#: Colour and marker of each column of the table: both torchft's in grey and orange, both of ours in blue and green.
_STYLES = dict(zip(COLUMNS, (("#8c8c8c", "s"), ("#e08214", "D"), ("#1f5fbf", "o"), ("#1b9e77", "^")), strict=True))

#: What the words in brackets say of the memory that the bytes come into.
_MEMORY = (
    "backed: fresh, and just released by another process; cold: fresh, and taken back by the machine's host before;\n"
    "used before: the process's own of its first receive; its own: the tensors of the live state, in place"
)


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the chart as a PNG; whiskers reach from the lowest to the highest ratio within a round."""
    mpl.use("Agg")
    from matplotlib import pyplot, ticker

    lines = table_lines(results)
    figure, axes = pyplot.subplots(figsize=(9.5, 1.4 + 0.42 * len(lines)))
    for at, line in enumerate(lines):
        rivals = [line.seconds[column] for column in COLUMNS[:2] if column in line.seconds]
        if not rivals:
            continue
        best = min(rivals)
        places = [column for column in COLUMNS if column in line.seconds]
        for column in places:
            colour, marker = _STYLES[column]
            y = at + {COLUMNS[2]: -0.14, COLUMNS[3]: 0.14}.get(column, 0.0)
            speed = best / line.seconds[column]
            if ratio := line.ratios.get(column):
                speed = ratio["median"]
                axes.plot([ratio["low"], ratio["high"]], [y, y], color=colour, linewidth=1.6, alpha=0.5, zorder=2)
            axes.plot(speed, y, marker=marker, color=colour, markersize=7, linestyle="none", zorder=3)
    axes.axvline(1.0, color="#333", linewidth=0.8)
    for column, (colour, marker) in _STYLES.items():
        axes.plot([], [], marker=marker, color=colour, linestyle="none", label=column)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_yticks(range(len(lines)), [f"{line.title} ({line.memory})" for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlabel("speed of recv_checkpoint; the better of torchft's two transports = 1\n" + _MEMORY, fontsize=9)
    figure.legend(*axes.get_legend_handles_labels(), ncols=4, frameon=False, loc="upper center")
    axes.grid(axis="x", which="major", color="#ddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
