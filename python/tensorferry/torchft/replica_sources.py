"""Makes every healthy replica of a torchft job a source for those that heal, not only the one that torchft assigns.

torchft's quorum tells each healing replica one source, and only that source that it is one. But it tells everybody
how many replicas there are and how many of them are healthy, so a healthy replica knows that somebody heals. It then
publishes as if it had been assigned, and writes its metadata into the store that all replicas of the quorum share,
where the healing ones find it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

from torch.distributed import DistError, PrefixStore, TCPStore

from ..net.store import StoreThread
from .transport import HTTPTransport

logger = logging.getLogger("tensorferry")

#: How many sources a receive uses at most, besides the assigned one: each of them costs a connection and a header.
_MOST_SOURCES = 8
#: How long a healing replica that has reached the store waits for other replicas to write into it. The healthy ones
#: write when they get the same quorum, so only those that run something else let it wait.
_PATIENCE = timedelta(milliseconds=250)
#: How long a healing replica waits for the store itself, from the quorum on.
_STORE_PATIENCE = 1.0
#: How long the connection to a store may take.
_CONNECT = timedelta(seconds=2)
#: What ``metadata()`` of a transport returns. The store may hold anything, and what is no such URL would fail the heal.
_METADATA = re.compile(
    r"(?:http://|https://sha256-[0-9a-f]{64}@)(?:[\w.-]{1,255}|\[[0-9A-Fa-f:.]{2,45}(?:%\w{1,32})?\]):([1-9]\d{0,4})"
    r"/[!-~]{1,512}/checkpoint/",
    re.ASCII,
)
#: How many characters of something else a message repeats.
_SHOWN = 200


class _Key(NamedTuple):
    """Where a replica's metadata stands: the store's address, the quorum's prefix, and the replica's place."""

    address: str
    prefix: str
    place: str


_Announced: TypeAlias = tuple[PrefixStore, _Key]


class ReplicaSources:
    """Stands for the client of a Manager's quorum, and looks at what that is told.

    Whatever fails here is logged, and the replicas heal as torchft assigns them.

    Args:
        client: torchft's ``ManagerClient``
        transport: the Manager's transport
        group_rank: the rank in its replica group; ranks heal from those with the same number
    """

    def __init__(self, client: Any, transport: HTTPTransport[Any], group_rank: int) -> None:
        self._client = client
        self._transport = transport
        self._group_rank = group_rank
        self._thread = StoreThread()
        self._last: Future[Any] | None = None
        self._announced: _Announced | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, *args: Any, **kwargs: Any) -> Any:
        """Asks for a quorum; where this replica is healthy and another one heals, the result says that it sends.

        Manager then calls ``send_checkpoint`` in this step, with the state and on the stream that it uses for a replica
        that torchft assigned to it.
        """
        quorum = self._client._quorum(*args, **kwargs)
        try:
            self._transport.find_sources(None)
            # At the first step all heal from the primary.
            some_heal = quorum.max_world_size < quorum.replica_world_size
            if some_heal and not quorum.heal and self._sends(quorum):
                self._announce(quorum)
                return _Sending(quorum)
            self._withdraw()
            if some_heal and quorum.heal:
                self._transport.find_sources(self._search(quorum))
            return quorum
        except Exception as e:
            logger.warning("replicas heal from the sources that torchft assigns alone: %s: %s", type(e).__name__, e)
            return quorum

    def _sends(self, quorum: Any) -> bool:
        """Whether this replica is one of those that send."""
        place = quorum.max_replica_rank
        return place is not None and (place - quorum.quorum_id) % quorum.max_world_size < _senders(quorum)

    def _announce(self, quorum: Any) -> None:
        """Writes this replica's metadata into the quorum's store, and takes back what an earlier quorum was told."""
        where = _Key(quorum.store_address, self._prefix(quorum), str(quorum.max_replica_rank))
        metadata, former = self._transport.metadata(), self._take_announced()

        def announce() -> None:
            store = _connect(where.address, where.prefix)
            store.set(where.place, metadata)
            self._announced = (store, where)
            # Last, since the store of an earlier quorum may not answer any more. It may also be the same key.
            if former is not None and former[1] != where:
                _delete(former)

        # Nobody waits for it: a store that does not answer must not hold up a healthy replica.
        self._ask(announce)

    def _search(self, quorum: Any) -> Callable[[], list[str]]:
        """Starts to look for the replicas that send; returns what waits for the end, and returns their metadata."""
        senders = _senders(quorum)
        # Those that heal begin at different ones, where there are more than one of them takes.
        first = quorum.replica_rank * _MOST_SOURCES
        places = [
            str((quorum.quorum_id + (first + number) % senders) % quorum.max_world_size)
            for number in range(min(senders, _MOST_SOURCES))
        ]
        address, prefix, until = quorum.store_address, self._prefix(quorum), time.monotonic() + _STORE_PATIENCE

        def read() -> list[str]:
            store = _connect(address, prefix)
            try:
                store.wait(places, _PATIENCE)
            except DistError:
                places[:] = [place for place in places if store.check([place])]
            return [bytes(store.get(place)).decode("ascii", "replace") for place in places]

        answer = self._ask(read)

        def besides() -> list[str]:
            try:
                return _valid_sources(answer.result(max(until - time.monotonic(), 0.0)))
            except Exception as e:
                reason = "the job's store has not answered" if isinstance(e, TimeoutError) else e
                logger.warning("this replica heals from the source that torchft assigned alone: %s", reason)
                return []

        return besides

    def _withdraw(self) -> None:
        """Takes back what an earlier quorum's replicas were told."""
        if (former := self._take_announced()) is not None:
            self._ask(lambda: _delete(former))

    def _take_announced(self) -> _Announced | None:
        former, self._announced = self._announced, None
        return former

    def _ask(self, call: Callable[[], Any]) -> Future[Any]:
        """Lets the thread make ``call``: another thread, if this one still waits for an answer."""
        if self._last is not None and not self._last.done():
            self._thread = StoreThread()
        self._last = self._thread.ask(call)
        return self._last

    def _prefix(self, quorum: Any) -> str:
        # Quorums are counted anew when the Lighthouse or the job starts again, and another job may use the same store.
        # But no two of them have the same replicas: torchft gives each process an identifier of its own.
        members = hashlib.blake2b("\0".join(sorted(quorum.replica_ids)).encode(), digest_size=16).hexdigest()
        return f"tensorferry/sources/{members}/{quorum.quorum_id}/{quorum.max_step}/{self._group_rank}"


class _Sending:
    """A quorum of torchft's that says that this replica sends, whomever torchft has assigned to it."""

    def __init__(self, quorum: Any) -> None:
        self._quorum = quorum
        others = [rank for rank in range(quorum.replica_world_size) if rank != quorum.replica_rank]
        #: torchft does not tell who heals.
        self.recover_dst_replica_ranks = quorum.recover_dst_replica_ranks or others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._quorum, name)


def _senders(quorum: Any) -> int:
    """Returns how many healthy replicas send: no more than those that heal use."""
    healing = quorum.replica_world_size - quorum.max_world_size
    return int(min(quorum.max_world_size, healing * _MOST_SOURCES))


def _connect(address: str, prefix: str) -> PrefixStore:
    host, _, port = address.rpartition(":")
    # One connection for each heal: the store is another one when its replica has died.
    return PrefixStore(
        prefix, TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=_CONNECT)
    )


def _delete(announced: _Announced) -> None:
    """Deletes a key, if its store is still there."""
    store, where = announced
    with contextlib.suppress(DistError):
        store.delete_key(where.place)


def _valid_sources(found: list[str]) -> list[str]:
    """Returns those of ``found`` that can be the metadata of a tensorferry transport, and logs the others."""
    sources = []
    for metadata in found:
        matched = _METADATA.fullmatch(metadata)
        if matched is not None and int(matched[1]) < 1 << 16:
            sources.append(metadata)
        else:
            logger.warning(
                "a source in the job's store is left out: %.*r is not the metadata of a transport", _SHOWN, metadata
            )
    return sources
