"""What the verbs print: results to standard output, everything else to standard error.

Names of tensors, paths and messages may come from a hostile file or peer. What is printed of them passes through
:func:`clean` first, or is JSON in ASCII, so that no escape sequence in them reaches the terminal.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

#: The longest text of others that is printed in one piece, in characters.
_LONGEST = 2000
#: The widest column of a table; a longer cell moves what is right of it.
_WIDEST = 120
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


def amount(nbytes: float) -> str:
    """Returns a number of bytes for people, in decimal units as disks and networks have them: ``"1.5 GB"``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def is_terminal() -> bool:
    """Whether standard error is a terminal that can redraw a line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
