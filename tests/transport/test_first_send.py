"""The first transport of a process prepares what its first send needs; nobody sees it, and nothing is left of it."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from equality import assert_same_state
from exchange import TIMEOUT, receive, small_state
from tensorferry.torchft import first_send

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.timeout(90), pytest.mark.beyond_torchft]


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_send, "_prepared", set())


@pytest.mark.usefixtures("unprepared")
def test_it_is_done_once_for_each_kind_of_snapshot(
    open_transport: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, taken = [], first_send.StateSnapshot

    def noted(state: Any, stager: Any, snapshot: Any) -> Any:
        sent.append(snapshot)
        return taken(state, stager, snapshot)

    monkeypatch.setattr(first_send, "StateSnapshot", noted)
    for snapshot in ("borrow", "copy"):
        open_transport(snapshot=snapshot)
        prepared = len(sent)
        assert sent.count(snapshot) > 0
        open_transport(snapshot=snapshot)
        assert len(sent) == prepared


@pytest.mark.usefixtures("unprepared")
def test_nobody_is_served_it_and_nothing_is_left(
    open_transport: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelves, storages = [], []
    example = first_send._example

    def watched() -> dict[str, Any]:
        state = example()
        storages.append(weakref.ref(state["user"]["default"]["list"][0].untyped_storage()))
        return state

    def watched_send(shelf: Any, *rest: Any) -> None:
        shelves.append(shelf)
        send(shelf, *rest)

    send = first_send._send
    monkeypatch.setattr(first_send, "_example", watched)
    monkeypatch.setattr(first_send, "_send", watched_send)
    transport = open_transport()
    assert "serving nothing" in repr(transport)
    assert transport._step == -1
    with pytest.raises(Exception, match="this shelf is closed"):
        shelves[0].url("localhost")
    gc.collect()
    assert [storage() for storage in storages] == [None]


@pytest.mark.usefixtures("unprepared")
def test_where_it_fails_the_first_send_does_without(
    open_transport: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("no tensors here")

    monkeypatch.setattr(first_send, "_example", fails)
    source = open_transport()
    source.send_checkpoint([1], 1, small_state(), TIMEOUT)
    assert_same_state(receive(open_transport(), source, 1), small_state())


@pytest.mark.usefixtures("unprepared")
def test_a_mode_in_which_tensors_have_no_memory_is_no_obstacle(open_transport: Callable[..., Any]) -> None:
    with torch._subclasses.FakeTensorMode():
        source = open_transport()
    source.send_checkpoint([1], 1, small_state(), TIMEOUT)
    assert_same_state(receive(open_transport(), source, 1), small_state())
