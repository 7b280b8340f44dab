"""What the verbs print: results to standard output, notes and progress to standard error.

Names of tensors, paths and messages may come from a hostile file or peer. What is printed of them passes through
:func:`clean` first, or is JSON in ASCII, so that no escape sequence in them reaches the terminal.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .._validate import readable

#: The longest text of others that is printed in one piece, in characters.
_LONGEST = 2000
#: The widest column of a table; a longer cell moves what is right of it.
_WIDEST = 120
#: Seconds between two lines about progress where there is no terminal.
_EVERY_S = 5.0
#: Unicode categories of characters that control a terminal, or change how the text around them is shown.
_CONTROLS = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def clean(text: object) -> str:
    """Returns ``text`` on one line without characters that a terminal acts upon; these are shown as escapes.

    What is longer than ``_LONGEST`` characters is cut.
    """
    shown = str(text)
    if len(shown) > _LONGEST:
        shown = f"{shown[:_LONGEST]}..."
    if shown.isascii() and shown.isprintable():
        return shown
    return "".join(_escaped(c) if unicodedata.category(c) in _CONTROLS else c for c in shown)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def out(text: object = "") -> None:
    """Prints one line of a result."""
    print(clean(text), file=sys.stdout)


def note(text: object) -> None:
    """Prints one line that is not part of the result: progress, warnings, errors."""
    _tell(clean(text))


def warn(text: object) -> None:
    """Prints a warning."""
    note(f"tensorferry: warning: {text}")


def note_json(fields: Any) -> None:
    """Prints one JSON document, in ASCII and on one line, that is not part of the result."""
    _tell(json.dumps(fields))


def _tell(line: str) -> None:
    """Prints a line to standard error. If that is full, or its reader has gone, what is told there is lost."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        # What is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def out_json(fields: Any) -> None:
    """Prints a result as one JSON document, in ASCII: on one line, flushed, so that a script can wait for it."""
    print(json.dumps(fields), file=sys.stdout, flush=True)


def out_table(heads: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[int] = ()) -> None:
    """Prints rows in aligned columns, of which those numbered in ``right`` are aligned to the right."""
    cells = [[clean(cell) for cell in row] for row in (heads, *rows)]
    widths = [min(max(map(len, column)), _WIDEST) for column in zip(*cells, strict=True)]
    to_the_right = set(right)
    for row in cells:
        aligned = [
            cell.rjust(width) if number in to_the_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(aligned).rstrip(), file=sys.stdout)


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal that can redraw what it shows."""
    return bool(stream.isatty()) and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def progress(title: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yields what shows how many bytes of how many are here: by a bar on a terminal, by a line now and then elsewhere.

    Args:
        title: what is received
        quiet: show nothing
    """
    if quiet:
        yield lambda *_: None
    elif is_terminal(sys.stderr):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        text = TextColumn("{task.description}", markup=False)
        with Progress(
            text,
            BarColumn(),
            DownloadColumn(),
            Speed(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        ) as bar:
            task = bar.add_task(clean(title), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _lines(title)


def _lines(title: str) -> Callable[[int, int], None]:
    began = last = time.monotonic()
    first: int | None = None

    def show(done: int, total: int) -> None:
        nonlocal first, last
        now = time.monotonic()
        first = done if first is None else first
        if now - last >= _EVERY_S:
            last, rate = now, (done - first) / (now - began)
            left = f", {(total - done) / rate:.0f} s left" if rate > 0 else ""
            share = f"{100 * done / max(total, 1):.0f} %, {readable(done)} of {readable(total)}"
            note(f"{title}: {share}, {readable(rate)}/s{left}")

    return show
