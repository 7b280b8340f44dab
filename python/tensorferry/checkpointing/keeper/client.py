"""``Keeper``: a node's keeper as trainers see it; torch-free.

Two kinds of connections go to it. A trainer that saves has one for as long as it lives, with a thread that reads the
keeper's answers. Everything that asks has one of its own for each question, and one that reads a snapshot holds it
until it has read.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from ... import _validate
from ..._native import Stored
from ...errors import (
    ForkedProcess,
    IncompleteCheckpoint,
    InvalidArgument,
    ProtocolError,
    message_of,
)
from ...net.certificates import wants_tls
from ...net.heals import log_heal
from ...net.metadata import encrypted
from ...net.secret import shared_secret
from ...storage.folder import Index, read_index
from ...storage.places import place_of
from ...storage.series import checkpoints
from ..handover import Handover, Message
from ..latest import is_folder
from . import questions
from .choice import choose
from .connecting import OFFER_S, not_at_work
from .connecting import start as start_keeper
from .fetching import fetch_snapshot, open_snapshot
from .kept_memory import kept_state
from .location import location_of
from .offers import Offer, Offers
from .place import DEFAULT_NAME, keeper_name
from .questions import Loan, Question
from .snapshot import Snapshot, default_job, most_trusted, snapshot

logger = logging.getLogger("tensorferry")

#: Seconds in which a buddy has to begin to send a snapshot.
_REACH_S = 5.0


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
        tls: refuse buddies that do not encrypt; ``None`` takes it from the environment as ``HTTPTransport`` does

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
        tls: bool | None = None,
    ) -> None:
        self.name = keeper_name(name)
        if job is not None and not (0 < len(_validate.string("job", job)) <= 1024 and job.isprintable()):
            raise InvalidArgument(f"job must be 1 to 1024 printable characters, not {_validate.brief(job)}")
        self._job = job
        self._secret = shared_secret(secret)
        self._tls = wants_tls(tls)
        self._pid = os.getpid()
        #: A question that the keeper has left unanswered, so that nobody waits for it again before it answers.
        self._unanswered: Question | None = None
        self._was_missed = False
        self.newest_loaded = 0
        self._offers = Offers(self.name, self._secret)
        if _validate.boolean("start", start):
            start_keeper(self.name)

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
        offer = Offer(str(given.fields.get("save_id")), int(given.fields.get("rank", 0)), released)
        try:
            self._check_process()
            fields = {name: given.fields.get(name) for name in _FIELDS}
            path = str(given.fields.get("path"))
            fields |= {"job": self._job_of(path), "location": location_of(path)}
            self._offers.add(offer, Handover("keep", fields, given.rows, given.control, given.buffers))
            self._was_missed = False
        except Exception as e:
            if not self._was_missed:
                logger.warning("checkpoints are not kept in memory: %s", message_of(e))
            self._was_missed = True
            if not offer.sent:
                offer.tell()

    def let_go(self, patience: float = OFFER_S) -> bool:
        """Has the keeper evict the oldest snapshot that this object has offered, for a trainer that needs its memory.

        Returns:
            Whether the memory of one was released within ``patience`` seconds.
        """
        return self._offers.let_go(patience)

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
            ConnectError: no keeper of this name runs on this node, or it does not answer
            SystemRefused: it is another user's, or no socket can be opened
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
            found = question.snapshots(fields)
        return sorted(found, key=lambda one: one.began)

    def status(self) -> dict[str, Any]:
        """Returns what the keeper says about itself: its process, address, memory, clients and buddies.

        Raises:
            ConnectError: no keeper of this name runs on this node, or it does not answer
            SystemRefused: it is another user's, or no socket can be opened
            ProtocolError: it answers something else
        """
        with self._question() as question:
            return question.status

    def address(self) -> str:
        """Returns this keeper's address for ``--buddy``. Without a secret, anyone who knows it can read all snapshots.

        Raises:
            ConnectError: no keeper of this name runs on this node, or it does not answer
            SystemRefused: it is another user's, or no socket can be opened
            ProtocolError: it answers something else
        """
        return _validate.string("address", self.status().get("address"))

    def set_buddies(self, addresses: Iterable[str]) -> None:
        """Has the keeper copy the snapshots of the keepers at ``addresses``, besides those of its command line.

        The addresses of an earlier call are forgotten. A keeper has 16 buddies at most, first those of the command
        line; further addresses are left out, and nothing says so.

        Raises:
            InvalidArgument: one is not the address of a keeper
            ConnectError: no keeper of this name runs on this node, or it does not answer
            SystemRefused: it is another user's, or no socket can be opened
            ProtocolError: it answers something else
        """
        with self._question() as question:
            question.send(Message("buddies", {"buddies": _validate.items("addresses", addresses)}))
            answer = question.answer("buddies", "refused")
        if answer.kind == "refused":
            raise InvalidArgument(str(answer.fields.get("error")))

    def open(self, about: Snapshot, timeout: timedelta = timedelta(minutes=10)) -> Stored | None:
        """Returns a snapshot of the list that :meth:`held` gives, to be read.

        If this keeper holds it, it is that memory, verified when it is read. The keeper does not let it go before the
        result is dropped, unless it has evicted it minutes before, or its trainer has left: then a read of bytes that
        were overwritten fails. If only a buddy holds it, it is fetched from there, and verified.

        Args:
            about: the snapshot
            timeout: the deadline of a receive from a buddy

        Returns:
            What has the entries, ``None`` if this keeper has evicted it meanwhile.

        Raises:
            ConnectError: no keeper of this name runs on this node, or it does not answer
            SystemRefused: it is another user's, or no socket can be opened
            ProtocolError: it answers something else
            TensorferryError: the buddy cannot be reached, does not prove itself, or has evicted it
        """
        self.newest_loaded = max(self.newest_loaded, about.began)
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
            found = kept_state(answer, Loan(question))
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
            if len(own) < len(found) and self._job is not None and not (is_folder(root) and checkpoints(root)):
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
            index, job, location = _committed_index(folder), self._job_of(folder), location_of(folder)
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

    def _question(self, patience: float | None = None) -> Question:
        """Returns a connection for one question, to a keeper that is at work.

        A keeper that is stopped is waited for once, for ``patience`` seconds; until it answers, further questions fail
        at once.

        Raises:
            ConnectError: no keeper of this name runs on this node, or it does not answer
            SystemRefused: it is another user's, or no socket can be opened
            ProtocolError: it answers something else
        """
        unanswered = self._unanswered
        if unanswered is not None and not unanswered.has_answer():
            raise not_at_work(self.name)
        if unanswered is not None:
            self._unanswered = None
            unanswered.close()
        question = Question(self.name)
        if not question.begin(questions.AT_WORK_S if patience is None else patience):
            self._unanswered = question
            raise not_at_work(self.name)
        return question

    def close(self) -> None:
        """Ends the connection of a trainer that saves; nothing can be offered any more.

        What the keeper holds stays there. So its memory is not to be used again: ``released`` is not called for it, and
        this object holds on to it.
        """
        if os.getpid() != self._pid:
            return
        if (unanswered := self._unanswered) is not None:
            self._unanswered = None
            unanswered.close()
        self._offers.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("this keeper was connected in the process that this one was forked from: make another")


#: The fields of a snapshot that a trainer knows.
_FIELDS = ("path", "save_id", "rank", "world_size", "step", "began")


def _committed_index(folder: Path) -> Index | None:
    """Returns the index of the checkpoint in ``folder``; ``None`` if it has none."""
    try:
        return read_index(folder)
    except IncompleteCheckpoint:
        return None
