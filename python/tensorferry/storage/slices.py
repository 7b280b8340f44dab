"""Slices of entries as runs of bytes."""

from __future__ import annotations

from typing import TypeAlias

#: ``(entry, dtype, nbytes, start, run, address, repeats)``, as the native module wants it.
SliceTuple: TypeAlias = tuple[str, str, int, int, int, int, list[tuple[int, int, int]]]


def contiguous_strides(shape: list[int], size: int) -> list[int]:
    """The strides, in bytes, of elements that lie one after the other."""
    strides = []
    for dim in reversed(shape):
        strides.append(size)
        size *= dim
    return strides[::-1]


def runs(lengths: list[int], strides: list[int], to: list[int], size: int) -> tuple[int, list[tuple[int, int, int]]]:
    """A box of elements as runs of bytes: the length of one, and ``(count, from, to)`` where it repeats."""
    dims = [(n, a, b) for n, a, b in zip(lengths, strides, to, strict=True) if n > 1]
    run = size
    while dims and dims[-1][1] == run and dims[-1][2] == run:
        run *= dims.pop()[0]
    repeats: list[tuple[int, int, int]] = []
    for n, a, b in reversed(dims):
        if repeats:
            inner, by, into = repeats[-1]
            if (a, b) == (inner * by, inner * into):
                repeats[-1] = (n * inner, by, into)
                continue
        repeats.append((n, a, b))
    return run, repeats[::-1]
