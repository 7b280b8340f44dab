"""The memory of a kept snapshot, served over HTTP and handed to processes of this machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..._native import Rows, Server, SharedBuffer, Shelf
from ...storage.container import Container
from ..handover import Handover


class _Memory:
    """What the server holds for as long as somebody reads."""

    def __init__(self, buffers: Sequence[SharedBuffer]) -> None:
        self.buffers = buffers


class KeptMemory:
    """A snapshot's memory, and the shelf it is served from.

    Args:
        server: serves it
        step: the step it is served as
        rows: its entries, which lie in ``buffers``
        control: name and bytes of each control entry
        buffers: the memory
        released: called once, from any thread, when no receiver reads the memory any more after :meth:`withdraw`
    """

    def __init__(
        self,
        server: Server,
        step: int,
        rows: Rows,
        control: Sequence[tuple[str, bytes]],
        buffers: Sequence[SharedBuffer],
        released: Callable[[], None],
    ) -> None:
        self._content: tuple[Rows, Sequence[tuple[str, bytes]], Sequence[SharedBuffer]] | None = (
            rows,
            control,
            buffers,
        )
        self._shelf: Shelf = server.shelf()
        memory = _Memory(buffers)
        self._gone = weakref.finalize(memory, released)
        self._gone.atexit = False
        Container(rows, memory, True, control).publish(self._shelf, step)

    def url(self, host: str) -> str:
        """Returns what a receiver is given to fetch it."""
        return self._shelf.url(host)

    @property
    def is_released(self) -> bool:
        """Whether no receiver can read the memory any more."""
        return not self._gone.alive

    def handover(self, kind: str, fields: dict[str, Any]) -> Handover:
        """Returns a message that gives another process access; not to be called after :meth:`withdraw`."""
        assert self._content is not None
        rows, control, buffers = self._content
        return Handover(kind, fields, rows, control, buffers)

    def withdraw(self) -> None:
        """Takes no new receivers; those that have begun may finish."""
        self._content = None
        self._shelf.withdraw(0)

    def cut(self) -> None:
        """Ends all receives, and the serving of it."""
        self._content = None
        self._shelf.close()
