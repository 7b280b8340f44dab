"""Reads ranges of one object, for the engine, which verifies them and brings them to their places."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ...errors import ConnectError, FetchTimeout, ProtocolError, StoreRefused
from .answers import status_of
from .requests import LOOK_S, Calls, ending

if TYPE_CHECKING:
    from concurrent.futures import Future  # It takes long: what needs it imports it.

#: Bytes that are read when an object is opened: headers are mostly shorter.
_HEAD = 64 << 10
#: Bytes that one request asks for at most, where there are many, and how many requests are made at a time.
_PIECE, _AT_A_TIME = 8 << 20, 8
#: Seconds after which the body of an answer counts as stalled, and how often a range is requested.
_STALL_S, _ATTEMPTS = 60.0, 5

_T = TypeVar("_T")
_Range: TypeAlias = tuple[int, int, int]


class _WrongAnswer(Exception):
    """The store has sent something else than was requested, which does not make the object invalid.

    Args:
        refusal: what is raised if it does so again and again
    """

    def __init__(self, refusal: StoreRefused) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class RangeReader:
    """The bytes of an object, as it was when it was opened; in a store without tags, only its length is compared.

    Args:
        store: the client
        key: the key of the object
        name: its URL, for messages
        calls: the operation to which its requests belong

    Raises:
        IncompleteCheckpoint: there is no such object
        TensorferryError: it cannot be read
    """

    def __init__(self, store: Any, key: str, name: str, calls: Calls) -> None:
        self._store, self._key, self._name, self._calls = store, key, name, calls
        self.nbytes = 0
        self._tag: str | None = None
        self._version: str | None = None
        self._head = b""
        self._head = self._repeated(self._open, "opening it")

    @property
    def version(self) -> dict[str, str]:
        """The tag and the version of the object, as conditions name them; empty without either."""
        known = {"e_tag": self._tag, "version": self._version}
        return {name: value for name, value in known.items() if value is not None}

    def _ranges(self) -> tuple[str, int, RangeReader]:
        """What the engine reads: the name, the length, and what reads."""
        return self._name, self.nbytes, self

    def cancel(self) -> None:
        """Ends all reads."""
        self._calls.cancel()

    def get(self, at: int, nbytes: int) -> memoryview:
        """Returns ``nbytes`` bytes from ``at`` on. Several threads call it at once.

        Raises:
            SourceChanged: the object was replaced meanwhile
            TensorferryError: they cannot be read
        """
        if at + nbytes <= len(self._head):
            return memoryview(self._head)[at : at + nbytes]
        return self._repeated(partial(self._get, at, nbytes), f"reading bytes {at}-{at + nbytes}")

    def _repeated(self, make: Callable[[], Coroutine[Any, Any, _T]], what: str, begun: Future[_T] | None = None) -> _T:
        """Makes a request, again if its body breaks off or stalls: the client itself makes the rest again.

        Args:
            make: makes it
            what: what is done, for messages
            begun: the first one, if it has begun
        """
        for attempt in itertools.count(1):
            try:
                return self._calls.finish(begun or self._calls.begin(make), self._name, what)
            except (ConnectError, FetchTimeout, _WrongAnswer) as e:
                if attempt >= _ATTEMPTS or self._calls.deadline.left() <= 0:
                    if isinstance(e, _WrongAnswer):
                        raise e.refusal from None
                    raise
                begun = None
        raise AssertionError

    def read_all(self, ranges: Iterable[_Range]) -> None:
        """Copies ranges to addresses in memory; raises as :meth:`pieces`.

        Only the calling thread writes to the memory.
        """
        for (_, address, nbytes), data in self.pieces(ranges):
            memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")[:] = data

    def pieces(self, ranges: Iterable[_Range]) -> Iterator[tuple[_Range, memoryview]]:
        """Reads ranges in pieces, several at a time; yields each piece with its bytes once they are there.

        After an error, the reader makes no more requests.

        Args:
            ranges: where they begin in the object, where they go, which counts on with the bytes, and their lengths

        Raises:
            SourceChanged, TensorferryError: as for :meth:`get`
        """
        running: dict[Future[memoryview], _Range] = {}
        with ending(self._calls):
            for at, to, nbytes in ranges:
                for done in range(0, nbytes, _PIECE):
                    piece = at + done, to + done, min(_PIECE, nbytes - done)
                    if piece[0] + piece[2] <= len(self._head):
                        yield piece, self.get(piece[0], piece[2])
                        continue
                    running[self._calls.begin(partial(self._get, piece[0], piece[2]))] = piece
                    while len(running) >= _AT_A_TIME:
                        yield from self._completed(running)
            while running:
                yield from self._completed(running)

    def _completed(self, running: dict[Future[memoryview], _Range]) -> Iterator[tuple[_Range, memoryview]]:
        """Waits a moment for requests; takes out of ``running``, and yields, what is complete."""
        from concurrent.futures import FIRST_COMPLETED, wait

        # Without a limit, a signal would not wake the main thread of every system.
        for future in wait(running, LOOK_S, FIRST_COMPLETED).done:
            at, to, nbytes = running.pop(future)
            data = self._repeated(partial(self._get, at, nbytes), f"reading bytes {at}-{at + nbytes}", future)
            yield (at, to, nbytes), data

    def head(self, most: int) -> bytes:
        """Returns the first bytes, ``most`` or fewer."""
        return self._head[:most]

    def start(self, nbytes: int) -> bytes:
        """Returns the first ``nbytes`` bytes, or as many as there are; raises as :meth:`get`."""
        nbytes = min(nbytes, self.nbytes)
        return bytes(self.get(0, nbytes)) if nbytes else b""

    def begins_with(self, start: bytes) -> bool:
        """Whether the object begins with these few bytes."""
        return self._head.startswith(start)

    def whole(self, most: int) -> bytes:
        """Returns all bytes.

        Raises:
            ProtocolError: there are more than ``most``
            TensorferryError: otherwise as for :meth:`get`
        """
        if self.nbytes > most:
            raise ProtocolError(
                f"{self._name} has {self.nbytes} bytes, and such an object has at most {most}: it is damaged"
            )
        if self.nbytes <= len(self._head):
            return self._head
        return self.start(self.nbytes)

    async def _open(self) -> bytes:
        from .client import obstore

        library = obstore()
        try:
            answer = await library.get_async(self._store, self._key, options={"range": (0, _HEAD)})
        except Exception as e:
            # Of an object without bytes there is no range.
            if status_of(e) != 416:
                raise
            answer = await library.get_async(self._store, self._key)
        self.nbytes = int(answer.meta["size"])
        self._tag, self._version = answer.meta.get("e_tag"), answer.meta.get("version")
        return bytes(await self._received(answer, min(self.nbytes, _HEAD)))

    async def _get(self, at: int, nbytes: int) -> memoryview:
        from .client import obstore

        options: dict[str, Any] = {"range": (at, at + nbytes)}
        if self._tag is not None:
            options["if_match"] = self._tag
        answer = await obstore().get_async(self._store, self._key, options=options)
        if tuple(answer.range) != (at, at + nbytes) or int(answer.meta["size"]) != self.nbytes:
            raise _WrongAnswer(
                StoreRefused(
                    f"{self._name}: bytes {at}-{at + nbytes} were requested, and the store has answered with others"
                )
            )
        return await self._received(answer, nbytes)

    async def _received(self, answer: Any, nbytes: int) -> memoryview:
        """Returns the body of an answer; one that is longer or shorter than it should be is refused."""
        import asyncio

        # All of it at once: for each part, the library would copy it once more, and stop all of Python for that.
        data = memoryview(await asyncio.wait_for(answer.bytes_async(), _STALL_S))
        if len(data) > nbytes:
            raise _WrongAnswer(StoreRefused(f"{self._name}: the store has sent more bytes than were requested"))
        if len(data) < nbytes:
            raise _WrongAnswer(
                StoreRefused(f"{self._name}: the store has sent {len(data)} bytes of the {nbytes} that were requested")
            )
        return data
