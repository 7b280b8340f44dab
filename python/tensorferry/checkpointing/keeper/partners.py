"""Partners: keepers on other nodes, whose snapshots are copied here, so that the loss of a node loses nothing.

A partner has a thread, which asks it for its list every second and fetches what is new: the newest snapshots that its
own trainers gave it, verified like every receive. Whatever goes wrong is tried again, later and later.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..._native import Remote, Rows, SharedBuffer
from ...errors import SourceChanged, SourceRefused, TensorferryError, message_of
from . import index
from .fetching import fetch_snapshot
from .generations import NoRoom
from .snapshot import LOCAL, Key, Snapshot

if TYPE_CHECKING:
    from .process import KeeperProcess

logger = logging.getLogger("tensorferry")

#: Seconds between two looks at a partner's list, and between tries while it cannot be reached.
_INTERVAL_S = 1.0
_LONGEST_INTERVAL_S = 30.0
#: Seconds that fetching the list may take, and a snapshot.
_LIST_S = 10.0
_FETCH_S = 600.0
#: Seconds for which questions wait for the list of a partner, and each of them at least, if it does not answer.
_ASK_S = 3.0
_ASK_AGAIN_S = 1.0

T = TypeVar("T")


class Partner(threading.Thread):
    """The keeper at ``url``, and the thread that copies its snapshots to ``keeper``.

    Attributes:
        listed: what it held when it was last asked; empty while it cannot be reached
    """

    def __init__(self, url: str, keeper: KeeperProcess) -> None:
        super().__init__(name=f"tensorferry-buddy-{index.host_of(url)}", daemon=True)
        self.listed: list[Snapshot] = []
        self._url = url
        self._host = index.host_of(url)
        self._keeper = keeper
        self._stopped = threading.Event()
        self._asked = threading.Event()
        self._asked_at = 0.0
        self._heard: float | None = None
        self._error = ""
        self._failed: dict[Key, float] = {}
        self._remote: Remote | None = None

    @property
    def is_asked(self) -> bool:
        """Whether an answer to :meth:`ask` is still to come."""
        return self._asked.is_set()

    def ask(self) -> float:
        """Asks for the list now; until it is there, or cannot be had, ``is_asked`` is true.

        Returns:
            Seconds for which to wait for that: fewer if others have waited in vain.
        """
        now = time.monotonic()
        if not self.is_asked:
            self._asked_at = now
            self._asked.set()
        return max(0.0 if self._error else self._asked_at + _ASK_S - now, _ASK_AGAIN_S)

    def stop(self) -> None:
        """Ends the thread soon, with what it is fetching."""
        self._stopped.set()
        self._asked.set()
        if (remote := self._remote) is not None:
            remote.close()

    def status(self) -> dict[str, Any]:
        """Returns what is known about the partner: its host, when it last answered, and what is wrong."""
        silent = None if self._heard is None else round(time.monotonic() - self._heard, 1)
        return {"host": self._host, "snapshots": len(self.listed), "silent_s": silent, "error": self._error[:500]}

    def run(self) -> None:
        """Looks and copies until :meth:`stop`."""
        wait = _INTERVAL_S
        while not self._stopped.is_set():
            try:
                self._look()
                self._copy()
                wait = _INTERVAL_S
            except Exception as e:
                if self._stopped.is_set():
                    return
                expected = isinstance(e, TensorferryError)
                message = message_of(e)
                if message != self._error:
                    logger.warning("buddy %s: %s", self._host, message, exc_info=not expected)
                self._error = message
                wait = min(wait * 2, _LONGEST_INTERVAL_S)
            self._asked.wait(wait)

    def _look(self) -> None:
        options = self._keeper.options.server
        was_asked = self._asked.is_set()
        try:
            found = index.fetch(self._url, _LIST_S, options.secret, options.same_host)
        except TensorferryError:
            self.listed = []
            raise
        finally:
            if was_asked:
                self._answered()
        self.listed, self._heard, self._error = found, time.monotonic(), ""

    def _answered(self) -> None:
        if not self._stopped.is_set():
            self._asked.clear()
        self._keeper.run_soon(lambda: None)

    def _copy(self) -> None:
        """Copies what the partner's own trainers gave it last."""
        most, seen = self._keeper.options.generations, dict[tuple[str, str, int], int]()
        now = time.monotonic()
        self._failed = {key: until for key, until in self._failed.items() if until > now}
        for about in reversed(self.listed):
            seen[about.series] = seen.get(about.series, 0) + 1
            if about.origin != LOCAL or not about.metadata or seen[about.series] > most or about.key in self._failed:
                continue
            if self._stopped.is_set() or self._call(functools.partial(self._keeper.generations.get, about.key)):
                continue
            try:
                self._fetch(about)
            except (SourceChanged, SourceRefused) as e:
                # It was evicted there; what replaced it comes next.
                logger.debug("buddy %s: %s", self._host, message_of(e))
            except NoRoom as e:
                logger.warning("buddy %s: %s", self._host, e)
                self._failed[about.key] = now + _LONGEST_INTERVAL_S

    def _fetch(self, about: Snapshot) -> None:
        options = self._keeper.options.server
        remote = Remote.open(
            [about.metadata], about.step, timeout=_FETCH_S, same_host=options.same_host, secret=options.secret
        )
        self._remote = remote
        reserved: list[int] = []

        def reserve(size: int) -> None:
            self._call(lambda: self._reserve(about, size))
            reserved.append(size)

        try:
            # stop() may have come too early to see it.
            if self._stopped.is_set():
                return
            began = time.monotonic()
            rows, buffer = fetch_snapshot(remote, reserve)
            seconds = time.monotonic() - began
            copied = replace(about, origin=self._host)
            self._call(lambda: self._keep(copied, rows, buffer))
            reserved.clear()
            logger.info(
                "step %d of rank %d of %s is copied from %s: %d bytes in %.3f s",
                about.step,
                about.rank,
                about.job,
                self._host,
                len(buffer),
                seconds,
            )
        finally:
            self._remote = None
            remote.close()
            for size in reserved:
                with contextlib.suppress(TensorferryError):
                    self._call(functools.partial(self._keeper.generations.reserve, -size))

    def _reserve(self, about: Snapshot, size: int) -> None:
        self._keeper.make_room(replace(about, origin=self._host), size)
        self._keeper.generations.reserve(size)

    def _keep(self, about: Snapshot, rows: Rows, buffer: SharedBuffer) -> None:
        self._keeper.generations.reserve(-len(buffer))
        self._keeper.add(about, rows, [], [buffer])

    def _call(self, call: Callable[[], T]) -> T:
        """Has the keeper's thread run ``call``, and returns or raises what it does."""
        done: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((call(), None))
            except Exception as e:
                done.put((None, e))

        self._keeper.run_soon(run)
        while True:
            try:
                value, error = done.get(timeout=1.0)
            except queue.Empty:
                if self._stopped.is_set():
                    raise TensorferryError("the keeper ends") from None
                continue
            if error is not None:
                raise error
            return value  # type: ignore[return-value]
