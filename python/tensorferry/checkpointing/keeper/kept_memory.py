"""The memory of a kept snapshot, served over HTTP and handed to processes of this machine."""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..._native import Server, SharedBuffer, Shelf, Stored, Table
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
        rows: its entries, which lie in ``buffers``
        control: name and bytes of each control entry
        buffers: the memory
        run_soon: has the keeper's thread call something

    Attributes:
        when_released: called once, on the keeper's thread, when no receiver reads the memory any more after
            :meth:`withdraw`
        buffers: how many pieces of memory it has
        files: device and inode of each piece, by which the mappings of a process show whether it can write to it
        digests: the checksums of its blocks, once :class:`Digester` has computed them; empty if that was not possible

    Raises:
        InvalidArgument: the entries make no valid container
        ProtocolError: the manifest among them is not valid
    """

    def __init__(
        self,
        server: Server,
        step: int,
        rows: Table,
        control: Sequence[tuple[str, bytes]],
        buffers: Sequence[SharedBuffer],
        run_soon: Callable[[Callable[[], object]], None],
    ) -> None:
        self.when_released: Callable[[], None] = lambda: None
        self.buffers = len(buffers)
        self.files = frozenset((about.st_dev, about.st_ino) for about in map(os.fstat, (b.fileno() for b in buffers)))
        self.digests: bytes | None = None
        self._content: tuple[Table, Sequence[tuple[str, bytes]], Sequence[SharedBuffer]] | None = (
            rows,
            control,
            buffers,
        )
        self._stored: Stored | None = Stored.over(rows, list(control), buffers)
        self._shelf: Shelf = server.shelf()
        memory = _Lent(buffers)
        itself = weakref.ref(self)

        def released() -> None:
            if (found := itself()) is not None:
                found.when_released()

        self._gone = weakref.finalize(memory, run_soon, released)
        self._gone.atexit = False
        Container(rows, memory, True, control).publish(self._shelf, step)

    def url(self, host: str) -> str:
        """Returns the URL by which a receiver fetches the snapshot."""
        return self._shelf.url(host)

    @property
    def is_released(self) -> bool:
        """Whether no receiver can read the memory any more."""
        return not self._gone.alive

    def handover(self, kind: str, fields: dict[str, Any]) -> Handover:
        """Returns a message that gives another process access; not to be called after :meth:`withdraw`."""
        assert self._content is not None
        rows, control, buffers = self._content
        return Handover(kind, fields, rows, [*control, (_DIGESTS, self.digests or b"")], buffers)

    def compute_digests(self) -> bytes:
        """Returns the checksums of the memory as it is now; may be called once, on any thread.

        They are empty when it is called again, and after :meth:`withdraw` or :meth:`cut`.
        """
        # For a state of many tensors it is large, and it is not needed again.
        stored, self._stored = self._stored, None
        return (stored.digests() if stored is not None else None) or b""

    def withdraw(self) -> None:
        """Takes no new receivers; those that have begun may finish."""
        self._content = self._stored = None
        self._shelf.withdraw(0)

    def cut(self) -> None:
        """Ends all receives, and the serving of it."""
        self._content = self._stored = None
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


class Worker:
    """A thread that does one thing after the other.

    Args:
        name: of the thread
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, work: Callable[[], object]) -> None:
        """Has the thread call ``work`` after what was added before."""
        self._queue.put(work)

    def stop(self) -> None:
        """Ends the thread when all that was added before is done; does not wait for that."""
        self._queue.put(None)

    def _run(self) -> None:
        """Makes the calls, one after the other; logs what they raise."""
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("an error in the keeper, which goes on")
            # Nothing is to be held until the next one comes.
            del work


class Digester(Worker):
    """A thread that computes the checksums of snapshots, one after the other.

    Args:
        done: called on that thread with each snapshot, whose ``digests`` are there
    """

    def __init__(self, done: Callable[[KeptMemory], None]) -> None:
        super().__init__("tensorferry-digest")
        self._done = done

    def compute(self, memory: KeptMemory) -> None:
        """Has the checksums of ``memory`` computed soon."""
        self.add(lambda: self._compute(memory))

    def _compute(self, memory: KeptMemory) -> None:
        """Computes the checksums of a snapshot, empty ones if that fails, and reports it as done."""
        try:
            memory.digests = memory.compute_digests()
        except Exception:
            logger.exception("a snapshot has no checksums")
            memory.digests = b""
        self._done(memory)
