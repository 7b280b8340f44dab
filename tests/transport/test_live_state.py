"""A receive into the live state that fails midway: the state is neither sent on nor trained with."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch

from tensorferry import StateMismatch, TensorferryError
from tensorferry.errors import HalfReceived, InvalidArgument

SECONDS = timedelta(seconds=20)
SIZE = 4 << 20

pytestmark = pytest.mark.beyond_torchft


class Broken(Exception):
    """What ends a receive in the middle."""


class Pair:
    """A source, and a receiver with a live state, whose receives fail midway while `fails` is set."""

    def __init__(self, open_transport, **target):
        self.fails = True
        self.live = {"w": torch.zeros(SIZE)}
        self.source = open_transport(interface="127.0.0.1")
        about = {"state_dict": lambda: self.live, "interface": "127.0.0.1", "progress": self._progress} | target
        self.target = open_transport(**about)

    def _progress(self, done, _all):
        if self.fails and done:
            raise Broken

    def send(self, step=1, **state):
        self.source.send_checkpoint([1], step, state or {"w": torch.ones(SIZE)}, SECONDS)

    def receive(self, step=1):
        return self.target.recv_checkpoint(0, self.source.metadata(), step, SECONDS)

    def fail(self):
        self.send()
        with pytest.raises(Broken):
            self.receive()


@pytest.fixture
def pair(open_transport):
    return Pair(open_transport)


def test_a_half_received_state_is_not_trained_with(pair, caplog):
    caplog.set_level(logging.ERROR, "tensorferry")
    pair.fail()
    assert "some of its tensors may have new values" in caplog.text
    # torchft ends the step in which the receive failed like any other one, and does not commit it.
    pair.target.disallow_checkpoint()
    with pytest.raises(HalfReceived, match=r"step 1 failed \(Broken: .*accept_live_state\(\)"):
        pair.target.disallow_checkpoint()
    # It stays so.
    with pytest.raises(HalfReceived):
        pair.target.disallow_checkpoint()


def test_it_is_not_sent_to_others_and_what_was_published_is_withdrawn(pair):
    pair.target.send_checkpoint([0], 0, pair.live, SECONDS)
    for _ in range(3):
        # Each receive that fails is given its step.
        pair.fail()
        with pytest.raises(HalfReceived):
            pair.target.send_checkpoint([0], 1, pair.live, SECONDS)
        pair.target.disallow_checkpoint()
        assert pair.target._disallowed


@pytest.mark.parametrize("how", ["a complete receive", "who loads a checkpoint"])
def test_what_mends_it(how, pair):
    pair.fail()
    pair.target.disallow_checkpoint()
    if how == "a complete receive":
        pair.fails = False
        pair.receive()
        assert torch.equal(pair.live["w"], torch.ones(SIZE))
    else:
        pair.target.accept_live_state()
    pair.target.disallow_checkpoint()
    pair.target.disallow_checkpoint()
    pair.target.send_checkpoint([0], 1, pair.live, SECONDS)


@pytest.mark.parametrize("stock", [False, True])
def test_a_complete_receive_mends_what_it_overwrites_alone(stock, open_transport, open_stock):
    """As `a` and `b` may be half written, and a source without `b` brings `a` alone."""
    pair = Pair(open_transport)
    pair.live = {"a": torch.zeros(SIZE), "b": torch.zeros(SIZE)}
    pair.send(a=torch.ones(SIZE), b=torch.ones(SIZE))
    with pytest.raises(Broken):
        pair.receive()
    pair.target.disallow_checkpoint()
    pair.fails = False
    source = pair.source
    pair.source = open_stock() if stock else open_transport(interface="127.0.0.1")
    pair.send(2, a=torch.full((SIZE,), 2.0))
    pair.receive(2)
    for refused in (
        lambda: pair.target.send_checkpoint([0], 2, pair.live, SECONDS),
        pair.target.disallow_checkpoint,
        pair.target.disallow_checkpoint,
    ):
        with pytest.raises(HalfReceived, match=r"step 1 failed \(Broken: .*so that b may have"):
            refused()
    pair.source.disallow_checkpoint()
    # What is left comes later.
    pair.source = source
    pair.send(3, b=torch.ones(SIZE))
    pair.receive(3)
    pair.target.disallow_checkpoint()
    pair.target.send_checkpoint([0], 3, pair.live, SECONDS)


def test_receives_that_write_nothing_change_nothing(pair):
    pair.send(w=torch.ones(3))
    with pytest.raises(StateMismatch, match="nothing was overwritten"):
        pair.receive()
    pair.source.disallow_checkpoint()
    with pytest.raises(TensorferryError):
        pair.target.recv_checkpoint(0, "http://127.0.0.1:9/nobody/checkpoint/", 1, timedelta(seconds=1))
    pair.target.disallow_checkpoint()
    pair.target.disallow_checkpoint()


def test_nor_do_receives_into_fresh_memory(open_transport):
    pair = Pair(open_transport, state_dict=None)
    pair.fail()
    pair.target.disallow_checkpoint()
    pair.target.disallow_checkpoint()
    pair.target.send_checkpoint([0], 1, pair.live, SECONDS)


@pytest.mark.parametrize("stock", [False, True])
def test_what_does_not_fit_comes_into_fresh_memory_where_it_may(stock, open_transport, open_stock, caplog):
    pair = Pair(open_transport, state_dict=None, progress=None)
    pair.source = open_stock() if stock else pair.source
    pair.target.receive_into(lambda: pair.live())
    fits = {"w": torch.zeros(SIZE)}
    for live, in_place, said in (
        (lambda: fits, True, ""),
        (lambda: {"w": torch.zeros(3)}, False, "does not fit into this one; the leaves that differ: w"),
        (lambda: None, False, ""),
        (lambda: 1 / 0, False, "ZeroDivisionError"),
    ):
        caplog.clear()
        pair.live = live
        pair.send()
        received = pair.receive()["w"]
        assert received.eq(1).all()
        assert (received is fits["w"]) is in_place
        assert ("receiving into fresh memory: " in caplog.text) is bool(said)
        assert said in caplog.text
        pair.source.disallow_checkpoint()


def test_a_later_receive_that_finds_no_source_is_given_its_step_and_mends_nothing(pair):
    pair.fail()
    pair.target.disallow_checkpoint()
    with pytest.raises(TensorferryError):
        pair.target.recv_checkpoint(0, "http://127.0.0.1:9/nobody/checkpoint/", 1, timedelta(seconds=1))
    pair.target.disallow_checkpoint()
    with pytest.raises(HalfReceived):
        pair.target.disallow_checkpoint()


def test_a_second_receive_into_it_is_refused_while_the_first_is_under_way(open_transport):
    """Both would write to the same tensors, and leave a mixture."""
    refused = []

    def again(_done, _all):
        if not refused:
            with pytest.raises(InvalidArgument, match="another receive into the live state is under way") as raised:
                pair.target.recv_checkpoint(0, other.metadata(), 2, SECONDS)
            refused.append(raised.value)

    pair = Pair(open_transport, progress=again)
    other = open_transport(interface="127.0.0.1")
    other.send_checkpoint([1], 2, {"w": torch.full((SIZE,), 2.0)}, SECONDS)
    pair.send()
    assert torch.equal(pair.receive()["w"], torch.ones(SIZE))
    assert refused
    # It is refused no longer, and nothing is left of it.
    pair.target.disallow_checkpoint()
    assert pair.target.recv_checkpoint(0, other.metadata(), 2, SECONDS)["w"][0] == 2
    pair.target.send_checkpoint([0], 1, pair.live, SECONDS)


@pytest.mark.parametrize(("stock", "raised"), [(False, KeyboardInterrupt), (True, Broken)])
def test_a_log_filter_that_raises_at_the_end_of_a_receive_leaves_a_whole_state(
    stock, raised, open_transport, open_stock
):
    def fails(record):
        if record.getMessage().startswith("received step"):
            raise raised
        return True

    pair = Pair(open_transport, progress=None)
    if stock:
        pair.source = open_stock()
    logger, level = logging.getLogger("tensorferry"), logging.getLogger("tensorferry").level
    logger.setLevel(logging.INFO)
    logger.addFilter(fails)
    try:
        pair.send()
        with pytest.raises(raised):
            pair.receive()
    finally:
        logger.removeFilter(fails)
        logger.setLevel(level)
        pair.source.disallow_checkpoint()
    assert pair.live["w"].eq(1).all()
    for _ in range(2):
        pair.target.disallow_checkpoint()
    pair.target.send_checkpoint([0], 1, pair.live, SECONDS)
