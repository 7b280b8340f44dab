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
