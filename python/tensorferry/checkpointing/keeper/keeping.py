"""The snapshots of a keeper and their memory: what comes, what is evicted, and when nobody reads that any more."""

from __future__ import annotations

import collections
import logging
import math
import resource
import time
from collections.abc import Callable, Sequence

from ..._native import Server, SharedBuffer, Table
from ...net.options import ServerOptions
from . import index
from .connections import MOST_CLIENTS
from .figures import Tallies
from .generations import Generations, KeeperFull, Kept, Reservation
from .kept_memory import Digester, KeptMemory
from .loop import Loop
from .snapshot import LOCAL, Snapshot

logger = logging.getLogger("tensorferry")

#: Most snapshots, of however many jobs; and descriptors that are kept for other things than their memory.
_MOST_SNAPSHOTS = 1024
_OTHER_DESCRIPTORS = 2 * MOST_CLIENTS
#: Seconds that receivers of an evicted snapshot have to finish, on this machine and others.
_LINGER_S = 60.0
#: How long a process of this machine may use a snapshot that was evicted.
_LENT_S = 300.0


class Keeping:
    """Holds snapshots, serves them, and lets them go. Its methods are to be called on the keeper's thread.

    Args:
        loop: the loop of that thread
        server: serves the snapshots, and a list of them
        host: the name or address by which others reach the server
        options: of the server
        memory: most bytes of memory of all snapshots
        generations: most snapshots of one job and rank
        released: called with an evicted snapshot that nobody reads any more
        digested: called with memory whose checksums are computed

    Attributes:
        generations: what is held
        tallies: what came, went and was refused
        address: where other keepers find the list
    """

    def __init__(
        self,
        loop: Loop,
        server: Server,
        host: str,
        options: ServerOptions,
        *,
        memory: int,
        generations: int,
        released: Callable[[Kept[KeptMemory]], None],
        digested: Callable[[KeptMemory], None],
    ) -> None:
        self.generations: Generations[KeptMemory] = Generations(memory, generations)
        self.tallies = Tallies()
        self._loop, self._server, self._host, self._released = loop, server, host, released
        self._index_shelf = server.shelf(index.NAME if options.secret is not None else None)
        self.address = self._index_shelf.url(host)
        self._index_is_old = True
        self._steps: collections.Counter[tuple[str, str, int]] = collections.Counter()
        #: Evicted snapshots whose memory is still in use, and until when that is allowed. Their trainers are notified
        #: at the end.
        self._going: dict[Kept[KeptMemory], float] = {}
        self._digester = Digester(lambda memory: loop.run_soon(lambda: digested(memory)))
        self._most_buffers = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_DESCRIPTORS, 64)

    def stop(self) -> None:
        """Computes no more checksums than those of the snapshots that are kept by now; does not wait for them."""
        self._digester.stop()

    def reserve(self, about: Snapshot, nbytes: int, buffers: int = 1) -> Reservation:
        """Makes room for a snapshot that is to come; the caller closes what is returned.

        Raises:
            KeeperFull: there is not enough memory for it, there are too many snapshots or open files, or it is kept
                already; nothing was evicted
        """
        held, coming = [*self.generations, *self.generations.leaving], self.generations.reserved
        open_files = sum(one.body.buffers for one in held) + sum(one.buffers for one in coming)
        if len(held) + len(coming) >= _MOST_SNAPSHOTS or open_files + buffers > self._most_buffers:
            raise KeeperFull(f"the keeper holds {len(held)} snapshots, and can hold no more")
        self.make_room(about, nbytes)
        return self.generations.reserve(nbytes, buffers)

    def step_of(self, about: Snapshot) -> int:
        """Returns the step as which a snapshot is served: its own, or the next of its job and rank."""
        if about.step >= 0:
            return about.step
        self._steps[about.series] += 1
        return self._steps[about.series]

    def memory(
        self, step: int, rows: Table, control: Sequence[tuple[str, bytes]], buffers: Sequence[SharedBuffer]
    ) -> KeptMemory:
        """Returns the memory of a snapshot, which is served from now on; may be called on any thread.

        Raises:
            TensorferryError: it is no valid container
        """
        return KeptMemory(self._server, step, rows, control, buffers, self._loop.run_soon)

    def add(self, about: Snapshot, step: int, body: KeptMemory, nbytes: int, reserved: Reservation) -> Kept[KeptMemory]:
        """Keeps a snapshot of ``nbytes`` bytes in place of what was reserved, which is given back in any case.

        Raises:
            KeeperFull: it is kept already, or there is no room any more; ``body`` is cut then
        """
        reserved.close()
        try:
            self.make_room(about, nbytes)
        except KeeperFull:
            body.cut()
            raise
        kept = self.generations.add(about.served(body.url(self._host), nbytes, step), nbytes, body)
        self.tallies.note_kept(kept.about)
        body.when_released = lambda: self.let_go(kept)
        self._digester.compute(body)
        self._index_is_old = True
        return kept

    def make_room(self, about: Snapshot, nbytes: int) -> None:
        """Evicts what has to go for a snapshot of ``nbytes`` bytes.

        Raises:
            KeeperFull: that would not be enough, or it is kept already; nothing was evicted
        """
        self.generations.make_room(about, nbytes, self.evict, self.cut)

    def evict(self, kept: Kept[KeptMemory]) -> None:
        """Keeps a snapshot no more; those that read it may finish, until :meth:`look_at_clocks` ends them."""
        logger.info("%s is evicted", named(kept.about))
        self.tallies.evicted += 1
        self.generations.leave(kept)
        self._index_is_old = True
        self._going[kept] = time.monotonic() + (_LENT_S if kept.lent else _LINGER_S)
        kept.body.withdraw()
        self.let_go(kept)

    def cut(self, kept: Kept[KeptMemory]) -> None:
        """Ends what is read of an evicted snapshot over HTTP."""
        kept.body.cut()
        self._index_is_old = True
        # The server's threads may hold its memory for another moment.
        self.generations.release(kept)
        self.let_go(kept)

    def let_go(self, kept: Kept[KeptMemory]) -> None:
        """Releases an evicted snapshot, if nobody reads it any more."""
        if kept not in self._going or kept.lent or not kept.body.is_released:
            return
        del self._going[kept]
        self.generations.release(kept)
        kept.body.cut()
        kept.body.when_released = _nothing
        self._released(kept)

    def is_going(self, kept: Kept[KeptMemory]) -> bool:
        """Whether a snapshot was evicted and its memory is still in use."""
        return kept in self._going

    @property
    def is_any_going(self) -> bool:
        """Whether the memory of an evicted snapshot is still in use."""
        return bool(self._going)

    def look_at_clocks(self, now: float) -> None:
        """Ends the readers of evicted snapshots whose time is up."""
        for kept, deadline in list(self._going.items()):
            if now >= deadline:
                self._going[kept] = math.inf
                if kept.lent:
                    logger.warning("%s was evicted and is still read after %d s", named(kept.about), _LENT_S)
                    kept.lent = 0
                self.cut(kept)

    def publish_index(self) -> None:
        """Publishes the list of what is kept, if it has changed."""
        if self._index_is_old:
            self._index_is_old = False
            index.publish(self._index_shelf, [kept.about for kept in self.generations])


def _nothing() -> None:
    """Does nothing: what is left to be done for a released snapshot, once its memory was let go."""


def named(about: Snapshot) -> str:
    """Returns how messages name a snapshot."""
    of = "" if about.origin == LOCAL else f" from {about.origin}"
    return f"step {about.step} of rank {about.rank} of {about.job}{of}"
