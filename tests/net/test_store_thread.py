"""The thread that asks the store of a process group."""

from __future__ import annotations

import threading

import pytest

from tensorferry.net.store import StoreThread

WAIT_S = 10


def test_after_a_thread_could_not_be_started_the_next_question_is_answered(monkeypatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    asked = StoreThread()
    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            asked.ask(lambda: 1)
    assert asked.ask(lambda: 2).result(WAIT_S) == 2


def test_a_question_that_was_cancelled_is_not_asked_and_the_next_is_answered() -> None:
    asked, goes_on = StoreThread(), threading.Event()
    first = asked.ask(lambda: goes_on.wait(WAIT_S))
    calls: list[int] = []
    second = asked.ask(lambda: calls.append(1))
    assert second.cancel()
    goes_on.set()
    assert asked.ask(lambda: 3).result(WAIT_S) == 3
    assert first.result(0)
    assert calls == []
    # One that is being answered cannot be cancelled.
    begun, goes_on = threading.Event(), threading.Event()
    third = asked.ask(lambda: begun.set() or goes_on.wait(WAIT_S))
    assert begun.wait(WAIT_S)
    assert not third.cancel()
    goes_on.set()
    assert third.result(WAIT_S)
