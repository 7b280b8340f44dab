"""What a keeper takes from the processes of its node, and what it lends to them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ...errors import ProtocolError, TensorferryError, message_of
from ..handover import Arrived, Message
from .clients import Client
from .connections import Connections
from .cost import Cost, probe
from .generations import KeeperFull, Kept, Reservation
from .keeping import Keeping, named
from .kept_memory import KeptMemory, Worker
from .snapshot import LOCAL, Snapshot, key_of, snapshot

logger = logging.getLogger("tensorferry")

#: Most snapshots of one client that are read at a time; a trainer waits for answers to two.
_MOST_ARRIVING = 4


class SnapshotExchange:
    """Takes and lends snapshots. Its methods are to be called on the keeper's thread.

    Args:
        keeping: the snapshots
        connections: those to the processes of the node
        run_soon: has the keeper's thread call something
        secret: returns the fields by which a trainer sees whether it has the keeper's secret
    """

    def __init__(
        self,
        keeping: Keeping,
        connections: Connections,
        run_soon: Callable[[Callable[[], object]], None],
        secret: Callable[[], dict[str, Any]],
    ) -> None:
        self._keeping, self._connections, self._run_soon, self._secret = keeping, connections, run_soon, secret
        #: Clients that wait for the checksums of a snapshot.
        self._readers: dict[KeptMemory, list[tuple[Client, Kept[KeptMemory]]]] = {}
        self._reader = Worker("tensorferry-read")

    def stop(self) -> None:
        """Reads no more tables than those that were given by now; does not wait for them."""
        self._reader.stop()

    def drop_given(self, client: Client) -> None:
        """Gives up the snapshots that ``client`` gave: from now on the client may write to their memory."""
        given, client.given = client.given, set()
        for kept in given:
            # A newer snapshot may have displaced it, and its last reader may be gone.
            if self._keeping.generations.get(kept.about.key) is kept:
                self._keeping.evict(kept)
            if self._keeping.is_going(kept):
                self._keeping.cut(kept)

    # Taking.

    def keep(self, client: Client, given: Arrived) -> None:
        """Begins to keep what ``client`` gives, or refuses it; the client is told which. Closes ``given`` in the end.

        Its table may be long: another thread reads it.
        """
        save_id, cost = given.fields.get("save_id"), Cost(given.nbytes, given.table, given.control)
        try:
            about = snapshot({**given.fields, "origin": LOCAL, "nbytes": 0, "metadata": ""})
            if client.arriving >= _MOST_ARRIVING:
                raise KeeperFull(f"{client.arriving} snapshots of this process are still being read")
            reserved = self._keeping.reserve(about, cost.reading, given.buffers)
        except TensorferryError as e:
            given.close()
            self._refuse(client, save_id if isinstance(save_id, str) else None, str(e), isinstance(e, KeeperFull))
            return
        step = self._keeping.step_of(about)
        client.arriving += 1

        def read() -> None:
            try:
                body: KeptMemory | Exception = self._read_in(given, step, cost)
            except Exception as e:
                body = e
            self._run_soon(lambda: self._arrived(client, about, step, body, cost, reserved))

        self._reader.add(read)

    def _read_in(self, given: Arrived, step: int, cost: Cost) -> KeptMemory:
        """Maps the memory of a handover, reads its table, and serves it as ``step``; runs on the reading thread."""
        try:
            probe(cost.reading)
            opened = given.open()
        except ProtocolError as e:
            raise _BrokenHandover(str(e)) from e
        finally:
            given.close()
        return self._keeping.memory(step, opened.rows, opened.control, opened.buffers)

    def _arrived(
        self,
        client: Client,
        about: Snapshot,
        step: int,
        body: KeptMemory | Exception,
        cost: Cost,
        reserved: Reservation,
    ) -> None:
        """Keeps a snapshot whose table was read, or refuses it if ``body`` is the error; tells the client which."""
        client.arriving -= 1
        try:
            if isinstance(body, Exception):
                raise body
            kept = self._keeping.add(about, step, body, cost.holding, reserved)
        except Exception as e:
            if not isinstance(e, (TensorferryError, OSError, MemoryError)):
                logger.exception("a snapshot cannot be kept")
            is_full = isinstance(e, (KeeperFull, MemoryError))
            self._refuse(client, about.save_id, message_of(e) or type(e).__name__, is_full)
            if isinstance(e, _BrokenHandover):
                self._connections.cast_out(client)
            return
        finally:
            reserved.close()
        if client.is_cast_out:
            self._keeping.evict(kept)
            self._keeping.cut(kept)
            return
        if client in self._connections.watched():
            client.given.add(kept)
        kept.live = client.is_open
        logger.info("%s is kept: %d bytes, of process %d", named(kept.about), kept.nbytes, client.pid)
        served = {"step": kept.about.step, "metadata": kept.about.metadata, "address": self._keeping.address}
        fields = {"save_id": about.save_id, "rank": about.rank, **served, **self._secret()}
        self._connections.send(client, Message("kept", fields))

    def _refuse(self, client: Client, save_id: str | None, error: str, is_full: bool) -> None:
        self._keeping.tallies.note_refused(error, is_full=is_full)
        logger.warning("a snapshot of process %d is refused: %s", client.pid, error)
        self._connections.send(client, Message("refused", {"save_id": save_id, "error": error[:4096]}))

    def released(self, kept: Kept[KeptMemory]) -> None:
        """Notifies the trainer that gave a snapshot that its memory is free."""
        for client in self._connections.watched():
            if kept in client.given:
                client.given.discard(kept)
                if client.is_open:
                    about = kept.about
                    self._connections.send(client, Message("released", {"save_id": about.save_id, "rank": about.rank}))
                return

    def let_go_of_oldest(self, client: Client) -> None:
        """Evicts the oldest snapshot of ``client``, which needs its memory now: its readers elsewhere are cut.

        What was evicted before and still has such readers goes first. What a process of this node reads is spared.
        """
        free = [kept for kept in client.given if not kept.lent]
        leaving = [kept for kept in free if self._keeping.is_going(kept)]
        oldest = min(free, key=lambda kept: kept.order, default=None)
        if not leaving and oldest is not None:
            self._keeping.evict(oldest)
            leaving = [oldest]
        for kept in leaving:
            self._keeping.cut(kept)

    # Lending.

    def lend(self, client: Client, message: Message) -> None:
        """Lends the snapshot that ``message`` names, as soon as its checksums are there, or says that it is not kept.

        Raises:
            ProtocolError: the client has it already
        """
        kept = self._keeping.generations.get(key_of(message.fields))
        if kept is None:
            self._connections.send(client, Message("gone"))
            return
        if kept.about.key in client.borrowed:
            raise ProtocolError("it takes a snapshot that it has")
        kept.lent += 1
        client.borrowed[kept.about.key] = kept
        if kept.body.digests is None:
            self._readers.setdefault(kept.body, []).append((client, kept))
        else:
            self._connections.send(client, kept.body.handover("taken", kept.about.fields()))

    def digested(self, memory: KeptMemory) -> None:
        """Sends a snapshot to those that have waited for its checksums."""
        for client, kept in self._readers.pop(memory, []):
            there = self._keeping.generations.get(kept.about.key) is kept
            self._connections.send(client, memory.handover("taken", kept.about.fields()) if there else Message("gone"))

    def take_back(self, client: Client, message: Message) -> None:
        """Takes back the snapshot that ``message`` names."""
        key = key_of(message.fields)
        if key is not None and (kept := client.borrowed.pop(key, None)) is not None:
            self._give_back(kept)

    def take_all_back(self, client: Client) -> None:
        """Takes back what ``client``, whose connection has ended, has borrowed."""
        for kept in client.borrowed.values():
            self._give_back(kept)
        client.borrowed.clear()

    def _give_back(self, kept: Kept[KeptMemory]) -> None:
        kept.lent = max(kept.lent - 1, 0)
        self._keeping.let_go(kept)


class _BrokenHandover(ProtocolError):
    """A handover is not what its message says."""
