"""Calls in threads have ended when the caller has its memory back."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

import pytest

from tensorferry.storage.threads import call_in_threads

pytestmark = pytest.mark.timeout(60)


class Memory:
    """What calls write to."""


def test_results_come_in_order_and_by_so_many_threads():
    names = []

    def call(number):
        names.append(threading.current_thread().name)
        return number

    assert call_in_threads([lambda n=n: call(n) for n in range(20)], 3, lambda: None) == list(range(20))
    assert set(names) <= {"tensorferry-read"}
    assert call_in_threads([], 3, lambda: None) == []


@pytest.mark.parametrize("presses", [1, 2, 5])
def test_no_call_goes_on_after_interrupts(presses):
    began, stopped, ended = threading.Barrier(3), threading.Event(), []

    def call():
        began.wait(30)
        stopped.wait(30)
        # It takes a while to end.
        for _ in range(presses):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(0.05)
        ended.append(threading.current_thread())

    def press():
        began.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        call_in_threads([call, call, pytest.fail], 2, stopped.set)
    assert len(ended) == 2
    pressing.join()


def test_the_first_error_ends_the_others_and_holds_no_memory():
    stopped, memory = threading.Event(), Memory()
    is_there = weakref.ref(memory)

    def fail(_):
        raise ZeroDivisionError

    def load(memory):
        calls = [lambda: stopped.wait(30), lambda: fail(memory), pytest.fail]
        call_in_threads(calls, 2, stopped.set)

    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError) as raised:
            load(memory)
        del memory, raised
        assert is_there() is None
    finally:
        gc.enable()
