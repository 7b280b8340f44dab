"""The event loop of the client's requests, to which the client's own threads hand their results."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable
from contextvars import Context
from typing import Any, cast

#: Seconds that an exit waits for a thread that is handing over a result, and for others to be let go by.
_MOST_S, _MOMENT_S = 1.0, 0.02
#: Seconds in which the client's threads, which cannot be seen, are through with a request that was cancelled.
_CANCELLED_S = 0.5


class _Result(asyncio.Future[Any]):
    """What a request will bring."""

    def cancel(self, msg: Any = None) -> bool:
        """Cancels the request, whoever asks for it: a caller or a deadline."""
        if is_cancelled := super().cancel(msg):
            cast(Loop, self.get_loop()).cancelled = time.monotonic()
        return is_cancelled


class Loop(asyncio.SelectorEventLoop):
    """Knows the threads that are handing something over, and when a request was cancelled last."""

    def __init__(self) -> None:
        super().__init__()
        self.handing_over: set[int] = set()
        self.cancelled = -_CANCELLED_S

    def create_future(self) -> asyncio.Future[Any]:
        """Makes what a request, or one of :mod:`asyncio` that waits for several, will bring."""
        return _Result(loop=self)

    def call_soon_threadsafe(  # type: ignore[override]  # The types of its arguments are the caller's business.
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Does what that of all loops does."""
        self.handing_over.add(thread := threading.get_ident())
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        finally:
            self.handing_over.discard(thread)


def new_loop() -> Loop:
    """Makes a loop. The interpreter does not begin to exit while a thread of the client hands a result to it.

    Such a thread wakes the loop and then needs the interpreter once more. Before Python 3.14, a thread that was not
    started by Python, and comes to an interpreter which is being finalized, ends the process with a signal.
    """
    loop, process = Loop(), os.getpid()

    def wait() -> None:
        if os.getpid() == process:
            until = time.monotonic() + _MOST_S
            while loop.handing_over and time.monotonic() < until:
                time.sleep(0.001)
            is_through = threading.Event()
            # What a caller has cancelled is cancelled in the loop, a little later.
            loop.call_soon_threadsafe(is_through.set)
            is_through.wait(_MOST_S)
            time.sleep(_MOMENT_S)
            time.sleep(max(0, loop.cancelled + _CANCELLED_S - time.monotonic()))

    atexit.register(wait)
    return loop
