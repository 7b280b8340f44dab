"""Buddies: keepers on other nodes, whose snapshots are copied here, so that the loss of a node loses nothing.

A keeper serves the list of its snapshots beside them: a container with one entry, which is fetched, verified and
protected like any checkpoint. With a shared secret, which buddies need, its path is the same for every keeper, and
``host:port`` is enough of an address. A buddy has a thread, which asks it for its list every second and
fetches what is new: the newest snapshots that its own trainers gave it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ... import _validate
from ..._native import Remote, SharedBuffer, Shelf, Table
from ..._settings import SECRET, SECRET_FILE
from ...errors import (
    ConnectError,
    FetchTimeout,
    InvalidArgument,
    ProtocolError,
    SourceChanged,
    SourceRefused,
    TensorferryError,
    message_of,
)
from ...memory.layout import side_by_side
from ...net.metadata import host_of, require_encrypted
from ...net.network import Network
from ...storage.container import Container
from ...storage.reserved import PREFIX
from ..handover import Handover
from .holding import TABLE_COST, named
from .snapshot import LOCAL, Key, Snapshot, snapshot

if TYPE_CHECKING:
    from .process import KeeperProcess

logger = logging.getLogger("tensorferry")

#: The path of the list where a secret protects it, and the step it is served as, however often it changes.
LIST, STEP = "keeper", 0
_ENTRY = f"{PREFIX}keeper"
_VERSION = 3
#: Longest list that is read, in bytes; the most values in one, by which its memory is bounded; and the most snapshots.
_LONGEST, _MOST_VALUES, _MOST = 16 << 20, 1 << 16, 1024
#: ``host:port``, behind the fingerprint of its certificate where there is one.
_PLACE = re.compile(
    r"(?:https://(sha256-[0-9a-f]{64})@)?((?:\[[0-9A-Fa-f:.]+\]|[^\s/@:]+):[0-9]{1,5})(?:/|/keeper/checkpoint/)?"
)
_TOKEN = re.compile(r"[a-z]+://[^\s/]+/([0-9A-Za-z]+)/checkpoint/")
#: Bytes that a snapshot may take beyond what the list says: pieces begin at other multiples here.
_SLACK = 1 << 20
#: Seconds between two looks at a list, and until a snapshot that could not be copied is tried again.
_INTERVAL_S, _PUT_OFF_S = 1.0, 30.0
#: Seconds that fetching the list may take, and a snapshot.
_LIST_S, FETCH_S = 10.0, 600.0

T = TypeVar("T")


def keeper_url(address: str, network: Network) -> str:
    """Returns the URL of the list of the keeper at ``address``.

    Args:
        address: ``host:port``, or with TLS ``https://sha256-<fingerprint>@host:port``
        network: the secret of this keeper, and whether it encrypts

    Raises:
        InvalidArgument: it is neither, there is no secret, or it does not encrypt though ``network`` asks for TLS
    """
    place = _PLACE.fullmatch(_validate.string("the address of a buddy", address).strip())
    if not place or (network.tls and not place[1]):
        raise InvalidArgument(
            f"{_validate.brief(address)} is not the address of a buddy: give host:port, or with TLS "
            "https://sha256-FINGERPRINT@host:port, as tensorferry keeper --status prints it there"
        )
    if network.secret is None:
        raise InvalidArgument(f"buddies need a shared secret, the same on both nodes: set {SECRET} or {SECRET_FILE}")
    return f"{f'https://{place[1]}@' if place[1] else 'http://'}{place[2]}/{LIST}/checkpoint/"


def publish(shelf: Shelf, snapshots: Sequence[Snapshot]) -> None:
    """Serves the list of ``snapshots``, in place of the one before."""
    described = [one.fields() for one in snapshots]
    text = json.dumps({"version": _VERSION, "snapshots": described}, separators=(",", ":")).encode()
    Container(Table(), None, True, [(_ENTRY, text)]).publish(shelf, STEP)


def fetch_list(url: str, network: Network) -> list[Snapshot]:
    """Returns the list of the keeper at ``url``.

    Raises:
        ProtocolError: what is served there is no such list
        TensorferryError: it cannot be fetched
    """
    remote = Remote.open(
        [url], STEP, timeout=_LIST_S, lanes=1, most_described=2 * _LONGEST, **network.receive_options()
    )
    try:
        if remote.names != [_ENTRY] or not 0 < remote.size(0) <= _LONGEST:
            raise ProtocolError(f"{host_of(url)} serves no list of snapshots: it is not a keeper")
        arena, _ = remote.fetch()
        text = bytes(memoryview(arena.part(0)))  # type: ignore[arg-type]  # a buffer, which 3.11 has no type for
    finally:
        remote.close()
    if sum(text.count(begins) for begins in (b",", b"[", b"{")) > _MOST_VALUES:
        raise ProtocolError(f"the list of {host_of(url)} has more values than one of {_MOST} snapshots")
    try:
        match json.loads(text):
            case {"version": version, "snapshots": [*listed]} if version == _VERSION:
                return [_beside(url, snapshot(one)) for one in listed[:_MOST]]
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"the list of {host_of(url)} cannot be read: {e}") from e
    raise ProtocolError(f"{host_of(url)} runs another version of the keeper: nothing is copied between the two")


def _beside(url: str, about: Snapshot) -> Snapshot:
    """Returns ``about`` with a URL on the very server that listed it, by the host under which that was reached."""
    if not (token := _TOKEN.fullmatch(about.metadata)):
        raise ProtocolError(f"the list of {host_of(url)} has a snapshot without an address")
    scheme, _, rest = url.partition("//")
    return replace(about, metadata=f"{scheme}//{rest.partition('/')[0]}/{token[1]}/checkpoint/")


def open_snapshot(about: Snapshot, timeout: float, network: Network) -> Remote:
    """Opens a snapshot of a keeper's list.

    Raises:
        UnprovenSource: it does not encrypt, and ``network`` asks for TLS
        TensorferryError: it cannot be reached, or announces more than the list says
    """
    if network.tls:
        require_encrypted([about.metadata])
    # What describes it counts many times, see ``cost_of``.
    most = about.nbytes // 4 + _SLACK
    return Remote.open([about.metadata], about.step, timeout=timeout, most_described=most, **network.receive_options())


def fetch_snapshot(remote: Remote, about: Snapshot) -> tuple[Table, SharedBuffer]:
    """Returns all entries of a snapshot, verified, control entries among them, and the memory in which they lie.

    Raises:
        ProtocolError: it is larger than the list says
        TensorferryError: the snapshot cannot be fetched, or there is no memory for it
    """
    offsets, total = side_by_side(remote.sizes)
    table = 31 * len(remote) + sum(map(len, remote.names)) + 8 * sum(map(len, remote.shapes))
    if total + TABLE_COST * table > about.nbytes + _SLACK:
        raise ProtocolError(f"the snapshot is larger than the {about.nbytes} bytes that the list says")
    buffer = SharedBuffer(max(total, 1))
    remote.fetch([buffer.address + offset for offset in offsets])
    rows = Table()
    for name, dtype, shape, size, offset in zip(
        remote.names, remote.dtypes, remote.shapes, remote.sizes, offsets, strict=True
    ):
        rows.append(buffer, name, dtype, shape, buffer.address + offset, size, 0)
    return rows, buffer


class Buddy(threading.Thread):
    """The keeper at ``url``, and the thread that copies its snapshots to ``keeper``.

    Attributes:
        host: how messages name it
        listed: what it held when it was last asked; empty while it cannot be reached
    """

    def __init__(self, url: str, keeper: KeeperProcess) -> None:
        self.host = host_of(url)
        super().__init__(name=f"tensorferry-buddy-{self.host}", daemon=True)
        self.listed: list[Snapshot] = []
        self._url, self._keeper = url, keeper
        self._stopped = threading.Event()
        self._heard: float | None = None
        self._error = ""
        #: When what could not be copied is tried again.
        self._due: dict[Key, float] = {}
        self._remote: Remote | None = None

    @property
    def is_up(self) -> bool:
        """Whether it has answered when it was last asked."""
        return self._heard is not None and not self._error

    def stop(self) -> None:
        """Ends the thread soon, with what it is fetching."""
        self._stopped.set()
        if (remote := self._remote) is not None:
            remote.close()

    def status(self) -> dict[str, Any]:
        """Returns what is known about the buddy: its host, when it last answered, what is wrong, what was copied."""
        return {
            "host": self.host,
            "snapshots": len(self.listed),
            "silent_s": None if self._heard is None else round(time.monotonic() - self._heard, 1),
            "error": self._error[:500],
        }

    def run(self) -> None:
        """Looks and copies until :meth:`stop`."""
        while not self._stopped.is_set():
            try:
                self._look()
                self._copy()
            except Exception as e:
                if self._stopped.is_set():
                    return
                message = message_of(e)
                if isinstance(e, SourceRefused) and e.code == 404:
                    # This path is the same for all who have the secret.
                    message = "not found: the keeper there has another shared secret than this one, or none"
                if message != self._error:
                    logger.warning("buddy %s: %s", self.host, message, exc_info=not isinstance(e, TensorferryError))
                self._error = message
            self._stopped.wait(_INTERVAL_S)

    def _look(self) -> None:
        """Fetches the buddy's list of snapshots into ``listed``."""
        try:
            self.listed = fetch_list(self._url, self._keeper.network)
        except TensorferryError:
            self.listed = []
            raise
        if not self.is_up:
            logger.info("buddy %s answers: it holds %d snapshots", self.host, len(self.listed))
        self._heard, self._error = time.monotonic(), ""

    def _copy(self) -> None:
        """Copies what the buddy's own trainers gave it last.

        What cannot be copied is tried again later, and does not hold up the others.
        """
        self._due = {about.key: self._due.get(about.key, 0.0) for about in self.listed}
        for about in newest_of_trainers(self.listed, self._keeper.holding.generations.most):
            if self._stopped.is_set():
                return
            if time.monotonic() < self._due[about.key] or self._keeper.holding.generations.get(about.key):
                continue
            try:
                self._fetch(about)
            except (TensorferryError, OSError, MemoryError) as e:
                if self._stopped.is_set() or isinstance(e, (ConnectError, FetchTimeout)):
                    # The others are not waited for, one after the other, at a buddy that is gone.
                    raise
                # What was evicted there is no failure. What does not fit is tried again and again, and said once.
                if not isinstance(e, (SourceChanged, SourceRefused)) and not self._due[about.key]:
                    logger.warning("buddy %s: %s is not copied: %s", self.host, named(about), message_of(e))
                self._due[about.key] = time.monotonic() + _PUT_OFF_S

    def _fetch(self, about: Snapshot) -> None:
        """Fetches a snapshot from the buddy into shared memory, for which room was made, and keeps it."""
        copied, holding = replace(about, origin=self.host), self._keeper.holding
        promised = holding.generations.promised
        # By what the list says: what cannot fit is not asked for, and nothing goes for it.
        self._call(lambda: holding.check_room(copied, about.nbytes))
        remote = open_snapshot(about, FETCH_S, self._keeper.network)
        self._remote = remote
        try:
            # stop() may have come too early to see it.
            if self._stopped.is_set():
                return
            began = time.monotonic()

            def promise() -> None:
                holding.make_room(copied, about.nbytes)
                promised[self] = about.nbytes

            def keep() -> None:
                promised.pop(self, None)
                holding.keep(copied, about.nbytes, Handover("keep", {}, rows, [], [buffer]))

            self._call(promise)
            rows, buffer = fetch_snapshot(remote, about)
            self._call(keep)
            logger.info("%s is copied: %d bytes in %.3f s", named(copied), len(buffer), time.monotonic() - began)
        finally:
            self._remote = None
            remote.close()
            # After what was called there before, even if nobody has waited for that.
            self._keeper.run_soon(lambda: promised.pop(self, None))

    def _call(self, call: Callable[[], T]) -> T:
        """Has the keeper's thread run ``call``, and returns or raises what it does."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as e:
                future.set_exception(e)

        self._keeper.run_soon(run)
        return future.result()


def newest_of_trainers(listed: Sequence[Snapshot], most: int) -> list[Snapshot]:
    """Returns of a list, the oldest first, the newest snapshots that trainers gave, ``most`` of each job and rank.

    What the buddy has copied of others, which may be of the same job and rank, does not count.
    """
    seen: dict[tuple[str, str, int], int] = {}
    found = []
    for about in reversed(listed):
        if about.origin == LOCAL and about.metadata:
            seen[about.series] = seen.get(about.series, 0) + 1
            if seen[about.series] <= most:
                found.append(about)
    return found
