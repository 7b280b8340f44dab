"""The snapshots of a keeper and their memory: what comes, what is evicted, and when nobody reads that any more."""

from __future__ import annotations

import logging
import math
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ..._native import Server
from ..handover import Handover
from .connections import MOST_CLIENTS
from .generations import Generations, KeeperFull, Kept
from .kept_memory import KeptMemory
from .snapshot import LOCAL, Snapshot

logger = logging.getLogger("tensorferry")

#: Most snapshots, of however many jobs; and descriptors that are kept for other things than their memory.
_MOST_SNAPSHOTS = 1024
_OTHER_DESCRIPTORS = 2 * MOST_CLIENTS
#: Seconds that receivers of an evicted snapshot have to finish.
_LINGER_S = 60.0
#: Bytes that each byte of a table of entries takes at most, with all that is made of it; and of the control entries.
TABLE_COST, _CONTROL_COST = 12, 5


def cost_of(nbytes: int, table: int, control: int = 0) -> int:
    """Returns the bytes of memory that a snapshot takes.

    Args:
        nbytes: the memory in which it lies
        table: bytes of its table of entries
        control: bytes of its control entries
    """
    return nbytes + TABLE_COST * table + _CONTROL_COST * control


class Holding:
    """Holds snapshots, serves them, and lets them go. Its methods are to be called on the keeper's thread.

    Args:
        server: serves the snapshots
        host: the name or address by which others reach the server
        held: the rules, and what is held
        released: called with an evicted snapshot that nobody reads any more

    Attributes:
        going: evicted snapshots whose memory is still in use, and until when that is allowed
        is_changed: whether something came or went since that was last set to false
    """

    def __init__(
        self, server: Server, host: str, held: Generations[KeptMemory], released: Callable[[Kept[KeptMemory]], None]
    ) -> None:
        self.generations = held
        self.is_changed = True
        self._server, self._host, self._released = server, host, released
        self.going: dict[Kept[KeptMemory], float] = {}
        self._digesting = threading.Lock()
        self._most_buffers = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_DESCRIPTORS, 64)

    def check_room(self, about: Snapshot, nbytes: int, buffers: int = 1) -> None:
        """Checks that :meth:`keep` would take a snapshot now; nothing goes.

        Raises:
            KeeperFull: there is not enough memory for it, there are too many snapshots or open files, or it is kept
                already
        """
        held = [*self.generations, *self.generations.leaving]
        if len(held) >= _MOST_SNAPSHOTS or sum(one.body.buffers for one in held) + buffers > self._most_buffers:
            raise KeeperFull(f"the keeper holds {len(held)} snapshots, and can hold no more")
        self.generations.evictions_for(about, nbytes)

    def make_room(self, about: Snapshot, nbytes: int) -> None:
        """Evicts what has to go for a snapshot of ``nbytes`` bytes.

        Raises:
            KeeperFull: that would not be enough, or it is kept already; nothing was evicted
        """
        self.generations.make_room(about, nbytes, self.evict, self.cut)

    def keep(self, about: Snapshot, nbytes: int, given: Handover) -> Kept[KeptMemory]:
        """Keeps a snapshot that takes ``nbytes`` bytes, and serves it.

        Raises:
            KeeperFull: there is no room for it, or it is kept already
            TensorferryError: it is no valid container
        """
        body = KeptMemory(self._server, about.step, given)
        try:
            self.make_room(about, nbytes)
        except KeeperFull:
            body.cut()
            raise
        served = replace(about, metadata=body.url(self._host), nbytes=nbytes)
        kept = self.generations.add(served, nbytes, body)
        threading.Thread(target=self._digest, args=(body,), name="tensorferry-digest", daemon=True).start()
        self.is_changed = True
        return kept

    def _digest(self, body: KeptMemory) -> None:
        """Computes the checksums of a snapshot, after those of the snapshots before it."""
        with self._digesting:
            body.compute_digests()

    def evict(self, kept: Kept[KeptMemory]) -> None:
        """Keeps a snapshot no more; those that read it may finish, until :meth:`look_at_readers` ends them."""
        logger.info("%s is evicted", named(kept.about))
        self.generations.leave(kept)
        self.is_changed = True
        self.going[kept] = time.monotonic() + _LINGER_S
        kept.body.withdraw()
        self.let_go(kept)

    def cut(self, kept: Kept[KeptMemory]) -> None:
        """Ends what is read of an evicted snapshot over HTTP."""
        kept.body.cut()
        # The server's threads may hold its memory for another moment.
        self.generations.release(kept)
        self.let_go(kept)

    def let_go(self, kept: Kept[KeptMemory]) -> None:
        """Releases an evicted snapshot, if nobody reads it any more."""
        if kept in self.going and not kept.lent and kept.body.is_released:
            del self.going[kept]
            self.generations.release(kept)
            kept.body.cut()
            self._released(kept)

    def look_at_readers(self) -> None:
        """Releases what is read no more, and cuts off those whose time is up, unless they have the memory mapped."""
        for kept, deadline in list(self.going.items()):
            if time.monotonic() >= deadline:
                self.going[kept] = math.inf
                self.cut(kept)
            self.let_go(kept)


def named(about: Snapshot) -> str:
    """Returns how messages name a snapshot."""
    of = "" if about.origin == LOCAL else f" from {about.origin}"
    return f"step {about.step} of rank {about.rank} of {about.job}{of}"
