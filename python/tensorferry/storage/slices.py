"""Slices of container entries, expressed as runs of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

#: Bytes requested along with a container's header. Who reads slices does not need most of what follows it.
AHEAD = 64 << 10

#: ``(entry, dtype, nbytes, start, run, address, repeats)``, as the native module takes it: of the ``entry``, its name
#: or its number in the header, with this dtype and length, runs of ``run`` bytes, the first one from byte ``start`` to
#: memory ``address``; ``repeats`` is as :func:`runs` returns it.
SliceTuple: TypeAlias = tuple[str | int, str, int, int, int, int, list[tuple[int, int, int]]]


def nbytes_of(slices: Iterable[SliceTuple]) -> int:
    """Returns how many bytes slices bring to memory."""
    return sum(run * math.prod(repeat[0] for repeat in repeats) for _, _, _, _, run, _, repeats in slices)


def contiguous_strides(shape: list[int], size: int) -> list[int]:
    """Returns the strides, in bytes, of a contiguous tensor of this shape with elements of ``size`` bytes, as torch."""
    strides = []
    for dim in reversed(shape):
        strides.append(size)
        size *= max(dim, 1)
    return strides[::-1]


def runs(lengths: list[int], strides: list[int], to: list[int], size: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Expresses the copy of a box of elements as runs of contiguous bytes.

    Args:
        lengths: elements of the box in each dimension
        strides: bytes from one element to the next in each dimension, in the entry
        to: the same in the destination
        size: bytes of one element

    Returns:
        The length of a run in bytes, and ``(count, from, to)`` for each level of repetition, the innermost last: how
        often it repeats, and the bytes from one repetition to the next in the entry and in the destination.
    """
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
