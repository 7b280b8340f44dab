"""Fetches a snapshot that another keeper serves into shared memory."""

from __future__ import annotations

from collections.abc import Callable

from ..._native import Remote, Secret, SharedBuffer, Table
from ...errors import ProtocolError
from ...memory.layout import side_by_side
from .cost import Cost, table_size
from .snapshot import Snapshot

#: Bytes that a snapshot may have beyond what the list says: pieces begin at other multiples here.
_SLACK = 1 << 20


def most_described(about: Snapshot) -> int:
    """Returns the most bytes that the header of a snapshot and its control entries can have, by what the list says."""
    return 2 * about.nbytes + 2 * _SLACK


def open_snapshot(about: Snapshot, timeout: float, secret: Secret | None, same_host: bool = True) -> Remote:
    """Opens a snapshot of a keeper's list.

    Raises:
        TensorferryError: it cannot be reached, or announces more than the list says
    """
    return Remote.open(
        [about.metadata],
        about.step,
        timeout=timeout,
        same_host=same_host,
        secret=secret,
        most_described=most_described(about),
    )


def fetch_snapshot(remote: Remote, about: Snapshot, before: Callable[[Cost], object]) -> tuple[Table, SharedBuffer]:
    """Returns all entries of a snapshot, verified, control entries among them, and the memory in which they lie.

    Args:
        remote: the snapshot
        about: what the list says about it
        before: called with what it takes, before any of that is taken

    Raises:
        ProtocolError: it is larger than the list says
        TensorferryError: the snapshot cannot be fetched, or there is no memory for it
    """
    # Before there are objects for each entry.
    if table_size(len(remote), 0, 0) > about.nbytes + _SLACK:
        raise ProtocolError(f"the snapshot has {len(remote)} entries; the list says {about.nbytes} bytes in all")
    offsets, total = side_by_side(remote.sizes)
    total = max(total, 1)
    table = table_size(len(remote), sum(map(len, remote.names)), sum(map(len, remote.shapes)))
    if total > about.nbytes + _SLACK + 64 * len(remote):
        raise ProtocolError(f"the snapshot has {total} bytes; the list says {about.nbytes}")
    before(Cost(total, table))
    buffer = SharedBuffer(total)
    remote.fetch([buffer.address + offset for offset in offsets])
    rows = Table()
    for name, dtype, shape, size, offset in zip(
        remote.names, remote.dtypes, remote.shapes, remote.sizes, offsets, strict=True
    ):
        rows.append(buffer, name, dtype, shape, buffer.address + offset, size, 0)
    return rows, buffer
