"""The process that keeps: one thread that answers the processes of its node, and one for each buddy.

The thread of the process never waits for anyone. Receivers on other nodes are served by the native server, buddies by
threads of their own, which hand results to this one with :meth:`KeeperProcess.run_soon`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from ... import _validate
from ...errors import ProtocolError, TensorferryError, message_of
from ...net import serve
from ...net.network import Network
from ..handover import Arrived, Message
from .buddies import LIST, Buddy, keeper_url, publish
from .connections import Client, Connections, Loop
from .generations import Generations, Kept
from .holding import Holding, cost_of, named
from .kept_memory import KeptMemory
from .place import SocketPlace
from .snapshot import LOCAL, Key, Snapshot, snapshot

logger = logging.getLogger("tensorferry")

#: Seconds a request over HTTP waits for a snapshot that is just being published.
_PATIENCE_S = 5.0
#: Seconds between two looks at the clocks, and while evicted snapshots are read.
_LOOK_S, _CLOSE_LOOK_S = 1.0, 0.02
#: Most jobs and ranks that have a series of their own on the counters: those that were saved last.
_MOST_SERIES = 64


class KeeperProcess:
    """A keeper; the constructor opens its sockets, :meth:`run` serves.

    Args:
        name: distinguishes keepers on a node
        network: how it is reached and what protects it
        memory: most bytes of memory of all snapshots
        generations: most snapshots of one job and rank
        buddies: addresses of keepers whose snapshots it copies

    Attributes:
        holding: the snapshots
        address: where other keepers find the list of them
        ended_by: the number of the signal that has ended it

    Raises:
        SystemRefused: a keeper with this name runs already, or the port is taken
        InvalidArgument: an option cannot be used
        OSError: the system refuses a socket, or to write its files
    """

    def __init__(
        self, name: str, network: Network, memory: int, generations: int = 2, buddies: Sequence[str] = ()
    ) -> None:
        self.name, self.network = name, network
        self.ended_by: int | None = None
        self._loop = Loop()
        with contextlib.ExitStack() as stack:
            stack.callback(self._loop.close)
            self._place = SocketPlace(name)
            stack.callback(self._place.leave)
            self._server, host = serve.start(_PATIENCE_S, network)
            stack.callback(self._server.shutdown, 1.0)
            self.holding = Holding(self._server, host, Generations(memory, generations), self._tell_giver)
            self._list = self._server.shelf(LIST if network.secret is not None else None)
            self.address = self._list.url(host)
            urls = dict.fromkeys(keeper_url(address, network) for address in buddies)
            self._buddies = [Buddy(url, self) for url in urls if url != self.address]
            self._connections = Connections(self._loop, self._place.socket, self)
            stack.pop_all()
        self._refused = 0
        self._is_over = False

    def run(self) -> None:
        """Serves until a signal ends it; then nothing of it is left on the node."""
        self._connections.start()
        for buddy in self._buddies:
            buddy.start()
        try:
            while not self._is_over:
                try:
                    if self.holding.is_changed:
                        self.holding.is_changed = False
                        publish(self._list, [kept.about for kept in self.holding.generations])
                    self._loop.turn(_CLOSE_LOOK_S if self.holding.going else _LOOK_S)
                    self.holding.look_at_readers()
                    self._server.show(f"keeper {self.name}", [], [], self._series())
                except Exception:
                    # With this process, everything that it holds would be lost.
                    logger.exception("an error in the keeper, which goes on")
                    time.sleep(0.1)
        finally:
            self._place.leave()
            for buddy in self._buddies:
                buddy.stop()
            self._connections.close()
            self._server.shutdown(1.0)
            self._loop.close()

    def stop(self, by: int | None = None) -> None:
        """Ends :meth:`run` soon; may be called from any thread and from a signal handler, with the signal's number."""
        self.ended_by, self._is_over = by, True
        self.run_soon(lambda: None)

    def run_soon(self, call: Callable[[], object]) -> None:
        """Has the keeper's thread run ``call``; may be called from any thread."""
        self._loop.run_soon(call)

    # Clients.

    def handle(self, client: Client, message: Message | Arrived) -> None:
        """Handles a message of ``client``.

        Raises:
            ProtocolError: it is none that a client of this version would send
        """
        match message:
            case Arrived(kind="keep"):
                self._keep(client, message)
            case Message(kind="let_go"):
                self._let_go_of_oldest(client)
            case Message(kind="held"):
                self._send_list(client)
            case Message(kind="take"):
                self._lend(client, message)
            case Message(kind="status"):
                self._connections.send(client, Message("status", self.status()))
            case _:
                if isinstance(message, Arrived):
                    message.close()
                raise ProtocolError(f"it asks for {_validate.brief(message.kind)}, which a keeper does not know")

    def _keep(self, client: Client, given: Arrived) -> None:
        """Keeps what ``client`` gives, or refuses it; the client is told which."""
        save_id, nbytes = given.fields.get("save_id"), cost_of(given.nbytes, given.table, given.control)
        try:
            about = snapshot({**given.fields, "origin": LOCAL, "nbytes": 0, "metadata": ""})
            # Before anything is read.
            self.holding.check_room(about, nbytes, given.buffers)
            kept = self.holding.keep(about, nbytes, given.open())
        except (TensorferryError, OSError, MemoryError) as e:
            self._refused += 1
            logger.warning("a snapshot of process %d is refused: %s", client.pid, message_of(e))
            error = {"save_id": save_id, "rank": given.fields.get("rank"), "error": message_of(e)[:4096]}
            self._connections.send(client, Message("refused", error))
            return
        finally:
            given.close()
        client.given.add(kept)
        logger.info("%s is kept: %d bytes, of process %d", named(kept.about), nbytes, client.pid)
        self._connections.send(client, Message("kept", {"save_id": about.save_id, "rank": about.rank}))

    def _tell_giver(self, kept: Kept[KeptMemory]) -> None:
        """Notifies the trainer that gave a snapshot that its memory is free."""
        if (client := self._connections.giver_of(kept)) is not None:
            client.given.discard(kept)
            about = kept.about
            self._connections.send(client, Message("released", {"save_id": about.save_id, "rank": about.rank}))

    def _let_go_of_oldest(self, client: Client) -> None:
        """Evicts the oldest snapshot of ``client``, which needs its memory now: its readers elsewhere are cut.

        What was evicted before and still has such readers goes first. What a process of this node reads is spared.
        """
        free = [kept for kept in client.given if not kept.lent]
        leaving = [kept for kept in free if kept in self.holding.going]
        if not leaving and (held := [kept for kept in self.holding.generations if kept in free]):
            self.holding.evict(held[0])
            leaving = held[:1]
        for kept in leaving:
            self.holding.cut(kept)

    def drop_given(self, client: Client) -> None:
        """Gives up the snapshots that ``client`` gave: from now on the client may write to their memory."""
        given, client.given = client.given, set()
        for kept in given:
            # A newer snapshot may have displaced it, and its last reader may be gone.
            if self.holding.generations.get(kept.about.key) is kept:
                self.holding.evict(kept)
            if kept in self.holding.going:
                self.holding.cut(kept)

    def _lend(self, client: Client, message: Message) -> None:
        """Lends the snapshot that ``message`` names until the client's connection ends; not before it has checksums."""
        key = message.fields.get("key")
        kept = next((one for one in self.holding.generations if [*one.about.key] == key), None)
        if kept is None:
            self._connections.send(client, Message("gone"))
            return
        if kept.body.digests is None:
            self._connections.send(client, Message("later"))
            return
        if kept not in client.borrowed:
            kept.lent += 1
            client.borrowed.add(kept)
        self._connections.send(client, kept.body.handover("taken", kept.about.fields()))

    def take_all_back(self, client: Client) -> None:
        """Takes back what ``client``, whose connection has ended, has borrowed."""
        for kept in client.borrowed:
            kept.lent = max(kept.lent - 1, 0)
            self.holding.let_go(kept)

    # What is held.

    def _send_list(self, client: Client) -> None:
        """Sends the client all snapshots that are known, each in a message."""
        for one in self.held():
            self._connections.send(client, Message("snapshot", one.fields()))
        self._connections.send(client, Message("end"))

    def held(self) -> list[Snapshot]:
        """Returns what this keeper holds, the newest last, and behind it what its buddies hold and it does not."""
        own = [kept.about for kept in self.holding.generations]
        known = {one.key for one in own}
        there: dict[Key, Snapshot] = {}
        for buddy in self._buddies:
            for one in buddy.listed:
                if one.key not in known:
                    there.setdefault(one.key, replace(one, remote=True))
        ranks: dict[tuple[str, str, str, int], set[int]] = {}
        for one in (*own, *there.values()):
            ranks.setdefault(one.save, set()).add(one.rank)
        return [replace(one, complete=len(ranks[one.save]) == one.world_size) for one in (*own, *there.values())]

    def status(self) -> dict[str, Any]:
        """Returns what the keeper says about itself."""
        held = self.holding.generations
        return {
            "name": self.name,
            "pid": os.getpid(),
            "address": self.address,
            "memory": held.limit,
            "used": held.used,
            "generations": held.most,
            "snapshots": len(held),
            "leaving": len(held.leaving),
            "clients": len(self._connections),
            "served": self._server.bytes_served,
            "refused": self._refused,
            "buddies": [buddy.status() for buddy in self._buddies],
        }

    def _series(self) -> list[tuple[str, bool, str, list[tuple[list[tuple[str, str]], float]]]]:
        """Returns what the counters show beside those of the server: what ``top`` and alerts need."""
        held = self.holding.generations
        own = [one.about for one in held if one.about.origin == LOCAL]
        newest = {(PurePath(one.job).name or one.job, str(one.rank)): one.step for one in own[-_MOST_SERIES:]}

        def one(name: str, about: str, rows: Iterable[tuple[list[tuple[str, str]], float]]) -> Any:
            return f"keeper_{name}", name.endswith("_total"), about, [(labels, float(value)) for labels, value in rows]

        found = [
            one("memory_used_bytes", "Memory of the snapshots.", [([], held.used)]),
            one("memory_limit_bytes", "Memory that they may take.", [([], held.limit)]),
            one(
                "snapshots",
                "Snapshots held.",
                [([("origin", "own")], len(own)), ([("origin", "buddy")], len(held) - len(own))],
            ),
            one("refused_total", "Snapshots of trainers that were refused.", [([], self._refused)]),
            one("newest_step", "Step of the newest.", [([("job", j), ("rank", r)], newest[j, r]) for j, r in newest]),
            one("buddy_up", "1 if it answers.", [([("buddy", b.host)], b.is_up) for b in self._buddies]),
        ]
        # A name without a row would be no series.
        return [series for series in found if series[3]]
