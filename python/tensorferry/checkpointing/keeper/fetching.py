"""Fetches a snapshot that another keeper serves into shared memory."""

from __future__ import annotations

from collections.abc import Callable

from ..._native import Remote, Rows, SharedBuffer
from ...memory.layout import side_by_side


def fetch_snapshot(remote: Remote, before: Callable[[int], object]) -> tuple[Rows, SharedBuffer]:
    """Returns all entries of a snapshot, verified, control entries among them, and the memory in which they lie.

    Args:
        remote: the snapshot
        before: called with the size of the memory before it is taken

    Raises:
        TensorferryError: the snapshot cannot be fetched, or there is no memory for it
    """
    offsets, total = side_by_side(remote.sizes)
    before(max(total, 1))
    buffer = SharedBuffer(max(total, 1))
    remote.fetch([buffer.address + offset for offset in offsets])
    rows = Rows(object, object, {}, native=False)
    for name, dtype, shape, size, offset in zip(
        remote.names, remote.dtypes, remote.shapes, remote.sizes, offsets, strict=True
    ):
        rows.append(buffer, name, dtype, shape, buffer.address + offset, size, 0)
    return rows, buffer
