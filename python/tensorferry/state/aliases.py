"""Which leaves of a state share memory, found by address, and whether the leaves of two states share theirs alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch

from ..memory.tensors import byte_span
from .tree import Flat


class Layout(NamedTuple):
    """How a leaf looks into memory that it shares.

    Attributes:
        leaf: its number in the tree
        offset: bytes from the first shared byte to its first element
        strides: bytes from one element to the next in each dimension, 0 in dimensions of one element
        bits: 1 if its elements are the conjugates of what is in memory, plus 2 if they are the negatives
    """

    leaf: int
    offset: int
    strides: tuple[int, ...]
    bits: int

    def looks_like(self, other: Layout) -> bool:
        """Whether both find the same elements if they begin at the same place."""
        return self.strides == other.strides and self.bits == other.bits

    def is_at(self, other: Layout) -> bool:
        """Whether both find the same elements in one memory."""
        return self.offset == other.offset and self.looks_like(other)


#: Leaves that share memory, each group apart from all others. A leaf that shares memory with itself is a group, too.
Groups: TypeAlias = list[list[Layout]]


class Memory:
    """Where the tensors of a state lie. It holds their storages: no other tensor can get the same memory meanwhile.

    Attributes:
        groups: those that share memory
    """

    def __init__(self, flat: Flat) -> None:
        """Looks at every tensor among the leaves of ``flat``."""
        self._flat = flat
        self._starts: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []
        spaces: dict[str, int] = {"cpu": 0}
        spans, folded = [], []
        for number in [*range(-len(flat.objects), 0), *flat.accelerated]:
            value = flat.leaf(number)
            found = _reach(value) if isinstance(value, torch.Tensor) else None
            if found is None:
                continue
            storage, start, end = found
            self._storages.append(storage)
            self._starts[number] = start
            spans.append((number, spaces.setdefault(str(storage.device), len(spaces)), start, end))
            if _folds(value):
                folded.append(number)
        groups = flat.rows.overlapping(spans, flat.accelerated)
        shared = {number for group in groups for number in group}
        groups += [[number] for number in folded if number not in shared]
        self.groups: Groups = [self._group(numbers) for numbers in groups]

    def start(self, number: int) -> int:
        """Where the first element of a tensor lay when it was looked at; 0 where that cannot be told."""
        start = self._starts.get(number, 0)
        return start if start or number < 0 else self._flat.rows.address(number)

    def has_moved(self, number: int) -> bool:
        """Whether a tensor lies elsewhere now: somebody has given it other memory."""
        start, value = self.start(number), self._flat.leaf(number)
        return bool(start) and (value if number >= 0 else _local(value)).data_ptr() != start

    def layout(self, number: int, origin: int) -> Layout:
        """How the tensor looks into memory that begins at ``origin``."""
        value = _local(self._flat.leaf(number))
        size = value.element_size()
        strides = tuple(step * size if dim > 1 else 0 for step, dim in zip(value.stride(), value.shape, strict=True))
        return Layout(number, self.start(number) - origin, strides, value.is_conj() + 2 * value.is_neg())

    def _group(self, numbers: list[int]) -> list[Layout]:
        origin = min(self.start(number) for number in numbers)
        return [self.layout(number, origin) for number in numbers]


#: A leaf of the receiver and the leaf of the source whose values it gets.
Landed: TypeAlias = tuple[int, int]


def clashes(
    flat: Flat, memory: Memory, theirs: Groups, landed: dict[int, int], twice: list[tuple[Landed, Landed]]
) -> Iterator[tuple[Landed, Landed]]:
    """The leaves of the receiver that would not keep what they get, because others share their memory.

    Two of them may share memory if the leaves of the source share theirs alike: then both get the same values there.
    What the source shares and the receiver does not is no clash: the values are written to each place.

    Args:
        flat: the receiver's state
        memory: of its leaves
        theirs: which leaves of the source share memory
        landed: each leaf of the receiver that gets the values of a leaf of the source, and which one
        twice: leaves of the receiver that get the values of two leaves of the source

    Yields:
        Two that clash; the same one twice if several of its elements share memory
    """
    there = {layout.leaf: (number, layout) for number, group in enumerate(theirs) for layout in group}
    for one, two in twice:
        layout = memory.layout(one[0], 0)
        if not _alike((layout, one[1]), (layout, two[1]), there):
            yield one, two
    for group in memory.groups:
        members = [(layout, landed[layout.leaf]) for layout in group if layout.leaf in landed]
        apart = {_apart(layout, leaf, there) for layout, leaf in members}
        if len(apart) > 1 or None in apart:
            yield from _within(flat, sorted(members, key=lambda member: member[0].offset), there)


#: Number of the group and layout of each leaf of the source that shares memory.
_There: TypeAlias = dict[int, tuple[int, Layout]]


def _apart(here: Layout, leaf: int, there: _There) -> tuple[int, int] | None:
    """How far the source's leaf is from ours, in which group; ``None`` if it looks into memory in another way."""
    number, layout = there.get(leaf, (0, None))
    return (number, layout.offset - here.offset) if layout is not None and layout.looks_like(here) else None


def _alike(one: tuple[Layout, int], two: tuple[Layout, int], there: _There) -> bool:
    """Whether two leaves of the receiver that share memory get the same values there."""
    (here, leaf), (other_here, other_leaf) = one, two
    if here.is_at(other_here):
        if leaf == other_leaf:
            return True
        known, other_known = there.get(leaf), there.get(other_leaf)
        if known and other_known and known[0] == other_known[0] and known[1].is_at(other_known[1]):
            return True
    apart = _apart(here, leaf, there)
    return apart is not None and apart == _apart(other_here, other_leaf, there)


def _within(flat: Flat, members: list[tuple[Layout, int]], there: _There) -> Iterator[tuple[Landed, Landed]]:
    """The clashes among members of a group, which are in the order of their offsets."""
    active: list[tuple[int, tuple[Layout, int]]] = []
    for member in members:
        layout, leaf = member
        value = flat.leaf(layout.leaf)
        if _folds(value) and _apart(layout, leaf, there) is None:
            yield (layout.leaf, leaf), (layout.leaf, leaf)
        active = [other for other in active if other[0] > layout.offset]
        for _, other in active:
            before, at = other[0], layout.offset - other[0].offset
            if not _alike(member, other, there) and _meet(flat.leaf(before.leaf), value, at):
                yield (before.leaf, other[1]), (layout.leaf, leaf)
        active.append((layout.offset + _extent(value), member))


def _local(value: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory ``value`` has."""
    return getattr(value, "_local_tensor", value)


def _reach(value: torch.Tensor) -> tuple[torch.UntypedStorage, int, int] | None:
    """Its storage, and the first and last byte (exclusive) that it can reach; ``None`` if it has none, or hides it."""
    try:
        local = _local(value)
        span = None if local.is_quantized else byte_span(local)
        if span is None or span[0] == span[1]:
            return None
        storage = local.untyped_storage()
        start = storage.data_ptr()
    except Exception:  # Subclasses may have no storage, or one without memory, and say so in any way they like.
        return None
    return (storage, start + span[0], start + span[1]) if start and span[1] <= storage.nbytes() else None


def _steps(value: torch.Tensor) -> list[tuple[int, int]]:
    """Of each dimension of more than one element: the bytes of a step, and how many elements there are."""
    local = _local(value)
    size = local.element_size()
    return [(step * size, dim) for step, dim in zip(local.stride(), local.shape, strict=True) if dim > 1]


def _extent(value: torch.Tensor) -> int:
    """Bytes from the first to the last one of its elements."""
    return sum([(dim - 1) * step for step, dim in _steps(value)], int(_local(value).element_size()))


def _folds(value: torch.Tensor) -> bool:
    """Whether two elements of ``value`` may be at one place."""
    end = _local(value).element_size()
    for step, dim in sorted(_steps(value)):
        if step < end:
            return True
        end = step * dim
    return False


def _meet(first: torch.Tensor, second: torch.Tensor, at: int) -> bool:
    """Whether two tensors, of which the second begins ``at`` bytes behind the first, have a byte in common.

    It is exact where both are boxes in one grid, as the columns of a matrix are, or every other element of a vector.
    Elsewhere they are said to meet if one begins before the other ends.
    """
    grid = sorted({1, *(step for value in (first, second) for step, _ in _steps(value))}, reverse=True)
    if grid[-1] == 0 or any(outer % inner for outer, inner in itertools.pairwise(grid)):
        return True
    one, two = _box(first, 0, grid), _box(second, at, grid)
    for box in (one, two):
        sizes = zip(grid, grid[1:], box[1:], strict=False)
        if any(end * inner > outer for outer, inner, (_, end) in sizes):
            return True
    return all(a < d and c < b for (a, b), (c, d) in zip(one, two, strict=True))


def _box(value: torch.Tensor, at: int, grid: list[int]) -> list[tuple[int, int]]:
    """First and last place (exclusive) in each dimension of a grid with these steps, the last of which is one byte."""
    lengths = dict.fromkeys(grid, 1)
    lengths[1] = _local(value).element_size()
    for step, dim in _steps(value):
        lengths[step] += dim - 1
    box = []
    for step in grid:
        place, at = divmod(at, step)
        box.append((place, place + lengths[step]))
    return box
