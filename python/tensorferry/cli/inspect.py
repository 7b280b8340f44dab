"""``tensorferry inspect``: what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path

from . import console, exits
from .flags import Json


def inspect(path: Path, /, *, json: Json = False) -> int:
    """Shows what a checkpoint holds: its tensors with dtypes, shapes and sizes.

    Args:
        path: a file
        json: print one JSON document
    """
    from .._native import Stored

    stored = Stored.open(path, checksums=False)
    rows = zip(stored.names, stored.dtypes, stored.shapes, stored.sizes, strict=True)
    if json:
        console.out_json([{"name": n, "dtype": d, "shape": s, "bytes": b} for n, d, s, b in rows])
    else:
        console.out_table(("name", "dtype", "shape", "bytes"), rows, right=[3])
    return exits.OK
