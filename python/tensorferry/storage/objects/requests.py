"""Requests to object stores: one deadline for all of an operation, an end at Ctrl-C, and errors that name the object.

The client makes a request again after 5xx, 429 and lost connections, with growing pauses, and gives up one that has
stalled (``client.py``). Here is what it does not do: nothing outlives the deadline of the operation, and what the store
said is told without its URL, which may hold what is secret.
"""

from __future__ import annotations

import contextlib
import errno
import re
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import (
    ConnectError,
    FetchTimeout,
    IncompleteCheckpoint,
    SourceChanged,
    StoreRefused,
    SystemRefused,
    TensorferryError,
    TransferCancelled,
)
from . import client
from .url import without_secrets

if TYPE_CHECKING:
    import concurrent.futures  # It takes long: what needs it imports it.

#: Seconds after the deadline in which a request that was told to end does so.
_LATE_S = 1.0
#: How often a wait for a request looks for signals, and whether the request has to end.
LOOK_S = 0.2
_LONGEST = 600
#: Which of the library's classes the builtin ones stand for that it raises instead.
_BUILTIN: dict[type[BaseException], str] = {
    FileNotFoundError: "NotFoundError",
    FileExistsError: "AlreadyExistsError",
    PermissionError: "PermissionDeniedError",
    NotImplementedError: "NotImplementedError",
}
#: What is refused by the system of this machine, and how Python says that it can start no thread.
_OF_SYSTEM = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_NO_THREAD = "can't start new thread"
_NO_BUCKET = re.compile(r"\b(?:NoSuchBucket|ContainerNotFound|The specified bucket does not exist)\b")
_PART = re.compile(r"[?&](?:partNumber|partnumber)=(\d{1,6})|[?&]blockid=")
_STATUS = re.compile(r"\b(?:status|status code|Server returned [a-z -]*error[a-z ]*)\W{1,3}(\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z0-9._-]{1,80})</Code>")
_SAID = re.compile(r"<Message>([^<]{1,300})</Message>")
_LOST = re.compile(
    r"error sending request|HTTP error: (?:connection|request) error|connection (?:refused|reset|closed)"
    r"|client error \(Connect\)|response body error|error decoding response body|unexpected eof|dns error"
    r"|error trying to connect|IncompleteMessage|tcp connect",
    re.IGNORECASE,
)
_SLOW = re.compile(r"operation timed out|HTTP error: timeout|\btimed out\b", re.I)

_T = TypeVar("_T")


class Unsupported(StoreRefused):
    """The store says that it does not have what a request asks for, such as conditional writes."""


class Deadline:
    """When an operation has to be over.

    Args:
        seconds: how long it may take from now on
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._is_over = False
        self._calls: weakref.WeakSet[Calls] = weakref.WeakSet()

    def add(self, calls: Calls) -> None:
        """These requests belong to the operation, and end with it."""
        with self._lock:
            self._calls.add(calls)
            is_over = self._is_over
        if is_over:
            calls.cancel()

    def end(self) -> None:
        """Ends the operation now, with all its requests, and those that would begin later."""
        with self._lock:
            self._is_over = True
            under_way = list(self._calls)
        for calls in under_way:
            calls.cancel()

    @property
    def is_long_past(self) -> bool:
        """Whether even a request that was told to end at the deadline must have done so."""
        return time.monotonic() > self._end + _LATE_S

    def left(self) -> float:
        """Returns how many seconds are left, at least 0."""
        return max(self._end - time.monotonic(), 0.0)


class Calls:
    """The requests of one operation, which end together.

    Args:
        deadline: when all of them have to be over
    """

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self._lock = threading.Lock()
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._is_cancelled = False
        deadline.add(self)

    def begin(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> concurrent.futures.Future[_T]:
        """Begins a request in the thread of all requests.

        Raises:
            TransferCancelled: the operation was cancelled
            ForkedProcess, SystemRefused: as for :func:`client.loop`
        """
        import asyncio

        left, loop = self.deadline.left(), client.loop()

        async def within() -> _T:
            async with asyncio.timeout(left):
                return await make()

        with self._lock:
            if self._is_cancelled:
                raise TransferCancelled("the operation was cancelled")
            future = asyncio.run_coroutine_threadsafe(within(), loop)
            self._running.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._running.discard(future)

    def call(self, make: Callable[[], Coroutine[Any, Any, _T]], name: str, what: str) -> _T:
        """Makes a request and waits for it.

        Args:
            make: makes the coroutine
            name: the URL of the object, for messages
            what: what is done, for messages: "reading it"

        Raises:
            IncompleteCheckpoint: there is no such object
            TensorferryError: as for :meth:`begin` and :meth:`finish`
        """
        return self.finish(self.begin(make), name, what)

    def finish(
        self,
        future: concurrent.futures.Future[_T],
        name: str,
        what: str,
        watch: Callable[[], object] | None = None,
    ) -> _T:
        """Waits for a request that has begun; ``watch`` is called now and then, and its exception ends the request.

        Raises:
            TransferCancelled: the request was cancelled
            TensorferryError: what :func:`translated` makes of an exception of the request, or of ``watch``
            BaseException: any other exception of these, and that of a signal handler
        """
        from concurrent.futures import CancelledError
        from concurrent.futures import TimeoutError as NotYet

        try:
            while True:
                # Without a limit, a signal would not wake the main thread of every system.
                try:
                    return future.result(LOOK_S)
                except NotYet:
                    if future.done():
                        # It may have ended just now, with a result or with a time-out of its own.
                        return future.result()
                if watch is not None:
                    watch()
                if self.deadline.is_long_past and not future.done():
                    raise TimeoutError
        except BaseException as e:
            future.cancel()
            if isinstance(e, CancelledError):
                raise TransferCancelled(f"{name}: {what} was cancelled") from None
            if isinstance(e, TensorferryError) or not isinstance(e, Exception):
                raise
            if (told := translated(e, name, what, self.deadline)) is not None:
                raise told from None
            raise

    def cancel(self) -> None:
        """Ends all requests, and those that would begin later."""
        with self._lock:
            self._is_cancelled = True
            running = list(self._running)
        for future in running:
            future.cancel()


def translated(error: Exception, name: str, what: str, deadline: Deadline) -> Exception | None:
    """Returns the error of this package for one of the client's library, or for lack of time; ``None`` for others.

    Errors that say that this process has no memory, descriptor or thread are among them.

    Args:
        error: what a request has raised
        name: the URL of the object
        what: what was done
        deadline: that of the operation
    """
    if isinstance(error, TimeoutError):
        if deadline.left() > 0:
            return FetchTimeout(f"{name}: {what}: the store has sent nothing for too long")
        return FetchTimeout(f"{name}: {what} was not over within {deadline.seconds:g} s")
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in _OF_SYSTEM or str(error) == _NO_THREAD:
        return SystemRefused(f"{name}: {what}: {error or 'there is no memory'}")
    kind = next((c.__name__ for c in type(error).__mro__ if c.__module__.startswith("obstore")), None)
    kind = _BUILTIN.get(type(error), kind)
    if kind is None:
        return None
    # Some messages begin with the key, whose words say nothing.
    text = str(error).replace(f" {name.partition('://')[2].partition('/')[2]}", "", 1)
    where, said = f"{name}{part_of(text)}", what_was_said(text)
    match kind:
        case "NotFoundError":
            if _NO_BUCKET.search(said):
                return StoreRefused(f"{where}: {what}: the store has no such bucket: {said}")
            return IncompleteCheckpoint(f"{where}: there is no such object")
        case "PermissionDeniedError" | "UnauthenticatedError":
            return StoreRefused(
                f"{where}: {what}: the store does not permit it: {said}. Check the credentials in the environment, and "
                "what they may do with this bucket"
            )
        case "PreconditionError" | "AlreadyExistsError" | "NotModifiedError":
            return SourceChanged(f"{where}: {what}: another writer has changed it meanwhile")
    if deadline.left() <= 0:
        return FetchTimeout(f"{where}: {what} was not over within {deadline.seconds:g} s; the store said last: {said}")
    if _STATUS.search(said) is None and _SLOW.search(said):
        return FetchTimeout(f"{where}: {what}: the store has stalled: {said}")
    if _STATUS.search(said) is None and _LOST.search(said):
        return ConnectError(f"{where}: {what}: the store cannot be reached: {said}")
    kind_of_refusal = Unsupported if _is_unsupported(kind, text) else StoreRefused
    return kind_of_refusal(f"{where}: {what}: the store refuses: {said}")


def _is_unsupported(kind: str, text: str) -> bool:
    """Whether an error of the client's class ``kind`` says that the store does not have what was asked for."""
    if kind in ("NotSupportedError", "NotImplementedError"):
        return True
    # The library has no class for it. Its words about the status come first, and behind them what the store has sent.
    status = _STATUS.search(without_urls(text.partition(client.DEBUG)[0]))
    return kind == "GenericError" and status is not None and status[1] == "501"


def is_missing(error: Exception) -> bool:
    """Whether a request has failed because there is no such object."""
    return isinstance(error, IncompleteCheckpoint) and str(error).endswith("there is no such object")


def is_not_found(error: Exception) -> bool:
    """Whether the client's library says that there is no such object."""
    return type(error).__name__ in ("NotFoundError", "FileNotFoundError")


def part_of(text: str) -> str:
    """Returns which part of an object a message of the client is about, for a message; empty if it says none."""
    found = _PART.search(text)
    return f", part {found[1]}" if found is not None and found[1] else ""


def what_was_said(text: str) -> str:
    """Returns what the client tells of an answer, on one line and without URLs."""
    code, said = _CODE.search(text), _SAID.search(text)
    text = text.partition(client.DEBUG)[0]
    status = _STATUS.search(without_urls(text))
    if code is not None:
        told = f"{code[1]}{f' ({without_secrets(said[1].strip())})' if said else ''}"
        return f"status {status[1]}, {told}" if status else told
    return " ".join(without_urls(text).split())[:_LONGEST]


def without_urls(text: str) -> str:
    """Returns ``text`` without any URL, whose words say nothing about an error."""
    return re.sub(r"[a-zA-Z][a-zA-Z0-9+.-]{0,20}://[^\s\"'<>)]*", "the store", text)


@contextlib.contextmanager
def ending(calls: Calls) -> Any:
    """Ends all requests of ``calls`` if the block fails."""
    try:
        yield
    except BaseException:
        calls.cancel()
        raise
