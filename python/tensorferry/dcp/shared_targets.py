"""Which targets of a load share memory with others, so that nothing may be read directly into them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.distributed.checkpoint.planner import ReadItem

from ..memory.tensors import address, byte_strides
from ..storage.boxes import Box, crossings


def without_aliases(targets: list[tuple[ReadItem, torch.Tensor]]) -> list[bool]:
    """Returns for each target whether no other target can share memory with it, of the same tensor or another one.

    Targets that may share memory are not read directly: torch copies them one after the other.
    """
    spans: dict[Any, tuple[int, int]] = {}
    boxes: dict[Any, list[tuple[int, ReadItem]]] = defaultdict(list)
    for number, (item, target) in enumerate(targets):
        key = item.dest_index
        boxes[key].append((number, item))
        if target.device.type == "cpu" and target.layout is torch.strided and target.numel():
            start, size = address(target), target.element_size()
            if target.is_contiguous():
                end = start + target.numel() * size
            else:
                strides = byte_strides(target)
                end = start + sum((n - 1) * stride for n, stride in zip(target.shape, strides, strict=True)) + size
            low, high = spans.get(key, (start, 0))
            spans[key] = (min(low, start), max(high, end))
    alone = [True] * len(targets)
    end, before = 0, None
    for key, (low, high) in sorted(spans.items(), key=lambda entry: entry[1]):
        if low < end:
            for shared in (key, before):
                for number, _ in boxes.get(shared, ()):
                    alone[number] = False
        if high > end:
            end, before = high, key
    for parts in boxes.values():
        for number in _overlapping(parts):
            alone[number] = False
    return alone


def _overlapping(parts: list[tuple[int, ReadItem]]) -> list[int]:
    """Returns the numbers of those parts of one tensor that overlap with another part of it."""
    boxes = [Box(item.dest_offsets, item.lengths) for _, item in parts]
    return [parts[number][0] for pair in crossings(boxes) for number in pair]
