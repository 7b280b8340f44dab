"""Calls in several threads, which write to memory of their caller: none goes on once the caller has it back."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future  # It takes long: what needs it imports it.

_T = TypeVar("_T")

#: How often a wait looks for signals, in seconds.
_LOOK_S = 0.2


def call_in_threads(
    calls: Sequence[Callable[[], _T]], threads: int, stop: Callable[[], object], name: str = "tensorferry-read"
) -> list[_T]:
    """Makes calls in up to so many threads; returns their results, in the order of ``calls``.

    Once one has failed, or a signal handler has raised, ``stop`` is called, and no further call begins. None of them
    goes on when this returns or raises, whatever signals come meanwhile.

    Args:
        calls: what is called
        threads: how many threads there are at most
        stop: has the calls that are under way end soon
        name: the name of the threads

    Raises:
        BaseException: the exception of the first call that has failed, or that of a signal handler
    """
    from concurrent.futures import FIRST_EXCEPTION, Future, wait

    futures: list[Future[_T]] = [Future() for _ in calls]
    jobs: queue.SimpleQueue[tuple[Future[_T], Callable[[], _T]]] = queue.SimpleQueue()
    for job in zip(futures, calls, strict=True):
        jobs.put(job)

    def end() -> None:
        stop()
        wait([future for future in futures if not future.cancel()])

    try:
        for _ in range(min(threads, len(calls))):
            threading.Thread(target=_work, args=(jobs,), name=name, daemon=True).start()
        waiting: set[Future[_T]] = set(futures)
        while waiting:
            # A signal that comes just before a wait without a limit would not end it.
            waiting = wait(futures, _LOOK_S, FIRST_EXCEPTION).not_done
            for future in futures:
                if future.done():
                    future.result()
        return [future.result() for future in futures]
    except BaseException:
        uninterrupted(end)
        raise
    finally:
        # An exception that is raised here would hold itself, and the memory of all calls, by its traceback.
        futures.clear()
        future = None  # type: ignore[assignment]


def _work(jobs: queue.SimpleQueue[tuple[Future[_T], Callable[[], _T]]]) -> None:
    """Makes calls, in a thread, until there is none left."""
    with contextlib.suppress(queue.Empty):
        while True:
            future, call = jobs.get_nowait()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as e:  # A panic of native code, too.
                    future.set_exception(e)
            del future, call


def uninterrupted(wait: Callable[[], object]) -> None:
    """Calls ``wait`` until it has returned once; then raises what signal handlers have raised meanwhile.

    ``wait`` itself raises nothing.
    """
    interrupt: BaseException | None = None
    is_over = False
    while not is_over:
        # Twice, because the next signal may come between the blocks.
        try:
            try:
                wait()
                is_over = True
            except BaseException as e:
                interrupt = e
        except BaseException as e:
            interrupt = e
    if interrupt is not None:
        raise interrupt
