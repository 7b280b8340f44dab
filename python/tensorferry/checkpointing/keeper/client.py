"""``Keeper``: a node's keeper as trainers see it; torch-free.

Two kinds of connections go to it. A trainer that saves has one for as long as it lives, with a thread that reads the
keeper's answers. Everything that asks has one of its own for each question, and one that reads a snapshot holds it
until it has read.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from ... import _validate
from ..._native import Stored
from ..._reentry import CallLock
from ...errors import (
    ConnectError,
    ForkedProcess,
    IncompleteCheckpoint,
    InvalidArgument,
    ProtocolError,
    SystemRefused,
    TensorferryError,
    TransportClosed,
    message_of,
)
from ...net.heals import log_heal
from ...net.metadata import encrypted
from ...net.secret import shared_secret
from ...storage.folder import Index, checkpoints, read_index
from ...storage.places import place_of
from .. import handover
from ..handover import Handover, Message
from .choice import choose
from .fetching import fetch_snapshot, open_snapshot
from .kept_memory import kept_state
from .location import location_of
from .place import DEFAULT_NAME, find_socket, keeper_name
from .snapshot import LOCAL, Snapshot, default_job, most_trusted, snapshot

logger = logging.getLogger("tensorferry")

#: Seconds that the keeper has to take an offer, which holds the trainer up: it does at once unless it is stopped.
_OFFER_S = 2.0
#: Seconds that it has to show that it is at work. Giving back the memory of a large snapshot may take it a moment.
_AT_WORK_S = 5.0
#: Seconds that an answer may take for which it asks its buddies, or computes checksums.
_ANSWER_S = 20.0
#: Seconds in which a buddy has to begin to send a snapshot.
_REACH_S = 5.0
#: Most offers that it may leave unanswered: it answers at once, and what it has not answered takes memory.
_MOST_UNANSWERED = 2
#: Nanoseconds that the clock of another machine may be ahead.
_FAR_NS = 24 * 3600 * 10**9
#: Seconds that a keeper which was started has until it listens.
_START_S = 20.0


@dataclass
class _Offer:
    """A snapshot that was offered, and whom to tell when its memory is free."""

    save_id: str
    rank: int
    released: Callable[[], None]
    is_answered: bool = False


class Keeper:
    """The keeper of this node.

    Args:
        name: the name it was started with
        job: snapshots of one job and rank replace each other, and only a trainer of the same job gets them. ``None``
            takes the folder in which the checkpoint's folder lies, so that the checkpoints of one run are one job. On
            another machine, that is the same job if the folder is on a file server that both have mounted
        start: start a keeper with default options if none runs; it ends when nobody has used it for an hour
        secret: the shared secret, for snapshots that come from a buddy; ``None`` takes it from the environment as
            ``HTTPTransport`` does
        tls: refuse buddies that do not encrypt

    Raises:
        InvalidArgument: an argument cannot be used
        SystemRefused: with ``start``, it cannot be started
    """

    def __init__(
        self,
        name: str = DEFAULT_NAME,
        *,
        job: str | None = None,
        start: bool = False,
        secret: str | bytes | None = None,
        tls: bool = False,
    ) -> None:
        self.name = keeper_name(name)
        if job is not None and not (0 < len(_validate.string("job", job)) <= 1024 and job.isprintable()):
            raise InvalidArgument(f"job must be 1 to 1024 printable characters, not {_validate.brief(job)}")
        self._job = job
        self._secret = shared_secret(secret)
        self._tls = _validate.boolean("tls", tls)
        self._pid = os.getpid()
        self._call = CallLock("offer() or let_go()")
        #: The same lock, which a signal handler in the middle of such a call may enter for what does not wait.
        self._lock = self._call.reentrant
        self._changed = threading.Condition(self._lock)
        self._released = 0
        self._sock: socket.socket | None = None
        self._offers: collections.deque[_Offer] = collections.deque()
        self._was_missed = False
        #: Whether an offer has waited in vain for answers to those before it: the next one does not wait.
        self._is_late = False
        #: A question that the keeper has left unanswered, so that nobody waits for it again before it answers.
        self._unanswered: _Question | None = None
        self._is_closed = False
        #: By job and location, when the latest save began that the keeper is known to have; and the jobs for which it
        #: has been asked.
        self._began: dict[tuple[str, str], int] = {}
        self._asked: set[str] = set()
        if _validate.boolean("start", start):
            self._start()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Giving.

    def offer(self, given: Handover, released: Callable[[], None]) -> None:
        """Offers a staged snapshot to the keeper.

        It raises nothing and waits for nobody longer than two seconds: without a keeper, training goes on without one.
        If the keeper leaves two offers unanswered, for example because it is stopped, no further one is made.

        Args:
            given: the snapshot; its fields say ``path``, ``save_id``, ``rank``, ``world_size``, ``began`` and
                ``step``, which may be ``None``: the keeper counts then
            released: called once, from any thread, when the keeper does not need the memory: because it has refused
                the snapshot or has evicted it, or because the keeper is gone
        """
        offer = _Offer(str(given.fields.get("save_id")), int(given.fields.get("rank", 0)), released)
        try:
            self._check_process()
            fields = {name: given.fields.get(name) for name in _FIELDS}
            path = str(given.fields.get("path"))
            fields |= {"job": self._job_of(path), "location": location_of(path)}
            with self._call.held():
                self._is_late = not self._changed.wait_for(self._answers, 0.0 if self._is_late else _OFFER_S)
                if self._is_closed:
                    raise TransportClosed("this connection to a keeper was closed: make a new Keeper")
                if self._is_late:
                    raise _not_at_work(self.name)
                sock = self._sock or self._open()
                self._offers.append(offer)
                try:
                    handover.send(sock, Handover("keep", fields, given.rows, given.control, given.buffers))
                except BaseException:
                    # Nothing of it was sent.
                    with contextlib.suppress(ValueError):
                        self._offers.remove(offer)
                    raise
            self._note_beginning(str(fields["job"]), str(fields["location"]), int(given.fields.get("began", 0)))
            self._was_missed = False
        except Exception as e:
            if not self._was_missed:
                logger.warning("checkpoints are not kept in memory: %s", message_of(e))
            self._was_missed = True
            _tell(offer)

    def _answers(self) -> bool:
        return sum(not one.is_answered for one in self._offers) < _MOST_UNANSWERED

    def _open(self) -> socket.socket:
        sock = _connect(self.name)
        sock.settimeout(_OFFER_S)
        try:
            # A timeout would be one of reading, too: that has a descriptor of its own.
            reading = sock.dup()
        except OSError as e:
            sock.close()
            raise SystemRefused(f"the keeper {self.name!r} cannot be reached, no socket can be opened: {e}") from e
        _sockets.add(reading)
        reading.settimeout(None)
        self._sock = sock
        threading.Thread(target=self._listen, args=(sock, reading), name="tensorferry-keeper", daemon=True).start()
        return sock

    def _listen(self, sock: socket.socket, reading: socket.socket) -> None:
        """Reads what the keeper says about offers, until it is gone."""
        with reading:
            try:
                while isinstance(message := handover.receive(reading), Message):
                    self._hear(message)
            except (OSError, TensorferryError) as e:
                logger.debug("the keeper %s is gone: %s", self.name, message_of(e))
        with self._lock:
            self._sock = None
            self._asked.clear()
            # After close(), the keeper holds what it was given: the memory is not to be used again.
            offers = [] if self._is_closed else list(self._offers)
            if not self._is_closed:
                self._offers.clear()
        sock.close()
        if offers:
            logger.warning("the keeper %s is gone; checkpoints are not in memory any more", self.name)
        for offer in offers:
            _tell(offer)
            self._note_release()

    def _note_release(self) -> None:
        with self._changed:
            self._released += 1
            self._changed.notify_all()

    def _hear(self, message: Message) -> None:
        save_id, rank = message.fields.get("save_id"), message.fields.get("rank")
        with self._lock:
            offer = next(
                (
                    one
                    for one in self._offers
                    if (save_id is None or one.save_id == save_id)
                    and (rank is None or one.rank == rank)
                    and one.is_answered == (message.kind == "released")
                ),
                None,
            )
            if offer is None:
                return
            offer.is_answered = True
            self._changed.notify_all()
            if message.kind != "kept":
                self._offers.remove(offer)
        if message.kind == "refused":
            logger.warning("a checkpoint is not kept in memory: %s", message.fields.get("error"))
        if message.kind != "kept":
            _tell(offer)
            self._note_release()

    def let_go(self, patience: float = _OFFER_S) -> bool:
        """Has the keeper evict the oldest snapshot that this object has offered, for a trainer that needs its memory.

        Returns:
            Whether the memory of one was released within ``patience`` seconds.
        """
        if self._call.is_mine:
            return False
        with self._lock:
            sock, before = self._sock, self._released
            if sock is None or not self._offers:
                return False
            if not self._answers():
                # It is not at work.
                return False
            try:
                handover.send(sock, Message("let_go"))
            except (OSError, TensorferryError):
                return False
            return self._changed.wait_for(lambda: self._released > before, patience)

    # Asking.

    def held(
        self,
        *,
        job: str | None = None,
        path: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        ask_buddies: bool = False,
    ) -> list[Snapshot]:
        """Returns what the keeper holds, and what its buddies hold and it does not (``remote``), the oldest first.

        Args:
            job: only of this job
            path: only of checkpoints with this path
            rank: only of this rank
            ask_buddies: let the keeper ask its buddies anew, instead of returning what it knew a second ago

        Raises:
            ConnectError: no keeper of this name runs on this node
            ProtocolError: it answers something else
        """
        fields = {
            "job": job,
            "path": None if path is None else str(place_of(path)),
            "rank": rank,
            "ask_buddies": ask_buddies,
        }
        with self._question() as question:
            question.send(Message("held", fields))
            found = question.listed(fields)
        return sorted(found, key=lambda one: one.began)

    def begun(self, path: str | os.PathLike[str]) -> list[int]:
        """Returns when saves began that the keeper is known to have of the job of ``path``, the latest at least.

        A new save has to begin after them, whatever the clock says. What comes from a buddy counts if it began less
        than a day from now. It raises nothing; the keeper is asked once for each job, and waited for two seconds at
        most.
        """
        try:
            job, location = self._job_of(path), location_of(path)
            if job not in self._asked:
                with self._question(_OFFER_S) as question:
                    question.send(Message("held", {"job": job}))
                    for one in question.listed({"job": job}):
                        own = one.origin == LOCAL and not one.remote
                        if own or one.began < time.time_ns() + _FAR_NS:
                            self._note_beginning(one.job, one.location, one.began)
                self._asked.add(job)
        except Exception as e:
            logger.debug("when earlier saves began is not asked: %s", message_of(e))
            return []
        began = self._began.get((job, location))
        return [] if began is None else [began]

    def _note_beginning(self, job: str, location: str, began: int) -> None:
        self._began[job, location] = max(self._began.get((job, location), 0), began)

    def status(self) -> dict[str, Any]:
        """Returns what the keeper says about itself: its process, address, memory, clients and buddies.

        Raises:
            ConnectError: no keeper of this name runs on this node
            ProtocolError: it answers something else
        """
        with self._question() as question:
            return question.status

    def address(self) -> str:
        """Returns this keeper's address for ``--buddy``. Without a secret, anyone who knows it can read all snapshots.

        Raises:
            ConnectError: no keeper of this name runs on this node
            ProtocolError: it answers something else
        """
        return _validate.string("address", self.status().get("address"))

    def set_buddies(self, addresses: Iterable[str]) -> None:
        """Has the keeper copy the snapshots of the keepers at ``addresses``, besides those of its command line.

        The addresses of an earlier call are forgotten.

        Raises:
            InvalidArgument: one is not the address of a keeper
            ConnectError: no keeper of this name runs on this node
            ProtocolError: it answers something else
        """
        with self._question() as question:
            question.send(Message("buddies", {"buddies": _validate.items("addresses", addresses)}))
            answer = question.answer("buddies", "refused")
        if answer.kind == "refused":
            raise InvalidArgument(str(answer.fields.get("error")))

    def open(self, about: Snapshot, timeout: timedelta = timedelta(minutes=10)) -> Stored | None:
        """Returns a snapshot of the list that :meth:`held` gives, to be read.

        If this keeper holds it, it is that memory, verified when it is read; the keeper does not let it go before the
        result is dropped. If only a buddy holds it, it is fetched from there, and verified.

        Args:
            about: the snapshot
            timeout: the deadline of a receive from a buddy

        Returns:
            What has the entries, ``None`` if the keeper has evicted it meanwhile.

        Raises:
            ConnectError: no keeper of this name runs on this node
            ProtocolError: it answers something else
            TensorferryError: the buddy cannot be reached, or does not prove itself
        """
        self._note_beginning(about.job, about.location, about.began)
        if about.remote:
            if self._tls:
                encrypted([about.metadata])
            seconds = _validate.seconds("timeout", timeout)
            # One that does not answer is not waited for as long as one that sends.
            open_snapshot(about, min(seconds, _REACH_S), self._secret).close()
            remote = open_snapshot(about, seconds, self._secret)
            try:
                rows, buffer = fetch_snapshot(remote, about, lambda _: None)
            finally:
                remote.close()
            return Stored.over(rows, [], buffer)
        with contextlib.ExitStack() as stack:
            question = stack.enter_context(self._question())
            question.send(Message("take", about.named()))
            answer = question.memory()
            if answer is None:
                return None
            if snapshot(answer.fields).key != about.key:
                raise ProtocolError(f"the keeper {self.name} gives another snapshot than it was asked for")
            found = kept_state(answer, _Loan(question))
            stack.pop_all()
        return found

    def below(self, root: Path, rank: int, world_size: int) -> list[Snapshot]:
        """Returns the snapshots of ``rank`` of this job's checkpoints in ``root``, here or at a buddy; raises nothing.

        Those of another folder of this name count if the job was given a name and nothing is committed in ``root``.
        """
        try:
            found = self.held(job=self._job or str(root), rank=rank, ask_buddies=True)
            found = [one for one in found if Path(one.path).parent == root and one.world_size == world_size]
            found = most_trusted(found)
            own = [one for one in found if one.location == location_of(one.path)]
            if len(own) < len(found) and self._job is not None and not (root.is_dir() and checkpoints(root)):
                return found
        except Exception as e:
            logger.warning("no checkpoint is in memory: %s", message_of(e))
            return []
        return own

    def prefer(
        self, path: str | os.PathLike[str], rank: int, world_size: int, agreed: str | None = None
    ) -> Stored | None:
        """Returns the checkpoint at ``path`` out of memory, ``None`` if it is to be loaded from the disk.

        It is taken from this node's keeper, or from one of its buddies; ``choice.choose`` says when. Nothing is raised:
        the log says why the disk is used.

        Args:
            path: the folder of the checkpoint
            rank: whose state
            world_size: how many ranks load
            agreed: the id of the save, if the ranks have agreed on it
        """
        try:
            folder = place_of(path)
            index, job, location = _committed(folder), self._job_of(folder), location_of(folder)
            for ask_buddies in (False, True):
                known = self.held(job=job, path=folder, rank=rank, ask_buddies=ask_buddies)
                has_name = self._job is not None
                chosen = choose(known, index, world_size, location, has_name=has_name, agreed=agreed)
                found = None if chosen is None else self.open(chosen)
                if chosen is not None and found is not None:
                    where = "a buddy of the keeper" if chosen.remote else "the keeper"
                    log_heal("loading step %d of %s from %s: %d bytes", chosen.step, folder, where, chosen.nbytes)
                    return found
            elsewhere = any(one.location != location for one in known)
            why = f"holds that of {job} on another machine's disk" if elsewhere else "does not hold it for all ranks"
            log_heal("loading %s from the disk: the keeper %s %s", folder, self.name, why)
        except Exception as e:
            logger.warning("loading %s from the disk: %s", path, message_of(e))
        return None

    def _job_of(self, path: str | os.PathLike[str]) -> str:
        return self._job or default_job(os.fspath(path))

    def _question(self, patience: float | None = None) -> _Question:
        """Returns a connection for one question, to a keeper that is at work.

        A keeper that is stopped is waited for once, for ``patience`` seconds; until it answers, further questions fail
        at once.

        Raises:
            ConnectError: no keeper of this name runs on this node, or it does not answer
            ProtocolError: it answers something else
        """
        unanswered = self._unanswered
        if unanswered is not None and not unanswered.has_answer():
            raise _not_at_work(self.name)
        if unanswered is not None:
            self._unanswered = None
            unanswered.close()
        question = _Question(self.name)
        if not question.begin(_AT_WORK_S if patience is None else patience):
            self._unanswered = question
            raise _not_at_work(self.name)
        return question

    def close(self) -> None:
        """Ends the connection of a trainer that saves; nothing can be offered any more.

        What the keeper holds stays there. So its memory is not to be used again: ``released`` is not called for it, and
        this object holds on to it.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._is_closed = True
            if (unanswered := self._unanswered) is not None:
                self._unanswered = None
                unanswered.close()
            if (sock := self._sock) is not None:
                with contextlib.suppress(OSError, TensorferryError):
                    handover.send(sock, Message("farewell"))
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("this keeper was connected in the process that this one was forked from: make another")

    def _start(self) -> None:
        if _is_running(self.name):
            return
        command = [sys.executable, "-m", __package__, "--name", self.name, "--idle", "3600", "--quiet"]
        try:
            # A session of its own: Ctrl-C at the trainer's terminal is not meant for it.
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, close_fds=True
            )
        except OSError as e:
            raise SystemRefused(f"a keeper could not be started: {e}") from e
        deadline = time.monotonic() + _START_S
        while not _is_running(self.name):
            # One that another trainer has started at the same time does as well; ours ends then.
            if started.poll() not in (None, 1) or time.monotonic() > deadline:
                started.kill()
                raise SystemRefused(f"a keeper was started and does not answer: {' '.join(command)}")
            time.sleep(0.01)
        threading.Thread(target=started.wait, name="tensorferry-reap", daemon=True).start()


#: The fields of a snapshot that a trainer knows.
_FIELDS = ("path", "save_id", "rank", "world_size", "step", "began")


class _Silent(ConnectError):
    """The keeper does not answer."""


def _not_at_work(name: str) -> _Silent:
    return _Silent(f"the keeper {name} does not answer: it may be stopped, or the machine overloaded")


class _Loan:
    """The hold that a reader has on a snapshot in the keeper; ends with its last reference."""

    def __init__(self, question: _Question) -> None:
        self._question = question

    def __del__(self) -> None:
        self._question.close()


class _Question:
    """A connection for one question.

    Attributes:
        status: what the keeper said about itself, once :meth:`begin` has returned true
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._sock = _connect(name)
        self.status: dict[str, Any] = {}

    def begin(self, patience: float) -> bool:
        """Returns whether the keeper is at work: whether it says something about itself within ``patience`` seconds."""
        self._sock.settimeout(patience)
        try:
            self.send(Message("status"))
            self.status = self.answer("status").fields
        except _Silent:
            return False
        except BaseException:
            self.close()
            raise
        self._sock.settimeout(_ANSWER_S)
        return True

    def has_answer(self) -> bool:
        """Whether there is something to be read by now, or the keeper has ended; or this connection, in a fork."""
        if self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def __enter__(self) -> _Question:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._sock.close()

    def send(self, message: Message) -> None:
        with self._expected():
            handover.send(self._sock, message)

    def answer(self, *kinds: str) -> Message:
        answer = self._receive()
        if not isinstance(answer, Message) or answer.kind not in kinds:
            raise ProtocolError(f"the keeper {self._name} gives an answer to another question")
        return answer

    def listed(self, asked: dict[str, Any]) -> list[Snapshot]:
        """Returns the snapshots in the answer to ``held``, with the fields that were ``asked`` for."""
        found = []
        while (message := self.answer("snapshot", "end")).kind == "snapshot":
            found.append(snapshot(message.fields))
            for name in ("job", "path", "rank"):
                if asked.get(name) not in (None, getattr(found[-1], name)):
                    raise ProtocolError(f"the keeper {self._name} gives an answer to another question")
        return found

    def memory(self) -> Handover | None:
        answer = self._receive()
        if isinstance(answer, Message) and answer.kind == "gone":
            return None
        if not isinstance(answer, Handover) or answer.kind != "taken":
            raise ProtocolError(f"the keeper {self._name} gives an answer to another question")
        return answer

    def _receive(self) -> Message | Handover:
        with self._expected():
            answer = handover.receive(self._sock)
        if answer is None:
            raise ConnectError(f"the keeper {self._name} has ended, or runs another version of tensorferry")
        return answer

    @contextlib.contextmanager
    def _expected(self) -> Any:
        try:
            yield
        except TimeoutError as e:
            raise _not_at_work(self._name) from e
        except OSError as e:
            if isinstance(e, TensorferryError):
                raise
            raise ConnectError(f"the keeper {self._name} is gone: {e}") from e


#: All connections to keepers. They are closed in a forked child: while it had them, a keeper would take a trainer that
#: is gone for one that is connected.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for inherited in list(_sockets):
        if (descriptor := inherited.detach()) >= 0:
            os.close(descriptor)


os.register_at_fork(after_in_child=_close_in_child)


def _connect(name: str) -> socket.socket:
    """Returns a connection to the keeper called ``name``.

    Raises:
        ConnectError: there is none
        SystemRefused: its folder is not this user's alone, or it is another user's, or no socket can be opened
    """
    path = find_socket(name)
    if path is None:
        raise ConnectError(f"no keeper called {name!r} runs on this node: start one with tensorferry-keeper")
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as e:
        raise SystemRefused(f"the keeper {name!r} cannot be reached, no socket can be opened: {e}") from e
    _sockets.add(sock)
    try:
        sock.settimeout(_OFFER_S)
        _queue_at(sock, path)
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    except OSError as e:
        sock.close()
        raise ConnectError(f"no keeper called {name!r} answers at {path}: {e}") from e
    if uid != os.geteuid():
        sock.close()
        raise SystemRefused(f"the keeper at {path} is user {uid}'s, not this user's")
    return sock


def _queue_at(sock: socket.socket, path: Path) -> None:
    deadline = time.monotonic() + _OFFER_S
    while True:
        try:
            sock.connect(os.fspath(path))
            return
        except BlockingIOError:
            # Many wait to be accepted, and a socket with a timeout is not queued behind them.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def _committed(folder: Path) -> Index | None:
    try:
        return read_index(folder)
    except IncompleteCheckpoint:
        return None


def _is_running(name: str) -> bool:
    try:
        _connect(name).close()
    except (ConnectError, SystemRefused):
        return False
    return True


def _tell(offer: _Offer) -> None:
    try:
        offer.released()
    except Exception:
        logger.exception("a buffer could not be taken back")
