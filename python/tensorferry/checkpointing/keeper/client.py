"""``Keeper``: a node's keeper as trainers see it; torch-free.

Two kinds of connections go to it. A trainer that saves has one for as long as it lives, with a thread that reads the
keeper's answers. Everything that asks has one of its own for each question, and one that reads a snapshot holds it
until it has read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import _validate
from ..._native import Stored
from ...errors import ConnectError, IncompleteCheckpoint, InvalidArgument, ProtocolError, TensorferryError, message_of
from ...net.network import Network, network_of
from ...storage.folder import Index, read_index
from ...storage.places import place_of
from ...storage.series import checkpoints
from .. import handover
from ..handover import Handover, Message
from ..latest import is_folder
from .buddies import FETCH_S, fetch_snapshot, open_snapshot
from .kept_memory import kept_state
from .offers import Offer, Offers
from .place import DEFAULT_NAME, OFFER_S, connect, keeper_name, not_at_work
from .snapshot import Snapshot, choose, default_job, location_of, most_trusted, snapshot

logger = logging.getLogger("tensorferry")

#: Seconds that the keeper has to show that it is at work. Giving back the memory of a large snapshot may take it a
#: moment.
AT_WORK_S = 5.0
#: Seconds for which a load waits for the first list of a buddy, and in which a buddy has to begin to send a snapshot.
_BUDDIES_S, _REACH_S = 3.0, 5.0
#: The fields of a snapshot that a trainer knows.
_FIELDS = ("path", "save_id", "rank", "world_size", "step", "began")


class Keeper:
    """The keeper of this node.

    Args:
        name: the name it was started with
        job: snapshots of one job and rank replace each other, and only a trainer of the same job gets them. ``None``
            takes the folder in which the checkpoint's folder lies, on this machine, so that the checkpoints of one run
            are one job. A job that is to go on on another machine needs a name
        network, secret: as for ``HTTPTransport``, for snapshots that come from a buddy

    Raises:
        InvalidArgument: an argument cannot be used
    """

    def __init__(
        self,
        name: str = DEFAULT_NAME,
        *,
        job: str | None = None,
        network: Network | None = None,
        secret: str | bytes | None = None,
    ) -> None:
        self.name = keeper_name(name)
        if job is not None and not (0 < len(_validate.string("job", job)) <= 1024 and job.isprintable()):
            raise InvalidArgument(f"job must be 1 to 1024 printable characters, not {_validate.brief(job)}")
        self._job = job
        self._network = network_of(network, secret=secret)
        self._was_missed = False
        #: When the newest save began that it has given out, in nanoseconds since the epoch.
        self.newest_loaded = 0
        self._offers = Offers(self.name)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Giving.

    def offer(self, given: Handover, released: Callable[[], None]) -> None:
        """Offers a staged snapshot to the keeper.

        It raises nothing and waits for nobody longer than two seconds: without a keeper, training goes on without one.
        If the keeper leaves two offers unanswered, for example because it is stopped, no further one is made.

        Args:
            given: the snapshot; its fields say ``path``, ``save_id``, ``rank``, ``world_size``, ``began`` and
                ``step``, which may be ``None``
            released: called once, from any thread, when the keeper does not need the memory: because it has refused
                the snapshot or has evicted it, or because the keeper is gone
        """
        offer = Offer(str(given.fields.get("save_id")), int(given.fields.get("rank", 0)), released)
        try:
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
        self, *, job: str | None = None, path: str | os.PathLike[str] | None = None, rank: int | None = None
    ) -> list[Snapshot]:
        """Returns what the keeper holds, and what its buddies hold and it does not (``remote``), the oldest first.

        Args:
            job: only of this job
            path: only of checkpoints with this path
            rank: only of this rank

        Raises:
            ConnectError: no keeper of this name runs on this node, or it does not answer
            SystemRefused: it is another user's, or no socket can be opened
            ProtocolError: it answers something else
        """
        place = None if path is None else str(place_of(path))
        found = []
        with _Question(self.name) as question:
            message = question.ask(Message("held"))
            while message.kind == "snapshot":
                one = snapshot(message.fields)
                message = question.ask()
                if job in (None, one.job) and place in (None, one.path) and rank in (None, one.rank):
                    found.append(one)
        return sorted(found, key=lambda one: one.began)

    def status(self) -> dict[str, Any]:
        """Returns what the keeper says about itself: its process, address, memory, clients and buddies.

        Raises:
            ConnectError: no keeper of this name runs on this node, or it does not answer
            SystemRefused: it is another user's, or no socket can be opened
            ProtocolError: it answers something else
        """
        with _Question(self.name) as question:
            return question.status

    def open(self, about: Snapshot) -> Stored | None:
        """Returns a snapshot of the list that :meth:`held` gives, to be read.

        If this keeper holds it, it is that memory, verified when it is read. The keeper does not let it go before the
        result is dropped, unless it has evicted it minutes before, or its trainer has left: then a read of bytes that
        were overwritten fails. If only a buddy holds it, it is fetched from there, and verified.

        Args:
            about: the snapshot

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
            # One that does not answer is not waited for as long as one that sends.
            open_snapshot(about, _REACH_S, self._network).close()
            with contextlib.closing(open_snapshot(about, FETCH_S, self._network)) as remote:
                rows, buffer = fetch_snapshot(remote, about)
            return Stored.over(rows, [], buffer)
        question = _Question(self.name)
        try:
            while isinstance(answer := question.ask(Message("take", {"key": about.key})), Message):
                if answer.kind != "later":
                    question.close()
                    return None
                # Its checksums are being computed.
                time.sleep(0.02)
            if snapshot(answer.fields).key != about.key:
                raise ProtocolError(f"the keeper {self.name} gives another snapshot than it was asked for")
            return kept_state(answer, _Loan(question))
        except BaseException:
            question.close()
            raise

    def below(self, root: Path, rank: int, world_size: int) -> list[Snapshot]:
        """Returns the snapshots of ``rank`` of this job's checkpoints in ``root``, here or at a buddy; raises nothing.

        Those of another folder of this name count if the job was given a name and nothing is committed in ``root``.
        """
        try:
            self._wait_for_buddies()
            found = self.held(job=self._job or str(root), rank=rank)
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

        It is taken from this node's keeper, or from one of its buddies; ``choose`` says when. Nothing is raised: the
        log says why the disk is used.

        Args:
            path: the folder of the checkpoint
            rank: whose state
            world_size: how many ranks load
            agreed: the id of the save, if the ranks have agreed on it
        """
        try:
            folder = place_of(path)
            job, location = self._job_of(folder), location_of(folder)
            self._wait_for_buddies()
            known = self.held(job=job, path=folder, rank=rank)
            chosen = choose(
                known, _committed_index(folder), world_size, location, has_name=self._job is not None, agreed=agreed
            )
            found = None if chosen is None else self.open(chosen)
            if chosen is not None and found is not None:
                where = "a buddy of the keeper" if chosen.remote else "the keeper"
                logger.info("loading step %d of %s from %s: %d bytes", chosen.step, folder, where, chosen.nbytes)
                return found
            elsewhere = any(one.location != location for one in known)
            why = f"holds that of {job} in another folder" if elsewhere else "does not hold it for all ranks"
            logger.info("loading %s from the disk: the keeper %s %s", folder, self.name, why)
        except Exception as e:
            logger.warning("loading %s from the disk: %s", path, message_of(e))
        return None

    def _job_of(self, path: str | os.PathLike[str]) -> str:
        return self._job or default_job(os.fspath(path))

    def _wait_for_buddies(self) -> None:
        """Waits until a keeper that has just begun has asked its buddies, for three seconds at most."""
        deadline = time.monotonic() + _BUDDIES_S
        while any(one["silent_s"] is None and not one["error"] for one in self.status()["buddies"]):
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def close(self) -> None:
        """Ends the connection of a trainer that saves; nothing can be offered any more.

        What the keeper holds stays there. So its memory is not to be used again: ``released`` is not called for it, and
        this object holds on to it.
        """
        self._offers.close()


def _committed_index(folder: Path) -> Index | None:
    """Returns the index of the checkpoint in ``folder``; ``None`` if it has none."""
    try:
        return read_index(folder)
    except IncompleteCheckpoint:
        return None


class _Question:
    """A connection for one question, to a keeper that has shown that it is at work.

    Attributes:
        status: what the keeper said about itself

    Raises:
        ConnectError: there is no keeper; of its methods, also: it is gone, or does not answer in time
        SystemRefused: it is another user's, or no socket can be opened
        ProtocolError: it answers something else
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._sock = connect(name)
        self._sock.settimeout(AT_WORK_S)
        try:
            self.status: dict[str, Any] = self.ask(Message("status")).fields
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> _Question:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and with it what the keeper has lent over it."""
        self._sock.close()

    def ask(self, message: Message | None = None) -> Message | Handover:
        """Sends ``message``, if there is one, and returns the next answer."""
        try:
            if message is not None:
                handover.send(self._sock, message)
            answer = handover.receive(self._sock)
        except TimeoutError as e:
            raise not_at_work(self._name) from e
        except OSError as e:
            if isinstance(e, TensorferryError):
                raise
            raise ConnectError(f"the keeper {self._name} is gone: {e}") from e
        if answer is None:
            raise ConnectError(f"the keeper {self._name} has ended, or runs another version of tensorferry")
        if answer.kind == "refused":
            raise ProtocolError(str(answer.fields.get("error")))
        return answer


class _Loan:
    """The hold that a reader has on a snapshot in the keeper; ends with its last reference."""

    def __init__(self, question: _Question) -> None:
        self._question = question

    def __del__(self) -> None:
        self._question.close()
