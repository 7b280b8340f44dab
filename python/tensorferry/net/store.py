"""The store of a process group, asked by a thread of its own.

While the process that hosts a store is stopped, whoever asks it waits, whatever time-out the store was made with. The
thread waits instead; those who need an answer wait for the thread, as long as they like.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

#: How long the end of the process waits for stores. Until Python 3.14, a thread that comes back from torch's C++ while
#: the interpreter ends aborts the process, which then looks like one that has failed.
_EXIT_PATIENCE = 8.0

_Order: TypeAlias = tuple[Future[Any], Callable[[], Any]]


_unanswered: set[Future[Any]] = set()
# A forked child has none of the threads.
os.register_at_fork(after_in_child=_unanswered.clear)


@atexit.register
def _wait_for_answers() -> None:
    wait(list(_unanswered), _EXIT_PATIENCE)


class StoreThread:
    """Calls functions that ask a store, one after the other; the thread begins with the first of them.

    One thread at a time asks. In a child that was forked after the first call, nothing is answered.
    """

    def __init__(self) -> None:
        self._orders: SimpleQueue[_Order | None] | None = None

    def ask(self, call: Callable[[], T]) -> Future[T]:
        """Returns the future result of ``call``, which is called after those that were given before."""
        if self._orders is None:
            orders: SimpleQueue[_Order | None] = SimpleQueue()
            # A daemon, since it may wait for ever.
            threading.Thread(target=_serve, args=(orders,), name="tensorferry-store", daemon=True).start()
            # Only now: where no thread could be started, the next question tries again.
            self._orders = orders
            weakref.finalize(self, orders.put, None)
        answer: Future[T] = Future()
        _unanswered.add(answer)
        answer.add_done_callback(_unanswered.discard)
        self._orders.put((answer, call))
        return answer


def _serve(orders: SimpleQueue[_Order | None]) -> None:
    """Makes the calls that were ordered, one after the other, in the thread; ends at ``None``."""
    while (order := orders.get()) is not None:
        answer, call = order
        # From here on it cannot be cancelled.
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(call())
            except BaseException as e:
                answer.set_exception(e)
        # What was called may hold the store, or the thread's owner.
        del order, answer, call
