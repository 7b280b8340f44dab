"""Reads boxes of stored tensors into tensors: directly where that is possible, else through temporary memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..memory.tensors import address, byte_strides, memory_for_bytes, scratch, view_as
from ..storage.slices import SliceTuple, contiguous_strides, runs

#: Runs of fewer bytes than this are not read one by one: all bytes from the first run to the last are read into a
#: temporary buffer, and torch copies the elements out of it.
_SHORT_RUN = 256
#: Bytes of temporary memory at most, unless one item needs more.
_SCRATCH = 256 << 20


class Entry(NamedTuple):
    """An entry of a container: the container's key, and its name or number, element type and length in bytes."""

    container: Any
    name: str | int
    dtype: str
    nbytes: int


class SliceBatch:
    """Slices that are read together, whenever much temporary memory is held.

    Args:
        read: reads slices, by the key of their container, to their addresses
        follow_up: makes the calls that follow a read
    """

    def __init__(
        self,
        read: Callable[[Mapping[Any, list[SliceTuple]]], object],
        follow_up: Callable[[Iterable[Callable[[], object]]], object] | None = None,
    ) -> None:
        self._read, self._follow_up = read, follow_up or _call_all
        self._slices: dict[Any, list[SliceTuple]] = defaultdict(list)
        self._calls: list[Callable[[], object]] = []
        self._temporary: list[Any] = []
        self._temporary_bytes = 0

    def add_call(self, call: Callable[[], object]) -> None:
        """Makes ``call`` after the next read."""
        self._calls.append(call)

    def add_whole(self, entry: Entry, target: torch.Tensor, done: Callable[[None], object]) -> None:
        """Reads a whole entry directly into ``target``, which is contiguous, and calls ``done``."""
        if entry.nbytes:
            self._add(entry, 0, entry.nbytes, address(target), [])
        self._calls.append(lambda: done(None))

    def add_entry(self, entry: Entry, load: Callable[[bytes], object]) -> None:
        """Reads a whole entry, and calls ``load`` with its bytes."""
        self._make_room(entry.nbytes)
        memory, start = memory_for_bytes(entry.nbytes)
        if entry.nbytes:
            self._add(entry, 0, entry.nbytes, start, [])
        self._calls.append(lambda: load(bytes(memory)))

    def add_box(
        self,
        entry: Entry,
        start: int,
        lengths: list[int],
        strides: Sequence[int],
        target: torch.Tensor,
        dtype: torch.dtype,
        done: Callable[[torch.Tensor | None], object],
        *,
        direct: bool,
    ) -> None:
        """Reads a box of elements.

        Args:
            entry: holds them
            start: the byte at which its first element begins
            lengths: elements of the box in each dimension
            strides: bytes from one element to the next in each dimension
            target: has the shape ``lengths``
            dtype: of the elements
            done: called with ``None`` after a direct read, otherwise with a tensor that has the elements
            direct: whether bytes may be read into the memory of ``target``
        """
        size, strides = dtype.itemsize, list(strides)
        if not math.prod(lengths):
            self._calls.append(lambda: done(None))
            return
        if direct:
            run, repeats = runs(lengths, strides, byte_strides(target), size)
            if run >= _SHORT_RUN or not repeats:
                self._add(entry, start, run, address(target), repeats)
                self._calls.append(lambda: done(None))
                return
        packed = contiguous_strides(lengths, size)
        run, repeats = runs(lengths, strides, packed, size)
        if run < _SHORT_RUN and repeats:
            # Reads one run from the first byte to the last.
            packed, repeats = strides, []
            run = sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True)) + size
        nbytes = run if packed is strides else math.prod(lengths) * size
        self._make_room(nbytes)
        memory = scratch(nbytes)
        self._temporary.append(memory)
        self._add(entry, start, run, address(memory), repeats)
        self._calls.append(lambda: done(view_as(memory, dtype, lengths, packed)))

    def _add(self, entry: Entry, start: int, run: int, to: int, repeats: list[tuple[int, int, int]]) -> None:
        self._slices[entry.container].append((entry.name, entry.dtype, entry.nbytes, start, run, to, repeats))

    def _make_room(self, nbytes: int) -> None:
        """Counts temporary memory that is about to be taken; what was added before is read first if it is much."""
        if self._temporary_bytes and self._temporary_bytes + nbytes > _SCRATCH:
            self.flush()
        self._temporary_bytes += nbytes

    def flush(self) -> None:
        """Reads all slices, and then makes the calls that follow."""
        slices, calls = dict(self._slices), self._calls
        self._slices, self._calls = defaultdict(list), []
        if slices:
            self._read(slices)
        self._follow_up(calls)
        self._temporary.clear()
        self._temporary_bytes = 0


def _call_all(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()
