"""The process that keeps: one thread that answers the processes of its node, and one for each partner.

The thread of the process never waits for anyone. Receivers on other nodes are served by the native server, partners by
threads of their own (``partners``), which hand results to this one with :meth:`KeeperProcess.run_soon`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ... import _validate
from ...errors import InvalidArgument, ProtocolError
from ...net import serve
from ...net.options import ServerOptions, wants_relay
from ..handover import Arrived, Handover, Message
from . import figures, index, same_secret
from .clients import Client
from .connections import Connections
from .exchange import SnapshotExchange
from .keeping import Keeping
from .loop import Loop
from .partners import Partner
from .place import SocketPlace
from .snapshot import Key, Snapshot
from .stranger_log import StrangerLog

logger = logging.getLogger("tensorferry")

#: Seconds a request over HTTP waits for a snapshot that is just being published.
_PATIENCE_S = 5.0
#: Seconds between two looks at the clocks, and while the end of a process is waited for.
_LOOK_S, _CLOSE_LOOK_S = 1.0, 0.05


@dataclass(frozen=True)
class KeeperOptions:
    """How a keeper is set up.

    Attributes:
        name: distinguishes keepers on a node
        memory: most bytes of memory of all snapshots
        generations: most snapshots of one job and rank
        idle: seconds without clients and requests after which it ends; 0 means never
        server: how it is reached over the network and what protects it
        buddies: addresses of keepers whose snapshots it copies
    """

    name: str
    memory: int
    generations: int
    idle: float
    server: ServerOptions
    buddies: Sequence[str] = ()


class KeeperProcess:
    """A keeper; the constructor opens its sockets, :meth:`run` serves.

    Args:
        options: how it is set up

    Attributes:
        keeping: the snapshots
        ended_by: the number of the signal that has ended it

    Raises:
        SystemRefused: a keeper with this name runs already, or the port is taken
        InvalidArgument: an option cannot be used
        OSError: the system refuses a socket, or to write its files
    """

    def __init__(self, options: KeeperOptions) -> None:
        self.options = options
        self.ended_by: int | None = None
        self._loop = Loop()
        with contextlib.ExitStack() as stack:
            stack.callback(self._loop.close)
            self._place = SocketPlace(options.name)
            stack.callback(self._place.leave)
            self._server, host = serve.start(_PATIENCE_S, options.server, wants_relay(None))
            stack.callback(self._server.shutdown, 1.0)
            self.keeping = Keeping(
                self._loop,
                self._server,
                host,
                options.server,
                memory=options.memory,
                generations=options.generations,
                released=lambda kept: self._exchange.released(kept),
                digested=lambda memory: self._exchange.digested(memory),
            )
            self._connections = Connections(self._loop, self._place.socket, self)
            self._exchange = SnapshotExchange(self.keeping, self._connections, self.run_soon, self._secret_fields)
            stack.pop_all()
        self.address = self.keeping.address
        self._waiting: list[tuple[Client, Message, float, set[Partner]]] = []
        self._partners: dict[str, Partner] = {}
        self._busy_at = time.monotonic()
        self._served_bytes = 0
        self._is_over = False
        self._strangers = StrangerLog(self._server)
        self._show_at = 0.0
        self._show()

    def run(self) -> None:
        """Serves until a signal or the idle limit ends it; then nothing of it is left on the node."""
        self._connections.start()
        try:
            with contextlib.suppress(InvalidArgument):
                self._set_buddies(self.options.buddies)
            while not self._is_over:
                try:
                    self.keeping.publish_index()
                    self._loop.turn(self._longest_wait())
                    self._look_at_clocks()
                except Exception:
                    # With this process, everything that it holds would be lost.
                    logger.exception("an error in the keeper, which goes on")
                    time.sleep(0.1)
        finally:
            self._close()

    def stop(self, by: int | None = None) -> None:
        """Ends :meth:`run` soon; may be called from any thread and from a signal handler, with the signal's number."""
        self.ended_by = by
        self.run_soon(self._end)

    def run_soon(self, call: Callable[[], object]) -> None:
        """Has the keeper's thread run ``call``; may be called from any thread."""
        self._loop.run_soon(call)

    def _end(self) -> None:
        self._is_over = True

    def _close(self) -> None:
        self._place.leave()
        self._connections.stop_accepting()
        for partner in self._partners.values():
            partner.stop()
        self.keeping.stop()
        self._exchange.stop()
        self._connections.close()
        self._server.shutdown(1.0)
        self._loop.close()

    def _longest_wait(self) -> float:
        """Returns for how many seconds the loop may wait: until the next look at clocks or deadline of a question."""
        longest = _CLOSE_LOOK_S if self._connections.has_suspects else _LOOK_S
        deadlines = [deadline for _, _, deadline, _ in self._waiting]
        return min([longest, *(deadline - time.monotonic() for deadline in deadlines)])

    def _look_at_clocks(self) -> None:
        """Does what is due by now: ends overdue readers, answers those who waited for partners, ends an idle keeper."""
        now = time.monotonic()
        self.keeping.look_at_clocks(now)
        self._connections.look_at_clocks(now)
        self._strangers.look(now)
        if now >= self._show_at:
            self._show()
        for client, message, deadline, partners in list(self._waiting):
            if now >= deadline or not any(partner.is_asked for partner in partners):
                self._waiting.remove((client, message, deadline, partners))
                if client.is_open:
                    self._list(client, message)
        served = self._server.bytes_served
        if len(self._connections) or served != self._served_bytes or self.keeping.is_any_going:
            self._busy_at, self._served_bytes = now, served
        elif self.options.idle and now - self._busy_at >= self.options.idle:
            logger.info("the keeper %s ends: nobody has used it for %g s", self.options.name, self.options.idle)
            self._end()

    def _show(self) -> None:
        """Hands what its pages show to the server, once a second."""
        self._show_at = time.monotonic() + _LOOK_S
        held, tallies = self.keeping.generations, self.keeping.tallies
        figures.show(
            self._server, self.options.name, len(self._connections), held, tallies, list(self._partners.values())
        )

    def _secret_fields(self) -> dict[str, Any]:
        return same_secret.described(self.options.server.secret, len(self._partners))

    # Clients.

    def handle(self, client: Client, message: Message | Arrived) -> None:
        """Handles a message of ``client``.

        Raises:
            ProtocolError: it is none that a client of this version would send
        """
        match message:
            case Arrived(kind="keep"):
                self._exchange.keep(client, message)
            case Message(kind="let_go"):
                self._exchange.let_go_of_oldest(client)
            case Message(kind="held"):
                self._ask(client, message)
            case Message(kind="take"):
                self._exchange.lend(client, message)
            case Message(kind="done"):
                self._exchange.take_back(client, message)
            case Message(kind="buddies"):
                self._take_buddies(client, message)
            case Message(kind="farewell"):
                client.has_left = True
            case Message(kind="status"):
                self._send(client, Message("status", self.status()))
            case _:
                if isinstance(message, Arrived):
                    message.close()
                raise ProtocolError(f"it asks for {_validate.brief(message.kind)}, which a keeper does not know")

    def _send(self, client: Client, message: Message | Handover) -> None:
        self._connections.send(client, message)

    def drop_given(self, client: Client) -> None:
        """Gives up the snapshots that ``client`` gave: from now on the client may write to their memory."""
        self._exchange.drop_given(client)

    def take_all_back(self, client: Client) -> None:
        """Takes back what ``client``, whose connection has ended, has borrowed."""
        self._exchange.take_all_back(client)

    # What is held.

    def _ask(self, client: Client, message: Message) -> None:
        """Answers a question for the list, after the partners were asked anew if ``message`` says so."""
        partners = set(self._partners.values()) if message.fields.get("ask_buddies") is True else set()
        if not partners:
            self._list(client, message)
            return
        if any(waiting is client for waiting, *_ in self._waiting):
            raise ProtocolError("it asks again before it was answered")
        patience = max([partner.ask() for partner in partners])
        self._waiting.append((client, message, time.monotonic() + patience, partners))

    def _list(self, client: Client, message: Message) -> None:
        """Sends the client the snapshots of the job, path and rank that ``message`` names, each in a message."""
        wanted = {name: value for name in ("job", "path", "rank") if (value := message.fields.get(name)) is not None}
        for one in self.held():
            fields = one.fields()
            if all(fields[name] == value for name, value in wanted.items()):
                self._send(client, Message("snapshot", fields))
        self._send(client, Message("end", {"address": self.address}))

    def held(self) -> list[Snapshot]:
        """Returns what this keeper holds, the newest last, and behind it what its partners hold and it does not."""
        own = [kept.about for kept in self.keeping.generations]
        known = {one.key for one in own}
        there: dict[Key, Snapshot] = {}
        for partner in self._partners.values():
            for one in partner.listed:
                if one.key not in known:
                    there.setdefault(one.key, replace(one, remote=True))
        ranks: dict[tuple[str, str, str, int], set[int]] = {}
        for one in (*own, *there.values()):
            ranks.setdefault(one.save, set()).add(one.rank)
        return [replace(one, complete=len(ranks[one.save]) == one.world_size) for one in (*own, *there.values())]

    def status(self) -> dict[str, Any]:
        """Returns what the keeper says about itself."""
        return {
            "name": self.options.name,
            "pid": os.getpid(),
            "address": self.address,
            "started": self.keeping.tallies.started,
            "memory": self.options.memory,
            "used": self.keeping.generations.used,
            "generations": self.options.generations,
            "snapshots": len(self.keeping.generations),
            "leaving": len(self.keeping.generations.leaving),
            "clients": len(self._connections),
            "served": self._server.bytes_served,
            "kept": self.keeping.tallies.kept,
            "refused": sum(self.keeping.tallies.refused.values()),
            "buddies": [partner.status() for partner in self._partners.values()][:32],
        }

    # Partners.

    def _take_buddies(self, client: Client, message: Message) -> None:
        """Takes the buddies that a client sets; answers with all of them, or with why they are refused."""
        addresses = message.fields.get("buddies")
        try:
            self._set_buddies(_validate.items("buddies", addresses))  # type: ignore[arg-type]
        except InvalidArgument as e:
            self._send(client, Message("refused", {"save_id": None, "error": str(e)}))
            return
        self._send(client, Message("buddies", {"buddies": list(self._partners)}))

    def _set_buddies(self, addresses: Sequence[Any]) -> None:
        """Takes the keepers at ``addresses`` for partners, beside those of the command line, and no others.

        This keeper's own address is left out, and so is what comes after the first ``index.MOST_BUDDIES``.

        Raises:
            InvalidArgument: one of them is no address of a keeper
        """
        wanted = [index.keeper_url(address, self.options.server) for address in (*self.options.buddies, *addresses)]
        wanted = [url for url in dict.fromkeys(wanted) if url != self.address][: index.MOST_BUDDIES]
        for url in set(self._partners) - set(wanted):
            self._partners.pop(url).stop()
        for url in wanted:
            if url not in self._partners:
                self._partners[url] = partner = Partner(url, self)
                partner.start()
