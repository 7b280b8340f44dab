"""Partners: keepers on other nodes, whose snapshots are copied here, so that the loss of a node loses nothing.

A partner has a thread, which asks it for its list every second and fetches what is new: the newest snapshots that its
own trainers gave it, verified like every receive. Whatever goes wrong is tried again, later and later.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..._native import Remote
from ...errors import ConnectError, FetchTimeout, SourceChanged, SourceRefused, TensorferryError, message_of
from ...net.metadata import host_of
from . import index
from .cost import Cost, probe
from .fetching import fetch_snapshot, most_described, open_snapshot
from .generations import KeeperFull, Reservation
from .snapshot import LOCAL, Key, Snapshot

if TYPE_CHECKING:
    from .process import KeeperProcess

logger = logging.getLogger("tensorferry")

#: Seconds between two looks at a partner's list, and between tries while it cannot be reached.
_INTERVAL_S = 1.0
_LONGEST_INTERVAL_S = 30.0
#: Most seconds until a snapshot that could not be copied is tried again.
_LONGEST_PUT_OFF_S = 600.0
#: Seconds that fetching the list may take, and a snapshot.
_LIST_S = 10.0
_FETCH_S = 600.0
#: Bytes that header and control entries of a snapshot mostly stay below, with what is made of them.
_LONGEST_DESCRIPTION = 1 << 30
#: Seconds for which questions wait for the list of a partner, and each of them at least, if it does not answer.
_ASK_S = 3.0
_ASK_AGAIN_S = 1.0

T = TypeVar("T")


def _close(reserved: Iterable[Reservation]) -> None:
    for one in reserved:
        one.close()


class _Tries:
    """When what could not be copied is tried again: each time after twice as long."""

    def __init__(self) -> None:
        self._tries: dict[Key, tuple[float, float]] = {}

    def is_due(self, key: Key) -> bool:
        """Whether the snapshot ``key`` is to be tried now."""
        return key not in self._tries or time.monotonic() >= self._tries[key][1]

    def put_off(self, key: Key) -> float:
        """Notes that the snapshot could not be copied; returns the seconds until it is due again."""
        before, _ = self._tries.get(key, (0.0, 0.0))
        wait = min(max(before * 2, _INTERVAL_S), _LONGEST_PUT_OFF_S)
        self._tries[key] = wait, time.monotonic() + wait
        return wait

    def forget(self, key: Key) -> None:
        """Notes that the snapshot was copied."""
        self._tries.pop(key, None)

    def forget_all_but(self, keys: Set[Key]) -> None:
        """Forgets the snapshots that are not listed any more: all but ``keys``."""
        self._tries = {key: tried for key, tried in self._tries.items() if key in keys}


class Partner(threading.Thread):
    """The keeper at ``url``, and the thread that copies its snapshots to ``keeper``.

    Attributes:
        listed: what it held when it was last asked; empty while it cannot be reached
        heard_at: when it answered last, in Unix time
    """

    def __init__(self, url: str, keeper: KeeperProcess) -> None:
        super().__init__(name=f"tensorferry-buddy-{host_of(url)}", daemon=True)
        self.listed: list[Snapshot] = []
        self.heard_at: float | None = None
        self._url = url
        self._host = host_of(url)
        self._keeper = keeper
        self._stopped = threading.Event()
        self._asked = threading.Event()
        self._asked_at = 0.0
        self._heard: float | None = None
        self._error = ""
        self._copied_bytes = self._copy_failures = 0
        self._tries = _Tries()
        self._remote: Remote | None = None

    @property
    def is_asked(self) -> bool:
        """Whether an answer to :meth:`ask` is still to come."""
        return self._asked.is_set()

    def ask(self) -> float:
        """Has the thread ask the buddy for its list now; ``is_asked`` is true until that has ended, in whichever way.

        Returns:
            Seconds for which the caller is to wait for the answer: fewer if the buddy was asked already, or was not
            reached the last time.
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
        """Returns what is known about the partner: its host, when it last answered, what is wrong, what was copied."""
        silent = None if self._heard is None else round(time.monotonic() - self._heard, 1)
        return {
            "host": self._host,
            "snapshots": len(self.listed),
            "silent_s": silent,
            "error": self._error[:500],
            "copied_bytes": self._copied_bytes,
            "copy_failures": self._copy_failures,
        }

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
                message = index.message_about(self._url, e)
                if message != self._error:
                    logger.warning("buddy %s: %s", self._host, message, exc_info=not expected)
                self._error = message
                wait = min(wait * 2, _LONGEST_INTERVAL_S)
            self._asked.wait(wait)

    def _look(self) -> None:
        """Fetches the partner's list of snapshots into ``listed``."""
        options = self._keeper.options.server
        was_asked = self._asked.is_set()
        try:
            self.listed = index.fetch(self._url, _LIST_S, options.secret, options.same_host)
        except TensorferryError:
            self.listed = []
            raise
        finally:
            if was_asked:
                self._end_question()
        if self._error:
            logger.info("buddy %s answers again: it holds %d snapshots", self._host, len(self.listed))
        elif self._heard is None:
            logger.info("buddy %s answers: it holds %d snapshots", self._host, len(self.listed))
        self._heard, self.heard_at, self._error = time.monotonic(), time.time(), ""

    def _end_question(self) -> None:
        """Ends the wait for an answer, and lets the keeper's main thread look at those who wait for it."""
        if not self._stopped.is_set():
            self._asked.clear()
        self._keeper.run_soon(lambda: None)

    def _copy(self) -> None:
        """Copies what the partner's own trainers gave it last.

        What cannot be copied is tried again, later and later, and does not hold up the others.
        """
        most, seen = self._keeper.options.generations, dict[tuple[str, str, int], int]()
        self._tries.forget_all_but({about.key for about in self.listed})
        for about in reversed(self.listed):
            if about.origin != LOCAL or not about.metadata:
                continue
            # Its copies of other keepers' snapshots, which may be of the same series, are counted apart there, too.
            seen[about.series] = seen.get(about.series, 0) + 1
            if seen[about.series] > most:
                continue
            if self._stopped.is_set():
                return
            if self._tries.is_due(about.key) and not self._call(
                functools.partial(self._keeper.keeping.generations.get, about.key)
            ):
                self._try(about)

    def _try(self, about: Snapshot) -> None:
        """Copies a snapshot; if that fails, logs why and puts it off."""
        try:
            self._fetch(about)
        except (SourceChanged, SourceRefused) as e:
            # It was evicted there; what replaced it comes next.
            logger.debug("buddy %s: %s", self._host, message_of(e))
            self._tries.put_off(about.key)
        except (TensorferryError, OSError, MemoryError) as e:
            if self._stopped.is_set():
                return
            wait = self._tries.put_off(about.key)
            self._copy_failures += 1
            # What does not fit is not even asked for, so it can be looked at again and again; it is said once.
            level = logging.DEBUG if isinstance(e, KeeperFull) and wait > _INTERVAL_S else logging.WARNING
            logger.log(
                level,
                "buddy %s: step %d of rank %d of %s is not copied, and tried again in %g s: %s",
                self._host,
                about.step,
                about.rank,
                about.job,
                wait,
                message_of(e) or type(e).__name__,
            )
            if isinstance(e, (ConnectError, FetchTimeout)):
                # The others are not waited for, one after the other, at a partner that is gone.
                raise
        else:
            self._tries.forget(about.key)

    def _fetch(self, about: Snapshot) -> None:
        """Fetches a snapshot from the partner into shared memory, for which room was made, and keeps it."""
        copied = replace(about, origin=self._host)
        # By what the list says: what cannot fit is not asked for, and nothing goes for it.
        self._call(lambda: self._keeper.keeping.generations.check_room(copied, about.nbytes))
        options = self._keeper.options.server
        probe(min(most_described(about), _LONGEST_DESCRIPTION))
        remote = open_snapshot(about, _FETCH_S, options.secret, options.same_host)
        self._remote = remote
        reserved: list[Reservation] = []
        try:
            # stop() may have come too early to see it.
            if self._stopped.is_set():
                return
            began = time.monotonic()

            costs: list[Cost] = []

            def before(cost: Cost) -> None:
                costs.append(cost)
                self._call(lambda: reserved.append(self._keeper.keeping.reserve(copied, cost.reading)))
                probe(cost.reading)

            rows, buffer = fetch_snapshot(remote, about, before)
            seconds = time.monotonic() - began
            step = self._call(lambda: self._keeper.keeping.step_of(copied))
            body = self._keeper.keeping.memory(step, rows, [], [buffer])
            self._call(lambda: self._keeper.keeping.add(copied, step, body, costs[0].holding, reserved[0]))
            self._copied_bytes += len(buffer)
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
            # On the keeper's thread, and after what was called there before, even if nobody has waited for that.
            self._keeper.run_soon(lambda: _close(reserved))

    def _call(self, call: Callable[[], T]) -> T:
        """Has the keeper's thread run ``call``, and returns or raises what it does.

        Raises:
            TensorferryError: the partner was stopped meanwhile; ``call`` may still be run then
        """
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
