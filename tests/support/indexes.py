"""Indexes of distributed checkpoints, taken apart into their columns and put together with anything in them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from tensorferry.dcp import index

BEGINNING = b"TFINDEX1\1\0\0\0"
TEXTS = ("keys", "paths", "dtypes")
NUMBERS = (
    *("dtype", "flags", "dims", "shape", "strides", "chunks", "boxes", "file", "entry", "bytes", "kind", "layout"),
    *("owner", "planner"),
)


def taken_apart(data: bytes) -> dict[str, list[Any]]:
    """Returns the columns of an index."""
    assert data.startswith(BEGINNING)
    at = len(BEGINNING)

    def numbers() -> list[int]:
        nonlocal at
        width, count = data[at], int.from_bytes(data[at + 1 : at + 9], "little")
        rows = [data[n : n + width] for n in range(at + 9, at + 9 + count * width, width)]
        at += 9 + count * width
        return [int.from_bytes(row, "little") for row in rows]

    def texts() -> list[str]:
        nonlocal at
        shared, lengths, rows = numbers(), numbers(), [b""]
        for common, length in zip(shared, lengths, strict=True):
            rows.append(rows[-1][:common] + data[at : at + length])
            at += length
        return [row.decode() for row in rows[1:]]

    columns: dict[str, list[Any]] = {name: texts() for name in TEXTS}
    columns |= {name: numbers() for name in NUMBERS}
    assert at == len(data)
    return columns


def put_together(columns: dict[str, list[Any]]) -> bytes:
    """Returns the index with these columns."""

    def numbers(rows: list[int]) -> bytes:
        return b"\x08" + struct.pack(f"<{len(rows) + 1}Q", len(rows), *(row % 2**64 for row in rows))

    def texts(rows: list[Any]) -> bytes:
        encoded = [row if isinstance(row, bytes) else row.encode() for row in rows]
        return numbers([0] * len(rows)) + numbers([len(row) for row in encoded]) + b"".join(encoded)

    parts = [texts(columns[name]) for name in TEXTS] + [numbers(columns[name]) for name in NUMBERS]
    return BEGINNING + b"".join(parts)


def written_with(monkeypatch: Any, change: Callable[[dict[str, list[Any]]], object]) -> None:
    """Applies ``change`` to the columns of the indexes that writers write."""
    encode = index.encode

    def changed(*given: Any) -> bytes:
        columns = taken_apart(encode(*given))
        change(columns)
        return put_together(columns)

    monkeypatch.setattr(index, "encode", changed)
