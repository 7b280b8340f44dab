"""Requests to object stores: one deadline for all of an operation, an end at Ctrl-C, and errors that name the object.

The client makes a request again after 5xx, 429 and lost connections, with growing pauses, and gives up one that has
stalled (``client.py``). Here is what it does not do: nothing outlives the deadline of the operation.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import TensorferryError, TransferCancelled
from . import client
from .answers import translated

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures  # It takes long: what needs it imports it.

#: Seconds after the deadline in which a request that was told to end does so.
_LATE_S = 1.0
#: How often a wait for a request looks for signals, and whether the request has to end.
LOOK_S = 0.2
_T = TypeVar("_T")


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
        by: makes them, once the store has answered it
    """

    def __init__(self, deadline: Deadline, by: client.Client | None = None) -> None:
        self.deadline = deadline
        self._client = by
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
            task = asyncio.current_task()
            assert task is not None
            task.add_done_callback(_take_exception)
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
            TensorferryError: what :func:`answers.translated` makes of an exception of the request, or of ``watch``
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
            deadline = self.deadline
            error = translated(e, name, what, client=self._client, seconds=deadline.seconds, left=deadline.left())
            if error is not None:
                raise error from None
            raise

    def cancel(self) -> None:
        """Ends all requests, and those that would begin later."""
        with self._lock:
            self._is_cancelled = True
            running = list(self._running)
        for future in running:
            future.cancel()


def _take_exception(task: asyncio.Task[Any]) -> None:
    """Has the loop not complain of an exception that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


@contextlib.contextmanager
def ending(calls: Calls) -> Any:
    """Ends all requests of ``calls`` if the block fails."""
    try:
        yield
    except BaseException:
        calls.cancel()
        raise
