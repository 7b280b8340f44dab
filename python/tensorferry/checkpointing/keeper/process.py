"""The process that keeps: one thread that talks to the processes of its node, and one for each partner.

The thread of the process never waits for anyone. A message of a client arrives whole or not at all; what goes to a
client that does not read is queued up to a limit, and beyond it the client is disconnected. Receivers on other nodes
are served by the native server, partners by threads of their own (``partners``), which hand results to this one with
:meth:`KeeperProcess.run_soon`.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import resource
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ... import _validate
from ..._native import SharedBuffer, Table
from ...errors import InvalidArgument, ProtocolError, TensorferryError, message_of
from ...net import serve
from ...net.options import ServerOptions
from .. import handover
from ..handover import Arrived, Handover, Message, OtherVersion
from . import index
from .clients import Client
from .cost import Cost, probe
from .generations import Generations, Kept, NoRoom, Reservation
from .kept_memory import Digester, KeptMemory, Worker
from .partners import Partner
from .place import Place
from .snapshot import LOCAL, Key, Snapshot, key_of, snapshot

logger = logging.getLogger("tensorferry")

#: Most clients at a time; each trainer has one connection, or two while it loads.
_MOST_CLIENTS = 256
#: Seconds that a new client has to say something.
_GREETING_S = 5.0
#: Most snapshots, of however many jobs; and descriptors that are kept for other things than their memory.
_MOST_SNAPSHOTS = 1024
_OTHER_DESCRIPTORS = 2 * _MOST_CLIENTS
#: Messages handled for one client, and clients accepted, before others have a turn.
_TURN = 16
#: Most snapshots of one client that are read at a time; a trainer waits for answers to two.
_MOST_ARRIVING = 4
#: Most messages queued for a client that does not read.
_MOST_QUEUED = 4096
#: Seconds that receivers of an evicted snapshot have to finish, on this machine and others.
_LINGER_S = 60.0
#: How long a process of this machine may use a snapshot that was evicted.
_LENT_S = 300.0
#: Seconds a request over HTTP waits for a snapshot that is just being published.
_PATIENCE_S = 5.0
#: Seconds between the end of a trainer's connection and that of the trainer.
_ENDING_S = 2.0


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

    Raises:
        SystemRefused: a keeper with this name runs already, or the port is taken
        InvalidArgument: an option cannot be used
    """

    def __init__(self, options: KeeperOptions) -> None:
        self.options = options
        self.generations: Generations[KeptMemory] = Generations(options.memory, options.generations)
        with contextlib.ExitStack() as stack:
            self._place = Place(options.name)
            stack.callback(self._place.leave)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(self._listener.close)
            self._server, host = serve.start(_PATIENCE_S, options.server)
            stack.callback(self._server.shutdown, 1.0)
            self.host = host
            self._index_shelf = self._server.shelf(index.NAME if options.server.secret is not None else None)
            self.address = self._index_shelf.url(host)
            self._listener.bind(os.fspath(self._place.socket))
            os.chmod(self._place.socket, 0o600)
            self._listener.listen(128)
            self._listener.setblocking(False)
            stack.pop_all()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._clients: set[Client] = set()
        #: Clients whose connection has ended and whose process has not.
        self._suspects: dict[Client, float] = {}
        self._counts: collections.Counter[tuple[str, str, int]] = collections.Counter()
        #: Evicted snapshots whose memory is still in use, and until when that is allowed. Their trainers are notified
        #: at the end.
        self._going: dict[Kept[KeptMemory], float] = {}
        self._waiting: list[tuple[Client, Message, float, set[Partner]]] = []
        #: Clients that wait for the checksums of a snapshot.
        self._readers: dict[KeptMemory, list[tuple[Client, Kept[KeptMemory]]]] = {}
        self._digester = Digester(lambda memory: self.run_soon(lambda: self._digested(memory)))
        self._reader = Worker("tensorferry-read")
        self._partners: dict[str, Partner] = {}
        self._index_is_old = True
        self._busy_at = time.monotonic()
        self._served_bytes = 0
        self._is_over = False
        self._most_buffers = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_DESCRIPTORS, 64)
        self._started = time.time()

    def run(self) -> None:
        """Serves until a signal or the idle limit ends it; then nothing of it is left on the node."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain_wakes)
        try:
            with contextlib.suppress(InvalidArgument):
                self._set_buddies(self.options.buddies)
            while not self._is_over:
                try:
                    self._turn()
                except Exception:
                    # With this process, everything that it holds would be lost.
                    logger.exception("an error in the keeper, which goes on")
                    time.sleep(0.1)
        finally:
            self._close()

    def stop(self) -> None:
        """Ends :meth:`run` soon; may be called from any thread and from a signal handler."""
        self.run_soon(self._end)

    def run_soon(self, call: Callable[[], object]) -> None:
        """Has the keeper's thread run ``call``; may be called from any thread."""
        self._calls.append(call)
        # A full pipe wakes as well; a closed one belongs to a keeper that has ended.
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _end(self) -> None:
        self._is_over = True

    def _turn(self) -> None:
        if self._index_is_old:
            self._publish_index()
        for key, events in self._selector.select(self._patience()):
            if isinstance(key.data, Client):
                self._serve(key.data, events)
            else:
                key.data()
        self._run_calls()
        self._look_at_clocks()

    def _patience(self) -> float:
        longest = 0.0 if self._calls else 0.05 if self._suspects else 1.0
        deadlines = [deadline for _, _, deadline, _ in self._waiting]
        return max(min([longest, *(deadline - time.monotonic() for deadline in deadlines)]), 0.0)

    def _run_calls(self) -> None:
        # Only those that are there now: calls may add calls.
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _look_at_clocks(self) -> None:
        now = time.monotonic()
        for kept, deadline in list(self._going.items()):
            if now >= deadline:
                self._going[kept] = math.inf
                if kept.lent:
                    logger.warning("%s was evicted and is still read after %d s", _named(kept.about), _LENT_S)
                    kept.lent = 0
                self._cut(kept)
        self._look_at_suspects(now)
        for client in [c for c in self._clients if not c.has_spoken and now - c.since > _GREETING_S]:
            self._disconnect(client)
        for client, message, deadline, partners in list(self._waiting):
            if now >= deadline or not any(partner.is_asked for partner in partners):
                self._waiting.remove((client, message, deadline, partners))
                if client.is_open:
                    self._list(client, message)
        served = self._server.bytes_served
        if self._clients or served != self._served_bytes or self._going:
            self._busy_at, self._served_bytes = now, served
        elif self.options.idle and now - self._busy_at >= self.options.idle:
            logger.info("the keeper %s ends: nobody has used it for %g s", self.options.name, self.options.idle)
            self._end()

    # Clients.

    def _accept(self) -> None:
        for _ in range(_TURN):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """Accepts a client; returns whether there may be more."""
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError as e:
            # Out of descriptors, mostly. One that has said nothing makes room.
            logger.warning("a client could not be accepted: %s", e)
            silent = [client for client in self._clients if not client.has_spoken]
            if silent:
                self._disconnect(min(silent, key=lambda client: client.since))
            else:
                time.sleep(0.02)
            return False
        sock.setblocking(False)
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid != os.geteuid():
            logger.warning("process %d of user %d was turned away: this keeper is user %d's", pid, uid, os.geteuid())
            sock.close()
            return True
        if len(self._clients) >= _MOST_CLIENTS:
            silent = [client for client in self._clients if not client.has_spoken]
            if not silent:
                sock.close()
                return True
            self._disconnect(min(silent, key=lambda client: client.since))
        client = Client(sock, pid)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, client)
        return True

    def _serve(self, client: Client, events: int) -> None:
        if not client.is_open:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ:
                for _ in range(_TURN):
                    if not client.is_open or not self._read(client):
                        break
        except BlockingIOError:
            pass
        except (OSError, TensorferryError) as e:
            if isinstance(e, OtherVersion):
                # It cannot read that either, and says so.
                self._send(client, Message("refused", {"save_id": None, "error": str(e)}))
            # Whatever a client does ends its own connection and nothing else.
            logger.warning("process %d is disconnected: %s", client.pid, e)
            self._cast_out(client)
        except Exception:
            logger.exception("process %d is disconnected", client.pid)
            self._cast_out(client)

    def _read(self, client: Client) -> bool:
        """Handles one message of ``client``; returns whether there may be more."""
        message = handover.arrive(client.sock)
        if message is None:
            self._disconnect(client)
            return False
        client.has_spoken = True
        match message:
            case Arrived(kind="keep"):
                self._keep(client, message)
            case Message(kind="let_go"):
                self._let_go_of_oldest(client)
            case Message(kind="held"):
                self._ask(client, message)
            case Message(kind="take"):
                self._lend(client, message)
            case Message(kind="done"):
                self._take_back(client, message)
            case Message(kind="buddies"):
                self._told_buddies(client, message)
            case Message(kind="farewell"):
                client.has_left = True
            case Message(kind="status"):
                self._send(client, Message("status", self.status()))
            case _:
                if isinstance(message, Arrived):
                    message.close()
                raise ProtocolError(f"it asks for {_validate.brief(message.kind)}, which a keeper does not know")
        return True

    def _send(self, client: Client, message: Message | Handover) -> None:
        if not client.is_open:
            return
        if len(client.queue) >= _MOST_QUEUED:
            logger.warning("process %d is disconnected: it does not read its answers", client.pid)
            self._cast_out(client)
            return
        client.queue.append(message)
        if len(client.queue) == 1:
            self._flush(client)

    def _flush(self, client: Client) -> None:
        while client.queue:
            try:
                handover.send(client.sock, client.queue[0])
            except BlockingIOError:
                break
            except (OSError, TensorferryError) as e:
                logger.debug("process %d is gone: %s", client.pid, e)
                self._disconnect(client)
                return
            client.queue.popleft()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.queue else 0)
        self._selector.modify(client.sock, wanted, client)

    def _cast_out(self, client: Client) -> None:
        """Disconnects a process that may live, and takes that as leave to write to what it gave: that goes first."""
        client.queue.clear()
        if not client.has_left:
            client.is_cast_out = True
            self._drop_given(client)
        self._disconnect(client)

    def _drop_given(self, client: Client) -> None:
        given, client.given = client.given, set()
        for kept in given:
            # A newer snapshot may have displaced it, and its last reader may be gone.
            if self.generations.get(kept.about.key) is kept:
                self._evict(kept)
            if kept in self._going:
                self._cut(kept)

    def _look_at_suspects(self, now: float) -> None:
        """Looks after connections that ended: a trainer that died cannot write any more, one that lives may."""
        for client, deadline in list(self._suspects.items()):
            if client.arriving:
                continue
            if not client.has_ended():
                if now < deadline:
                    continue
                if client.can_write_to({file for kept in client.given for file in kept.body.files}):
                    logger.warning("process %d left without a word and lives: what it gave is not kept", client.pid)
                    self._drop_given(client)
            del self._suspects[client]
            client.forget()
            client.given.clear()

    def _disconnect(self, client: Client) -> None:
        if not client.is_open:
            return
        client.is_open = False
        self._clients.discard(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        client.queue.clear()
        for kept in client.given:
            kept.live = False
        if (client.given or client.arriving) and not (client.has_left or client.is_cast_out or client.has_ended()):
            self._suspects[client] = time.monotonic() + _ENDING_S
        else:
            client.forget()
            client.given.clear()
        for kept in client.borrowed.values():
            self._give_back(kept)
        client.borrowed.clear()

    # Keeping.

    def _keep(self, client: Client, given: Arrived) -> None:
        """Begins to keep what ``client`` gives. Its table may be long: another thread reads it."""
        save_id, cost = given.fields.get("save_id"), Cost(given.nbytes, given.table, given.control)
        try:
            about = snapshot({**given.fields, "origin": LOCAL, "nbytes": 0, "metadata": ""})
            if client.arriving >= _MOST_ARRIVING:
                raise NoRoom(f"{client.arriving} snapshots of this process are still being read")
            reserved = self.reserve(about, cost.reading, given.buffers)
        except TensorferryError as e:
            given.close()
            self._refuse(client, save_id if isinstance(save_id, str) else None, str(e))
            return
        step = self.step_of(about)
        client.arriving += 1

        def read() -> None:
            try:
                body: KeptMemory | Exception = self._read_in(given, step, cost)
            except Exception as e:
                body = e
            self.run_soon(lambda: self._arrived(client, about, step, body, cost, reserved))

        self._reader.add(read)

    def _read_in(self, given: Arrived, step: int, cost: Cost) -> KeptMemory:
        try:
            probe(cost.reading)
            opened = given.open()
        except ProtocolError as e:
            raise _Broken(str(e)) from e
        finally:
            given.close()
        return self.memory(step, opened.rows, opened.control, opened.buffers)

    def _arrived(
        self,
        client: Client,
        about: Snapshot,
        step: int,
        body: KeptMemory | Exception,
        cost: Cost,
        reserved: Reservation,
    ) -> None:
        client.arriving -= 1
        try:
            if isinstance(body, Exception):
                raise body
            kept = self.add(about, step, body, cost.holding, reserved)
        except Exception as e:
            if not isinstance(e, (TensorferryError, OSError, MemoryError)):
                logger.exception("a snapshot cannot be kept")
            self._refuse(client, about.save_id, message_of(e) or type(e).__name__)
            if isinstance(e, _Broken):
                self._cast_out(client)
            return
        finally:
            reserved.close()
        if client.is_cast_out:
            self._evict(kept)
            self._cut(kept)
            return
        if client.is_open or client in self._suspects:
            client.given.add(kept)
        kept.live = client.is_open
        logger.info("%s is kept: %d bytes, of process %d", _named(kept.about), kept.nbytes, client.pid)
        self._send(client, Message("kept", {"save_id": about.save_id, "rank": about.rank, **self._address_of(kept)}))

    def _refuse(self, client: Client, save_id: str | None, error: str) -> None:
        logger.warning("a snapshot of process %d is refused: %s", client.pid, error)
        self._send(client, Message("refused", {"save_id": save_id, "error": error[:4096]}))

    def _address_of(self, kept: Kept[KeptMemory]) -> dict[str, Any]:
        return {"step": kept.about.step, "metadata": kept.about.metadata, "address": self.address}

    def reserve(self, about: Snapshot, nbytes: int, buffers: int = 1) -> Reservation:
        """Makes room for a snapshot that is to come; to be called on the keeper's thread.

        Raises:
            NoRoom: there is not enough memory for it
        """
        held, coming = [*self.generations, *self.generations.leaving], self.generations.reserved
        open_files = sum(one.body.buffers for one in held) + sum(one.buffers for one in coming)
        if len(held) + len(coming) >= _MOST_SNAPSHOTS or open_files + buffers > self._most_buffers:
            raise NoRoom(f"the keeper holds {len(held)} snapshots, and can hold no more")
        self.make_room(about, nbytes)
        return self.generations.reserve(nbytes, buffers)

    def step_of(self, about: Snapshot) -> int:
        """Returns the step as which a snapshot is served: its own, or the next of its job and rank."""
        if about.step >= 0:
            return about.step
        self._counts[about.series] += 1
        return self._counts[about.series]

    def memory(
        self, step: int, rows: Table, control: Sequence[tuple[str, bytes]], buffers: Sequence[SharedBuffer]
    ) -> KeptMemory:
        """Returns the memory of a snapshot, which is served from now on; may be called on any thread.

        Raises:
            TensorferryError: it is no valid container
        """
        return KeptMemory(self._server, step, rows, control, buffers, self.run_soon)

    def add(self, about: Snapshot, step: int, body: KeptMemory, nbytes: int, reserved: Reservation) -> Kept[KeptMemory]:
        """Keeps a snapshot of ``nbytes`` bytes in place of what was reserved; to be called on the keeper's thread.

        Raises:
            NoRoom: it is kept already
        """
        reserved.close()
        try:
            self.make_room(about, nbytes)
        except NoRoom:
            body.cut()
            raise
        kept = self.generations.add(about.served(body.url(self.host), nbytes, step), nbytes, body)
        body.when_released = lambda: self._let_go(kept)
        self._digester.compute(body)
        self._index_is_old = True
        return kept

    def make_room(self, about: Snapshot, nbytes: int) -> None:
        """Evicts what has to go for a snapshot of ``nbytes`` bytes; to be called on the keeper's thread.

        Raises:
            NoRoom: that would not be enough
        """
        self.generations.make_room(about, nbytes, self._evict, self._cut)

    def _evict(self, kept: Kept[KeptMemory]) -> None:
        logger.info("%s is evicted", _named(kept.about))
        self.generations.leave(kept)
        self._index_is_old = True
        self._going[kept] = time.monotonic() + (_LENT_S if kept.lent else _LINGER_S)
        kept.body.withdraw()
        self._let_go(kept)

    def _cut(self, kept: Kept[KeptMemory]) -> None:
        kept.body.cut()
        self._index_is_old = True
        # The server's threads may hold its memory for another moment.
        self.generations.release(kept)
        self._let_go(kept)

    def _let_go(self, *evicted: Kept[KeptMemory]) -> None:
        """Releases evicted snapshots that nobody reads any more, and notifies the trainers that gave them."""
        for kept in evicted:
            if kept not in self._going or kept.lent or not kept.body.is_released:
                continue
            del self._going[kept]
            self.generations.release(kept)
            kept.body.cut()
            kept.body.when_released = _nothing
            for client in (*self._clients, *self._suspects):
                if kept in client.given:
                    client.given.discard(kept)
                    if not client.is_open:
                        break
                    about = kept.about
                    self._send(client, Message("released", {"save_id": about.save_id, "rank": about.rank}))
                    break

    def _let_go_of_oldest(self, client: Client) -> None:
        """Evicts the oldest snapshot of ``client``, which needs its memory now: its readers elsewhere are cut.

        What was evicted before and still has such readers goes first. What a process of this node reads is spared.
        """
        free = [kept for kept in client.given if not kept.lent]
        leaving = [kept for kept in free if kept in self._going]
        oldest = min(free, key=lambda kept: kept.order, default=None)
        if not leaving and oldest is not None:
            self._evict(oldest)
            leaving = [oldest]
        for kept in leaving:
            self._cut(kept)

    # Lending.

    def _lend(self, client: Client, message: Message) -> None:
        kept = self.generations.get(key_of(message.fields))
        if kept is None:
            self._send(client, Message("gone"))
            return
        if kept.about.key in client.borrowed:
            raise ProtocolError("it takes a snapshot that it has")
        kept.lent += 1
        client.borrowed[kept.about.key] = kept
        if kept.body.digests is None:
            self._readers.setdefault(kept.body, []).append((client, kept))
        else:
            self._send(client, kept.body.handover("taken", kept.about.fields()))

    def _digested(self, memory: KeptMemory) -> None:
        for client, kept in self._readers.pop(memory, []):
            there = self.generations.get(kept.about.key) is kept
            self._send(client, memory.handover("taken", kept.about.fields()) if there else Message("gone"))

    def _take_back(self, client: Client, message: Message) -> None:
        key = key_of(message.fields)
        if key is not None and (kept := client.borrowed.pop(key, None)) is not None:
            self._give_back(kept)

    def _give_back(self, kept: Kept[KeptMemory]) -> None:
        kept.lent = max(kept.lent - 1, 0)
        self._let_go(kept)

    # What is held.

    def _ask(self, client: Client, message: Message) -> None:
        partners = set(self._partners.values()) if message.fields.get("ask_buddies") is True else set()
        if not partners:
            self._list(client, message)
            return
        if any(waiting is client for waiting, *_ in self._waiting):
            raise ProtocolError("it asks again before it was answered")
        patience = max([partner.ask() for partner in partners])
        self._waiting.append((client, message, time.monotonic() + patience, partners))

    def _list(self, client: Client, message: Message) -> None:
        wanted = {name: value for name in ("job", "path", "rank") if (value := message.fields.get(name)) is not None}
        for one in self.held():
            fields = one.fields()
            if all(fields[name] == value for name, value in wanted.items()):
                self._send(client, Message("snapshot", fields))
        self._send(client, Message("end", {"address": self.address}))

    def held(self) -> list[Snapshot]:
        """Returns what this keeper holds, the newest last, and behind it what its partners hold and it does not."""
        own = [kept.about for kept in self.generations]
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
            "started": self._started,
            "memory": self.options.memory,
            "used": self.generations.used,
            "generations": self.options.generations,
            "snapshots": len(self.generations),
            "leaving": len(self.generations.leaving),
            "clients": len(self._clients),
            "served": self._server.bytes_served,
            "buddies": [partner.status() for partner in self._partners.values()][:32],
        }

    def _publish_index(self) -> None:
        self._index_is_old = False
        index.publish(self._index_shelf, [kept.about for kept in self.generations])

    # Partners.

    def _told_buddies(self, client: Client, message: Message) -> None:
        addresses = message.fields.get("buddies")
        try:
            self._set_buddies(_validate.items("buddies", addresses))  # type: ignore[arg-type]
        except InvalidArgument as e:
            self._send(client, Message("refused", {"save_id": None, "error": str(e)}))
            return
        self._send(client, Message("buddies", {"buddies": list(self._partners)}))

    def _set_buddies(self, addresses: Sequence[Any]) -> None:
        """Takes the keepers at ``addresses`` for partners, beside those of the command line.

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

    def _close(self) -> None:
        self._place.leave()
        self._listener.close()
        for partner in self._partners.values():
            partner.stop()
        self._digester.stop()
        self._reader.stop()
        for client in list(self._clients):
            client.has_left = True
            self._disconnect(client)
        self._server.shutdown(1.0)
        self._selector.close()
        self._wake.close()
        self._woken.close()


class _Broken(ProtocolError):
    """A handover is not what its message says."""


def _nothing() -> None:
    """What is left to be done for a snapshot that nobody reads any more."""


def _named(about: Snapshot) -> str:
    of = "" if about.origin == LOCAL else f" from {about.origin}"
    return f"step {about.step} of rank {about.rank} of {about.job}{of}"
