"""Finds by address which leaves of a state share memory, and compares that sharing between two states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch

from ..memory.tensors import byte_span
from .tree import Flat


class Layout(NamedTuple):
    """How a leaf lies in memory that it shares with other leaves.

    Attributes:
        leaf: its number in the tree
        offset: bytes from the first byte of its group to its first element
        strides: strides in bytes; 0 in dimensions of one element
        bits: 1 if the leaf has the conj bit, plus 2 if it has the neg bit
    """

    leaf: int
    offset: int
    strides: tuple[int, ...]
    bits: int

    def looks_like(self, other: Layout) -> bool:
        """Whether both have the same strides and bits: with the same offset they would have the same elements."""
        return self.strides == other.strides and self.bits == other.bits

    def is_at(self, other: Layout) -> bool:
        """Whether both have the same elements, in one group."""
        return self.offset == other.offset and self.looks_like(other)


#: Groups of leaves that share memory; no two groups share any. A leaf whose own elements share memory is a group, too.
Groups: TypeAlias = list[list[Layout]]


class LeafMemory:
    """The addresses of all tensors among the leaves of a state, as of the constructor's call.

    The object holds the storages, so that no other tensor can get the same memory meanwhile.

    Args:
        flat: the state

    Attributes:
        groups: the leaves that share memory
    """

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._starts: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []
        spaces: dict[str, int] = {"cpu": 0}
        spans = []
        self_overlapping = flat.rows.self_overlapping()
        for number in [*flat.unread, *flat.accelerated]:
            value = flat.leaf(number)
            found = _reach(value)
            if found is None:
                continue
            storage, start, end = found
            self._storages.append(storage)
            self._starts[number] = start
            spans.append((number, spaces.setdefault(str(storage.device), len(spaces)), start, end))
            if _extent(value)[1]:
                self_overlapping.append(number)
        groups = flat.rows.overlapping(spans, flat.accelerated)
        shared = {number for group in groups for number in group}
        groups += [[number] for number in self_overlapping if number not in shared]
        self.groups: Groups = [self._group(numbers) for numbers in groups]

    def start(self, number: int) -> int:
        """Returns the address that a leaf's first element had in the constructor; 0 if it was unknown."""
        return self._starts.get(number, 0) or self._flat.rows.start(number)

    def has_moved(self, number: int) -> bool:
        """Whether a leaf has another address now, because it was given other memory."""
        start, value = self.start(number), self._flat.leaf(number)
        return bool(start) and (value if number >= 0 else _local(value)).data_ptr() != start

    def layout(self, number: int, origin: int) -> Layout:
        """Returns the layout of a leaf, with its offset relative to the address ``origin``."""
        value = _local(self._flat.leaf(number))
        size = value.element_size()
        strides = tuple(step * size if dim > 1 else 0 for step, dim in zip(value.stride(), value.shape, strict=True))
        return Layout(number, self.start(number) - origin, strides, value.is_conj() + 2 * value.is_neg())

    def extent(self, number: int) -> tuple[int, bool]:
        """Returns how many bytes a leaf reaches over, and whether its elements may share memory."""
        return _extent(self._flat.leaf(number))

    def _group(self, numbers: list[int]) -> list[Layout]:
        origin = min(self.start(number) for number in numbers)
        return [self.layout(number, origin) for number in numbers]


#: The number of a receiver's leaf, and of the source's leaf whose values it gets.
Assignment: TypeAlias = tuple[int, int]


def clashes(
    memory: LeafMemory,
    source_groups: Groups,
    assigned: dict[int, int],
    twice: list[tuple[Assignment, Assignment]],
) -> Iterator[tuple[Assignment, Assignment]]:
    """Finds leaves of the receiver that would lose their values, because another leaf that is written shares memory.

    Two of the receiver's leaves may share memory if the source's leaves share theirs in the same way: the shared
    elements then get the same values from both. If only the source's leaves share memory, there is no clash: the values
    are written to both places. Leaves whose spans overlap count as sharing memory, although they may have no byte in
    common, as the columns of a matrix.

    Args:
        memory: the memory of the receiver's leaves
        source_groups: which leaves of the source share memory
        assigned: for each leaf of the receiver that is written, the leaf of the source whose values it gets
        twice: leaves of the receiver that would get the values of two leaves of the source

    Yields:
        Two leaves that clash; the same leaf twice if its own elements share memory
    """
    layouts = {layout.leaf: (number, layout) for number, group in enumerate(source_groups) for layout in group}
    for one, two in twice:
        layout = memory.layout(one[0], 0)
        if not _get_same_values((layout, one[1]), (layout, two[1]), layouts):
            yield one, two
    for group in memory.groups:
        members = [(layout, assigned[layout.leaf]) for layout in group if layout.leaf in assigned]
        shifts = {_shift(layout, leaf, layouts) for layout, leaf in members}
        if len(shifts) < 2 and None not in shifts:
            continue
        # The members whose spans may reach the next one, each with the end of its span.
        active: list[tuple[int, tuple[Layout, int]]] = []
        for member in sorted(members, key=lambda member: member[0].offset):
            layout, leaf = member
            extent, overlaps_itself = memory.extent(layout.leaf)
            if overlaps_itself and _shift(layout, leaf, layouts) is None:
                yield (layout.leaf, leaf), (layout.leaf, leaf)
            active = [other for other in active if other[0] > layout.offset]
            for _, other in active:
                if not _get_same_values(member, other, layouts):
                    yield (other[0].leaf, other[1]), (layout.leaf, leaf)
            active.append((layout.offset + extent, member))


#: For each leaf of the source that shares memory: the number of its group, and its layout.
_Layouts: TypeAlias = dict[int, tuple[int, Layout]]


def _shift(here: Layout, leaf: int, layouts: _Layouts) -> tuple[int, int] | None:
    """Returns the source leaf's group, and its offset minus ours.

    ``None`` if it shares no memory, or has other strides or bits.
    """
    number, layout = layouts.get(leaf, (0, None))
    return (number, layout.offset - here.offset) if layout is not None and layout.looks_like(here) else None


def _get_same_values(one: tuple[Layout, int], two: tuple[Layout, int], layouts: _Layouts) -> bool:
    """Whether two leaves of the receiver that share memory get the same values there."""
    (here, leaf), (other_here, other_leaf) = one, two
    if here.is_at(other_here):
        if leaf == other_leaf:
            return True
        known, other_known = layouts.get(leaf), layouts.get(other_leaf)
        if known and other_known and known[0] == other_known[0] and known[1].is_at(other_known[1]):
            return True
    shift = _shift(here, leaf, layouts)
    return shift is not None and shift == _shift(other_here, other_leaf, layouts)


def _local(value: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that holds the memory of ``value``: the local one of a DTensor, else ``value`` itself."""
    return getattr(value, "_local_tensor", value)


def _reach(value: torch.Tensor) -> tuple[torch.UntypedStorage, int, int] | None:
    """Returns a tensor's storage and the addresses of the first and last byte (exclusive) that it can reach.

    ``None`` if it has no memory, does not reveal it, or its storage no longer has all of it.
    """
    try:
        local = _local(value)
        span = None if local.is_quantized else byte_span(local)
        if span is None or span[0] == span[1]:
            return None
        storage = local.untyped_storage()
        start = storage.data_ptr()
    except Exception:  # Subclasses without a storage, or with one without memory, may raise anything.
        return None
    return (storage, start + span[0], start + span[1]) if start and span[1] <= storage.nbytes() else None


def _extent(value: torch.Tensor) -> tuple[int, bool]:
    """Returns how many bytes ``value`` reaches over, and whether its elements may share memory.

    The latter is true in some cases where they do not.
    """
    local = _local(value)
    end = size = int(local.element_size())
    may_overlap = False
    for step, dim in sorted(zip(local.stride(), local.shape, strict=True)):
        if dim > 1:
            may_overlap |= step * size < end
            end += (dim - 1) * step * size
    return end, may_overlap
