"""The pool of host buffers, where the garbage collector and other threads give buffers back at any moment."""

from __future__ import annotations

import threading

import pytest

from tensorferry.memory.host_pool import HostMemory, HostPool

pytestmark = pytest.mark.beyond_torchft


def test_the_collector_may_give_a_buffer_back_while_the_same_thread_takes_one() -> None:
    pool = HostPool(HostMemory(None))
    cycle = [pool.take(100)]

    def collected() -> None:
        # Where take() is when a collection finds the cycle.
        with pool._lock:
            cycle.clear()

    taking = threading.Thread(target=collected, daemon=True)
    taking.start()
    taking.join(10)
    assert not taking.is_alive(), "the collector waits for the lock of the thread it runs in"
    (kept,) = pool._kept
    again = pool.take(100)
    assert again.memory is kept


def test_what_fits_is_kept_and_nothing_is_kept_after_the_end() -> None:
    pool = HostPool(HostMemory(None))
    buffers = [pool.take(1 << 22) for _ in range(3)]
    places = {buffer.memory.data_ptr() for buffer in buffers}
    buffers.clear()
    one = pool.take(1 << 22)
    assert one.memory.data_ptr() in places
    assert len(pool._kept) == 2
    large = pool.take(1 << 26)
    assert not pool._kept, "a state hardly changes in size: what does not fit now is dropped"
    pool.close()
    del one, large
    assert not pool._kept
