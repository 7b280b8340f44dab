"""Boxes of elements, which parts of tensors are, and whether several make up a whole; torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

#: What is larger than any size, and how many dimensions a tensor has at most.
_MOST, _DIMENSIONS = 2**63, 64


class Box(NamedTuple):
    """A part of a tensor: where it begins in each dimension, and how far it reaches."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box | None:
        """Returns the part that both have in common, or ``None``. A scalar has one element in common with itself."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, end = max(a, b), min(a + n, b + m)
            if start >= end:
                return None
            offsets.append(start)
            sizes.append(end - start)
        return Box(tuple(offsets), tuple(sizes))

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{a + n}' for a, n in zip(self.offsets, self.sizes, strict=True))}]"


def crossings(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yields the numbers of each two boxes that have elements in common."""
    numbers = [number for number, box in enumerate(boxes) if box.numel]
    if len(numbers) < 2:
        return
    # Sweeps along the dimension with the most different offsets, so that few boxes are active at a time.
    dims = range(len(boxes[0].offsets))
    sweep = max(dims, key=lambda dim: len({boxes[number].offsets[dim] for number in numbers}), default=None)
    if sweep is not None:
        numbers.sort(key=lambda number: boxes[number].offsets[sweep])
    active: list[int] = []
    for number in numbers:
        offsets, sizes = boxes[number]
        if sweep is not None:
            at = offsets[sweep]
            active = [other for other in active if boxes[other].offsets[sweep] + boxes[other].sizes[sweep] > at]
        for other in active:
            sides = zip(offsets, sizes, *boxes[other], strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in sides):
                yield other, number
        active.append(number)


def why_not_whole(shape: Sequence[int], boxes: Sequence[Box], owners: Sequence[str]) -> str | None:
    """Returns why ``boxes`` do not have each element of a tensor exactly once; ``None`` if they do.

    Args:
        shape: the shape of the tensor
        boxes: its parts
        owners: for each of them, how the text names who has it
    """
    for box, owner in zip(boxes, owners, strict=True):
        if len(box.sizes) != len(shape) or any(a + n > dim for a, n, dim in zip(*box, shape, strict=True)):
            return f"{owner} has {box}, which is no part of the shape {list(shape)}"
    for one, other in crossings(boxes):
        return f"{owners[one]} has {boxes[one]}, {owners[other]} has {boxes[other]}, and they overlap"
    covered, total = sum(box.numel for box in boxes), math.prod(shape)
    if covered == total:
        return None
    those = ", ".join(dict.fromkeys(owner for box, owner in zip(boxes, owners, strict=True) if box.numel))
    return f"{covered} of the {total} elements of its shape {list(shape)} are there, in {those or 'no part'}"


def checked_size(number: Any) -> int:
    """Returns a size, offset or stride from a peer or a file.

    Raises:
        ValueError: it cannot be one
    """
    if type(number) is not int or not 0 <= number < _MOST:
        raise ValueError("a number in it cannot be a size or an offset")
    return number


def checked_sizes(numbers: Any) -> list[int]:
    """Returns a shape, or the offsets of a part, from a peer or a file.

    Raises:
        ValueError: no tensor has such a shape
    """
    whole = [checked_size(number) for number in numbers]
    # With eight bytes for an element. A dimension of size 0 counts as 1, since strides are computed like that.
    if math.prod([max(number, 1) for number in whole]) >= _MOST // 8 or len(whole) > _DIMENSIONS:
        raise ValueError("a shape in it is too large for a tensor")
    return whole
