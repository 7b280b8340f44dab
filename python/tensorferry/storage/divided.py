"""Reads of a store that several ranks share: each reads a part of what all of them need, and gives it to the others."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .._native import Readiness, Server, Table, _fetch_slices
from ..errors import TensorferryError
from ..net.network import Network
from .container import Container
from .slices import AHEAD, SliceTuple, nbytes_of
from .source import Parts, Progress, Source
from .threads import uninterrupted

logger = logging.getLogger("tensorferry")

#: Bytes that are read before the others may fetch them.
_BATCH = 64 << 20
#: Of fewer bytes of a container, ranks give each other nothing.
LEAST_BYTES = 8 << 20
#: How many ranks divide a container among them at most: each has a connection to each other one.
MOST = 16
#: Seconds without a byte from the others after which the rest is read from the store: so many at least, and so many
#: times as long as the read of the own part took.
_PATIENCE_S, _TIMES = 10.0, 3.0
#: Seconds without a byte for the others after which they are taken to need no more, and how often that is looked at.
_QUIET_S, _LOOK_S = 1.0, 0.02


@dataclass(frozen=True)
class Partners:
    """The ranks that need the same slices of a container.

    Attributes:
        urls: of their servers
        rank: which one of them this rank is
    """

    urls: tuple[str, ...]
    rank: int


class DividedSource:
    """A checkpoint in a store, of which each rank reads a part.

    Whatever the others do not give in time is read from the store, and so is the rest of the load then. The reads that
    are divided are the same on all ranks, in the same order; other ones do not count.

    Args:
        source: the checkpoint
        partners: by the container of which they need the same slices
        server: gives others what was read, while a read lasts
        network: the secret that the servers ask for, and whether shared memory may replace the network
        seconds_left: returns how many seconds all reads together may take from now on
    """

    def __init__(
        self,
        source: Source,
        partners: Mapping[str, Partners],
        server: Server,
        network: Network,
        seconds_left: Callable[[], float],
    ) -> None:
        self._source = source
        self._partners = partners
        self._server = server
        self._network = network
        self._seconds_left = seconds_left
        self._step = 0

    def read_index(self) -> bytes:
        """Reads the index; as :meth:`Source.read_index`."""
        return self._source.read_index()

    def read(self, slices: Mapping[str, list[SliceTuple]], progress: Progress | None = None) -> Mapping[str, int]:
        """Reads slices to their memory addresses.

        Args:
            slices: the slices by container
            progress: as for :meth:`Source.read`

        Returns:
            What the source returns, of which ``wanted`` counts all bytes of the slices, and ``relayed``, the bytes that
            other ranks have given.

        Raises:
            TensorferryError: as for :meth:`Source.read`
            Exception: what ``progress`` raises
        """
        alone, own, others = self._divided(slices)
        if not others:
            return {**self._source.read(slices, progress), "relayed": 0}
        # How many other reads a rank makes depends on where its targets lie.
        self._step += 1
        wanted = sum(map(nbytes_of, slices.values()))
        told = _Told(progress, wanted)
        given = self._server.bytes_served
        filling: Readiness | None = self._publish(own)
        fetching = _Fetching(others, self._step, self._seconds_left(), self._network, told)
        patience = 0.0
        try:
            fetching.start()
            began = time.monotonic()
            assert filling is not None
            read = self._fill(own, filling, told)
            filling = None
            took = time.monotonic() - began
            read = _sum(read, self._source.read(alone, told.of(alone)) if alone else {})
            # Half of what is left stays for the store.
            relayed = fetching.result(min(max(_PATIENCE_S, _TIMES * took), self._seconds_left() / 2))
            if relayed is None:
                rest = _by_container(others)
                read = _sum(read, self._source.read(rest, told.of(rest)))
            # What was divided has as many ranks, since all of them need it.
            times = {name: len(self._partners[name].urls) - 1 for name in own}
            self._await_others(given + sum(times[name] * nbytes_of(part) for name, part in own.items()))
            patience = min(_PATIENCE_S, self._seconds_left())
        finally:
            try:
                fetching.end()
            finally:
                # After this, nobody reads that memory.
                if filling is None:
                    self._server.withdraw(patience)
                else:
                    self._server.abandon(filling)
        if relayed is None:
            # They may read in other steps, or not at all. The rest of the load is this rank's own, and they hear of it.
            self._partners = {}
            self._server.shutdown(0.0)
        told.end()
        return {**read, "wanted": wanted, "relayed": relayed or 0}

    def _divided(
        self, slices: Mapping[str, list[SliceTuple]]
    ) -> tuple[dict[str, list[SliceTuple]], dict[str, list[SliceTuple]], dict[str, dict[str, list[SliceTuple]]]]:
        """Returns what this rank reads for itself, what it reads for all, and what it gets, by URL and container."""
        alone: dict[str, list[SliceTuple]] = {}
        own: dict[str, list[SliceTuple]] = {}
        others: dict[str, dict[str, list[SliceTuple]]] = defaultdict(dict)
        for container, of_container in slices.items():
            partners = self._partners.get(container)
            # Runs that repeat lie apart in memory, which nothing else could be told of in few words.
            whole = [one for one in of_container if not one[6]]
            if partners is None or nbytes_of(whole) < LEAST_BYTES:
                alone[container] = of_container
                continue
            if rest := [one for one in of_container if one[6]]:
                alone[container] = rest
            for rank, part in enumerate(_cut(whole, len(partners.urls))):
                if rank == partners.rank:
                    own[container] = part
                else:
                    others[partners.urls[rank]][container] = part
        return alone, own, others

    def _publish(self, own: Mapping[str, list[SliceTuple]]) -> Readiness:
        """Publishes the memory of ``own``, before anything is there."""
        rows = Table()
        for container, part in own.items():
            for number, (_, _, _, _, run, address, _) in enumerate(part):
                rows.append(None, _name(container, part, number), "U8", (run,), address, run, 0)
        readiness = Container(rows, None, False).publish(self._server, self._step, filled=False)
        assert readiness is not None
        return readiness

    def _fill(self, own: Mapping[str, list[SliceTuple]], readiness: Readiness, told: _Told) -> dict[str, int]:
        """Reads what was published, in the order in which it lies there, and says how far it is."""
        read: dict[str, int] = {}
        pieces = [(container, piece) for container, part in own.items() for piece in part]
        batch: dict[str, list[SliceTuple]] = defaultdict(list)
        waiting = 0
        ordered = sorted(zip(readiness.starts, pieces, strict=True), key=lambda pair: pair[0])
        for number, (start, (container, piece)) in enumerate(ordered):
            batch[container].append(piece)
            waiting += piece[4]
            if waiting >= _BATCH or number + 1 == len(ordered):
                read = _sum(read, self._source.read(batch, told.of(batch)))
                readiness.ready(start + piece[4])
                batch, waiting = defaultdict(list), 0
        readiness.finish()
        return read

    def _await_others(self, enough: int) -> None:
        """Waits until others have got what this rank gives, or get nothing any more."""
        last = time.monotonic()
        before = -1
        while (given := self._server.bytes_served) < enough:
            if given != before:
                before, last = given, time.monotonic()
            elif time.monotonic() - last > _QUIET_S or self._seconds_left() <= 0:
                return
            time.sleep(_LOOK_S)


class _Told(Parts):
    """The progress of a read, part of which comes in a thread beside: never fewer bytes than before.

    Attributes:
        beside: how many bytes have come from others
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        super().__init__(progress or (lambda *_: None), total)
        self.beside = self._done = 0
        self._reported = 0

    def of(self, slices: Mapping[str, list[SliceTuple]]) -> Progress:
        """Returns what reports the progress of the next read."""
        return self.next(sum(map(nbytes_of, slices.values())))

    def now(self) -> None:
        """Reports what has come meanwhile."""
        self._report(self._done)

    def end(self) -> None:
        """All bytes are there."""
        self._progress(self._total, self._total)

    def _report(self, done: int) -> None:
        self._done = done
        # All of them are reported once, at the end.
        now = min(done + self.beside, self._total - 1)
        if now > (self._reported or 0):
            super()._report(now)


class _Fetching:
    """Fetches, in a thread of its own, what other ranks read."""

    def __init__(
        self,
        others: Mapping[str, Mapping[str, list[SliceTuple]]],
        step: int,
        seconds: float,
        network: Network,
        told: _Told,
    ) -> None:
        self._orders = [([url], step, _orders(of_url)) for url, of_url in others.items()]
        self._told = told
        self._seconds, self._network = seconds, network
        self._bytes = 0
        self._failed: BaseException | None = None
        self._stops = False
        self._noted = time.monotonic(), 0
        self._thread = threading.Thread(target=self._run, name="tensorferry-divided", daemon=True)

    def start(self) -> None:
        """Begins; also when a signal has this raise, :meth:`end` ends it."""
        self._thread.start()

    def _run(self) -> None:
        try:
            # A thread that has not said yet that it lives is not waited for by end().
            if self._stops:
                raise _Stopped
            report = _fetch_slices(
                self._orders,
                ahead=AHEAD,
                progress=self._note,
                timeout=self._seconds,
                **self._network.receive_options(),
            )
            self._bytes = report.wanted
        except BaseException as e:  # A panic, too: what has not come must not be taken for read.
            self._failed = e

    def _note(self, done: int, _: int) -> None:
        if self._stops:
            raise _Stopped
        if done != self._noted[1]:
            self._noted = time.monotonic(), done
        self._told.beside = done

    def result(self, patience: float) -> int | None:
        """Waits for the others; returns how many bytes they have given, and ``None`` if that is not everything.

        Args:
            patience: seconds without a byte, from now on, after which nothing is expected any more

        Raises:
            Exception: what ``progress`` raises
            BaseException: what no store can make up for
        """
        began = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_LOOK_S * 10)
            self._told.now()
            if time.monotonic() - max(began, self._noted[0]) > patience:
                self.end()
        if self._failed is None:
            return self._bytes
        if not isinstance(self._failed, TensorferryError | _Stopped):
            raise self._failed
        why = "they stand still" if isinstance(self._failed, _Stopped) else self._failed
        logger.warning("what other ranks should have read for this one is read from the store: %s", why)
        return None

    def end(self) -> None:
        """Ends it; when this returns or raises, nothing more is written to memory."""
        self._stops = True
        if self._thread.is_alive():
            uninterrupted(self._thread.join)


class _Stopped(Exception):
    """The fetch is not wanted any more."""


def _cut(slices: list[SliceTuple], parts: int) -> list[list[SliceTuple]]:
    """Divides slices into parts of the same size, in the same way on every rank, wherever they go in memory."""
    ordered = sorted(slices, key=lambda one: (one[0], one[3], one[4]))
    total = nbytes_of(ordered)
    bounds = [total * number // parts for number in range(parts + 1)]
    found: list[list[SliceTuple]] = [[] for _ in range(parts)]
    at = 0
    for entry, dtype, nbytes, start, run, address, _ in ordered:
        for number in range(parts):
            low, high = max(bounds[number], at) - at, min(bounds[number + 1], at + run) - at
            if low < high:
                found[number].append((entry, dtype, nbytes, start + low, high - low, address + low, []))
        at += run
    return found


def _name(container: str, part: list[SliceTuple], number: int) -> str:
    """Returns the name of a piece where a rank serves it; it says what it is, so that no other is taken for it."""
    entry, _, _, start, run, _, _ = part[number]
    return f"{number} {start} {run} {container} {entry}"


def _orders(of_url: Mapping[str, list[SliceTuple]]) -> list[SliceTuple]:
    """Returns the slices of what another rank serves."""
    return [
        (_name(container, part, number), "U8", run, 0, run, address, [])
        for container, part in of_url.items()
        for number, (_, _, _, _, run, address, _) in enumerate(part)
    ]


def _by_container(others: Mapping[str, Mapping[str, list[SliceTuple]]]) -> dict[str, list[SliceTuple]]:
    found: dict[str, list[SliceTuple]] = defaultdict(list)
    for of_url in others.values():
        for container, part in of_url.items():
            found[container] += part
    return found


def _sum(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {name: counts.get(name, 0) + more.get(name, 0) for name in {*counts, *more}}
