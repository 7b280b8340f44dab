"""Reads ranges of one object, for the engine, which verifies them and brings them to their places."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ...errors import ConnectError, FetchTimeout, ProtocolError, StoreRefused
from .requests import Calls, results_of

#: Bytes that are read when an object is opened: headers are mostly shorter.
_HEAD = 64 << 10
#: Bytes that one request asks for at most, where there are many, and how many requests are made at a time.
_PIECE, _AT_A_TIME = 8 << 20, 8
#: Seconds after which the body of an answer counts as stalled, and how often a range is requested.
_STALL_S, _ATTEMPTS = 60.0, 5

_T = TypeVar("_T")


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
        self._head = b""
        self._head = self._repeated(self._open, "opening it")

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
        return self._repeated(lambda: self._get(at, nbytes), f"reading bytes {at}-{at + nbytes}")

    def read(self, at: int, address: int, nbytes: int) -> None:
        """Copies ``nbytes`` bytes from ``at`` on to ``address``; raises as :meth:`get`."""
        if not nbytes:
            return
        # Here, and not where they come: all requests share that thread, and one that was cancelled may go on there for
        # a moment, when the memory may be another's.
        memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")[:] = self.get(at, nbytes)

    def _repeated(self, make: Callable[[], Coroutine[Any, Any, _T]], what: str) -> _T:
        """Makes a request, again if its body breaks off or stalls: the client itself makes the rest again."""
        for attempt in itertools.count(1):
            try:
                return self._calls.call(make, self._name, what)
            except (ConnectError, FetchTimeout, _WrongAnswer) as e:
                if attempt >= _ATTEMPTS or self._calls.deadline.left() <= 0:
                    if isinstance(e, _WrongAnswer):
                        raise e.refusal from None
                    raise
        raise AssertionError

    def read_all(self, ranges: list[tuple[int, int, int]]) -> None:
        """Copies ranges, ``(at, address, nbytes)`` each, several at a time; raises as :meth:`read`.

        Nothing is written to memory when this has returned or raised. After an error, the reader makes no more
        requests.
        """
        from concurrent.futures import ThreadPoolExecutor

        pieces = [
            (at + done, address + done, min(_PIECE, nbytes - done))
            for at, address, nbytes in ranges
            for done in range(0, nbytes, _PIECE)
        ]
        with ThreadPoolExecutor(_AT_A_TIME, "tensorferry-read") as pool:
            running = [pool.submit(self.read, *piece) for piece in pieces]
            results_of(running, self.cancel)

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
            if type(e).__name__ != "GenericError" or "416" not in str(e):
                raise
            answer = await library.get_async(self._store, self._key)
        self.nbytes, self._tag = int(answer.meta["size"]), answer.meta.get("e_tag")
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
