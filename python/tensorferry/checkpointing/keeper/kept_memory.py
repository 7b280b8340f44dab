"""The memory of a kept snapshot, served over HTTP and handed to processes of this machine."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..._native import Server, SharedBuffer, Shelf, Stored
from ...errors import ProtocolError
from ...storage.container import Container
from ..handover import Handover

logger = logging.getLogger("tensorferry")

#: The control entry of a message in which the checksums of a snapshot travel; it is none of the container's.
_DIGESTS = "digests"


class _Lent:
    """What the server holds for as long as somebody reads."""

    def __init__(self, buffers: Sequence[SharedBuffer]) -> None:
        self.buffers = buffers


class KeptMemory:
    """A snapshot's memory, and the shelf it is served from.

    Args:
        server: serves it
        step: the step it is served as
        given: its entries and their memory

    Attributes:
        buffers: how many pieces of memory it has
        digests: the checksums of its blocks, once :meth:`compute_digests` has returned; empty if there are none

    Raises:
        InvalidArgument: the entries make no valid container
        ProtocolError: the manifest among them is not valid
    """

    def __init__(self, server: Server, step: int, given: Handover) -> None:
        self.buffers = len(given.buffers)
        self.digests: bytes | None = None
        self._given: Handover | None = given
        self._stored: Stored | None = Stored.over(given.rows, list(given.control), given.buffers)
        self._shelf: Shelf = server.shelf()
        memory = _Lent(given.buffers)
        self._lent = weakref.ref(memory)
        Container(given.rows, memory, True, given.control).publish(self._shelf, step)

    def url(self, host: str) -> str:
        """Returns the URL by which a receiver fetches the snapshot."""
        return self._shelf.url(host)

    @property
    def is_released(self) -> bool:
        """Whether no receiver can read the memory any more."""
        return self._lent() is None

    def handover(self, kind: str, fields: dict[str, Any]) -> Handover:
        """Returns a message that gives another process access; not to be called after :meth:`withdraw`."""
        assert self._given is not None
        control = [*self._given.control, (_DIGESTS, self.digests or b"")]
        return replace(self._given, kind=kind, fields=fields, control=control)

    def compute_digests(self) -> None:
        """Computes the checksums of the memory as it is now; may be called once, on any thread.

        They are empty if that fails, and after :meth:`withdraw` or :meth:`cut`.
        """
        # For a state of many tensors it is large, and it is not needed again.
        stored, self._stored = self._stored, None
        found: bytes | None = None
        try:
            found = stored.digests() if stored is not None else None
        except Exception:
            logger.exception("a snapshot has no checksums")
        self.digests = found or b""

    def withdraw(self) -> None:
        """Takes no new receivers; those that have begun may finish."""
        self._given = self._stored = None
        self._shelf.withdraw(0)

    def cut(self) -> None:
        """Ends all receives, and the serving of it."""
        self._given = self._stored = None
        self._shelf.close()


def kept_state(given: Handover, owner: object) -> Stored:
    """Returns the snapshot in a message that :meth:`KeptMemory.handover` made, verified when it is fetched.

    One whose checksums could not be computed is not verified.

    Args:
        given: the message
        owner: dropped when the snapshot is not needed any more

    Raises:
        ProtocolError: it is another message
    """
    control = list(given.control)
    if not control or control[-1][0] != _DIGESTS:
        raise ProtocolError("a snapshot came without its checksums")
    _, digests = control.pop()
    return Stored.over(given.rows, control, (given.buffers, owner), digests=digests or None)
